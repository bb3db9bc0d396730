"""What is measured at start: the link, compute times, kernels, and whether sums keep their bits."""
