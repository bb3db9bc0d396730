"""What every test takes for granted: no network, silent libraries, one thread (ten times faster for tiny products)."""

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch

if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined, so it must stand before any test imports one.
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)

# Shells start background jobs with SIGINT ignored, and children inherit that; tests of Ctrl-C must not depend on it.
signal.signal(signal.SIGINT, signal.default_int_handler)
