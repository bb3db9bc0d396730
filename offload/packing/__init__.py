"""Lossless coding of 16-bit weights: the file format, packing, unpacking, forecasts."""
