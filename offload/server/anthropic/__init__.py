"""Anthropic's protocol: messages, and counts of their tokens."""
