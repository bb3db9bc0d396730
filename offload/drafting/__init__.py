"""Drafters: sources of token trees."""
