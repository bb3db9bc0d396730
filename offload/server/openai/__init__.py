"""OpenAI's protocol: chat, completions and responses."""
