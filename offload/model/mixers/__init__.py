"""Mixers of our own: what a layer does across rows, where that has to follow token trees."""
