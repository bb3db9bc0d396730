"""DFlash 2's short convolutions around a layer's attention and its feed-forward.

Every row of a block is mixed with the rows before it, on the way in and on the way out, by a kernel
that is stored and a part that the row itself adds for each group of channels. Rows of committed
tokens take no part. Source: z-lab/dflash at 1012959, `GroupedDynamicCausalConv`.

Shape letters, in this file only: T rows of a pass, C taps of a kernel, G groups of channels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from offload.drafting.head_model import empty_linear

# returns which rows (1, T, 1) of the pass that runs are a block's
InBlock = Callable[[], Tensor]


class BlockConvolution(nn.Module):
    """The convolution before a sublayer, and the one behind it."""

    _added_1TCG: Tensor

    def __init__(self, width: int, num_taps: int, num_groups: int, dtype: torch.dtype) -> None:
        super().__init__()
        empty = torch.empty(2, num_taps, width, device="meta", dtype=dtype)
        self.base_kernel = nn.Parameter(empty, requires_grad=False)
        self.kernel_projection = empty_linear(width, 2 * num_taps * num_groups, dtype)

    def surround(self, norm: nn.Module, sublayer: nn.Module, in_block: InBlock) -> None:
        """Convolve what a norm gives to a sublayer, and what that makes of it."""
        norm.register_forward_hook(lambda _, __, normed_1TD: self._enter(normed_1TD, in_block()))
        sublayer.register_forward_hook(lambda _, __, out: self._leave(out, in_block()))

    def _enter(self, normed_1TD: Tensor, in_block_1T1: Tensor) -> Tensor:
        num_taps = self.base_kernel.shape[1]
        added = self.kernel_projection(normed_1TD).unflatten(-1, (2, num_taps, -1))
        self._added_1TCG = added[:, :, 1]
        return _convolved(normed_1TD * in_block_1T1, self.base_kernel[0], added[:, :, 0])

    def _leave(self, out: Any, in_block_1T1: Tensor) -> Any:
        if isinstance(out, tuple):
            return (self._leave(out[0], in_block_1T1), *out[1:])
        return _convolved(out * in_block_1T1, self.base_kernel[1], self._added_1TCG)


def _convolved(rows_1TD: Tensor, kernel_CD: Tensor, added_1TCG: Tensor) -> Tensor:
    """Return each row's sum of itself and those before it, each times its own factors."""
    num_groups = added_1TCG.shape[-1]
    out_1TGg = torch.zeros_like(rows_1TD).unflatten(-1, (num_groups, -1))
    for tap, kernel_D in enumerate(kernel_CD):
        before_1TD = rows_1TD.roll(tap, 1)
        before_1TD[:, :tap] = 0
        factors = kernel_D.unflatten(0, (num_groups, -1)) + added_1TCG[:, :, tap, :, None]
        out_1TGg = out_1TGg + factors * before_1TD.unflatten(-1, (num_groups, -1))
    return out_1TGg.flatten(-2)
