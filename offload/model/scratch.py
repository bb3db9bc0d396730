"""Room that calls compute in one after another: mapping fresh memory takes longer than products."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNED = 64  # numbers: what is taken begins at a multiple


class Scratch:
    """Room for the numbers of one call, and then for those of the next.

    Args:
        most_bytes: that it keeps; what is asked for beyond is allocated.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes // 4
        self._numbers = torch.empty(0, dtype=torch.float32)
        self._num_taken = 0

    def begin(self) -> None:
        """Let everything taken before be overwritten."""
        wanted = min(self._most, self._num_taken)
        if wanted > len(self._numbers):
            # within and outside of it numbers may be written there
            with torch.inference_mode(False):
                self._numbers = torch.empty(wanted, dtype=torch.float32)
        self._num_taken = 0

    def whole(self, num: int) -> Tensor:
        """Return at least so many uninitialised numbers, alone."""
        if num > len(self._numbers):
            self._num_taken = num
            self.begin()
        is_enough = num <= len(self._numbers)
        return self._numbers if is_enough else torch.empty(num, dtype=torch.float32)

    def take(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return uninitialised numbers in float32."""
        lo = self._num_taken
        num = math.prod(shape)
        self._num_taken += num + -num % _ALIGNED
        if device.type != "cpu" or lo + num > len(self._numbers):
            return torch.empty(shape, dtype=torch.float32, device=device)
        return self._numbers[lo : lo + num].view(shape)
