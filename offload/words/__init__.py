"""The form of a model's own words: thoughts, channels and calls of tools, in what it writes."""
