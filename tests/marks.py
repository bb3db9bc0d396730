"""Where tensors of a test of kernels lie, and what else a test needs."""

import pytest
import torch

from offload.kernels.jit import HAS_TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_DEVICE = [pytest.mark.gpu] if DEVICE == "cuda" else []  # on a GPU tests of kernels are tests of the GPU
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
needs_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="needs tensors on the CPU")
needs_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
