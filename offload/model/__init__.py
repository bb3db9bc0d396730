"""The forward pass of transformers over weights that are lent: target, caches, attention,
recordings.
"""
