"""The forward pass of transformers over lent weights: target, caches, attention, recordings."""
