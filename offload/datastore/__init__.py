"""Continuations of what a text ends with, looked up in a corpus of tokens."""
