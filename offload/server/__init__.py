"""OpenAI's and Anthropic's protocols over HTTP for an engine, with a few extensions."""
