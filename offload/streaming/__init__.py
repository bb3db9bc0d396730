"""How bytes reach the place that computes: disk, pinned memory, devices, slots."""
