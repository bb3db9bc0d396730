"""What is measured at start: the link, compute times, kernels; and estimates made from it."""
