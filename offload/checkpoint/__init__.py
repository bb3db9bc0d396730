"""Checkpoints read by their headers: safetensors, hub, layouts, sizes, inflation."""
