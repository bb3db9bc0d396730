"""Attention whose temperature goes by position, in the layers of Llama 4 that have no rotary positions.

transformers counts a pass's rows for it, one position after the other, which the rows of a tree are not. Here queries
are scaled by the positions that a pass is given. Invariant: where rows lie in order, the numbers are transformers' own.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def scale_by_position(layers: Iterable[nn.Module]) -> None:
    """Let those that are tuned so scale their queries by `position_ids`, for good."""
    for layer in layers:
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", None) and not attention.use_rope:
            attention.attn_temperature_tuning = False
            tuning = _Tuning(attention.floor_scale, attention.attn_scale)
            layer.register_forward_pre_hook(tuning.hear, with_kwargs=True)
            attention.q_proj.register_forward_hook(tuning.scale)


class _Tuning:
    """Of one layer."""

    def __init__(self, floor_scale: float, attn_scale: float) -> None:
        self._floor_scale, self._attn_scale = floor_scale, attn_scale
        self._position_1T = torch.empty(1, 0)

    def hear(self, _: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        """Of the positions of the rows that follow."""
        self._position_1T = kwargs["position_ids"]

    def scale(self, _: nn.Module, __: Any, query_1TQ: Tensor) -> Tensor:
        """Nothing lies between the projection and the scale in a layer without rotary positions."""
        scale_1T = torch.log1p(torch.floor((self._position_1T.float() + 1.0) / self._floor_scale)) * self._attn_scale
        return (query_1TQ * (scale_1T + 1.0)[..., None]).to(query_1TQ.dtype)
