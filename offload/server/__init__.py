"""OpenAI's protocol over HTTP in front of an engine, with what only this program can tell beside
it.
"""
