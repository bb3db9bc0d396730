"""Weights of 4 bits as bitsandbytes stores them: codes of a table (NF4, FP4), scaled in blocks of the flattened matrix.

Scales may be quantised once more ("nested"); they are expanded when they are read. What is said beside them as JSON is
read, checked against the shapes, and used for the nested scales' numbers alone.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.encoding.base import Format, Found, Header
from offload.encoding.companions import AGAIN, checked_scale, require
from offload.encoding.registry import PLAIN_OF

if TYPE_CHECKING:
    from torch import Tensor

    from offload.kernels.expansion import Expansion

_STATE = ".weight.quant_state.bitsandbytes__"
_STATES = {f"{_STATE}nf4": "nf4", f"{_STATE}fp4": "fp4"}
_NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")
_ABSMAX, _MAP = ".weight.absmax", ".weight.quant_map"
_BLOCKS = (64, 32, 128, 256, 512, 1024, 2048, 4096)  # the usual one first: for few weights several fit
_MOST_JSON_BYTES = 1 << 16
_ANOTHER = "take another checkpoint"


@dataclass(frozen=True)
class Bitsandbytes4:
    """See `Coding`. Companions are "scale", float32, one for each block, and the "values" of codes."""

    kind: str
    block: int
    state: str  # the suffix of the JSON
    dtype: str = "bfloat16"
    align_bytes: int = 1
    is_transposed: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind} in blocks of {self.block}"

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Two to a byte."""
        return math.ceil(math.prod(shape) / 2)

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """A float32 scale for each block, and the table."""
        return 4 * self._num_blocks(shape) + 64

    def prepare(self, companions: "Mapping[str, Tensor]", shape: Sequence[int]) -> "Mapping[str, Tensor]":
        """See `Coding`."""
        if math.prod(shape) % 2:
            raise ValueError(f"weights must be even in number, two to a byte, have shape {list(shape)}: {_ANOTHER}")
        said, num_blocks = _said(companions[self.state]), self._num_blocks(shape)
        if said.get("blocksize") != self.block or said.get("shape") != list(shape):
            what = f"shape {said.get('shape')!r:.60} in blocks of {said.get('blocksize')!r:.20}"
            wanted = f"shape {list(shape)} in blocks of {self.block}"
            raise ValueError(f"quant_state must tell of {wanted}, has {what}: {AGAIN}")
        absmax = companions[_ABSMAX]
        if _NESTED[0] in companions:
            absmax = _unnested(absmax, companions, said)
        values = checked_scale(_MAP, companions[_MAP].float(), (16,))
        return {"scale": checked_scale(_ABSMAX, absmax.float(), (num_blocks,)), "values": values}

    def expand(
        self, stored_B: "Tensor", companions: "Mapping[str, Tensor]", out: "Tensor", expansion: "Expansion"
    ) -> None:
        """Blocks are expanded as rows of their own where rows of the weight are no whole number of them."""
        scale, values, flat = companions["scale"], companions["values"], out.view(-1)
        width = out.shape[-1] if out.shape[-1] % self.block == 0 else self.block
        whole = flat.numel() // width * width
        for lo, hi, size in ((0, whole, width), (whole, flat.numel(), flat.numel() - whole)):
            if lo < hi:
                words, own = stored_B[lo // 2 : hi // 2], scale[lo // self.block : -(-hi // self.block)]
                place = flat[lo:hi].view(-1, size)
                words_NB, scale_NG = (one.view(len(place), -1) for one in (words, own))
                expansion.codebook(words_NB, values, scale_NG, place, is_high_first=True)

    def _num_blocks(self, shape: Sequence[int]) -> int:
        return math.ceil(math.prod(shape) / self.block)


def _said(state: "Tensor") -> Mapping[str, Any]:
    if state.numel() > _MOST_JSON_BYTES:
        raise ValueError(f"quant_state must have at most {_MOST_JSON_BYTES} bytes, has {state.numel()}: {AGAIN}")
    try:
        said = json.loads(bytes(state.tolist()))
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise ValueError(f"quant_state must be a JSON object: {AGAIN}")
    return said


def _unnested(absmax: "Tensor", companions: "Mapping[str, Tensor]", said: Mapping[str, Any]) -> "Tensor":
    """Scales that are codes of 8 bits, in blocks of their own, less an offset."""
    import torch

    block, offset = said.get("nested_blocksize"), said.get("nested_offset")
    if type(block) is not int or block < 1 or not isinstance(offset, float) or not math.isfinite(offset):
        what = f"{block!r:.20} and {offset!r:.20}"
        raise ValueError(f"quant_state must have a nested_blocksize and a nested_offset, has {what}: {AGAIN}")
    outer, levels = (companions[suffix].float() for suffix in _NESTED)
    num_scales = absmax.numel()
    block = min(block, max(1, num_scales))  # one for all, however large it claims to be
    num_blocks = -(-num_scales // block)
    outer, levels = checked_scale(_NESTED[0], outer, (num_blocks,)), checked_scale(_NESTED[1], levels, (256,))
    return levels[absmax.int()] * outer[torch.arange(num_scales) // block] + offset


def _recognise(stored: Mapping[str, Header], settings: Mapping[str, Any]) -> Found | None:
    state = next((suffix for suffix in _STATES if suffix in stored), None)
    if state is None:
        return None
    is_nested = stored[_ABSMAX].dtype == "U8" if _ABSMAX in stored else False
    companions = (_ABSMAX, _MAP, state, *(_NESTED if is_nested else ()))
    require(stored, (".weight", *companions), state)
    if stored[state].dtype != "U8":
        raise ValueError(f"{state} must be of type U8, is {stored[state].dtype}: {AGAIN}")
    size, num_blocks = 2 * math.prod(stored[".weight"].shape), math.prod(stored[_ABSMAX].shape)
    block = next((block for block in _BLOCKS if math.ceil(size / block) == num_blocks), None)
    if stored[".weight"].dtype != "U8" or block is None:
        raise ValueError(
            f"{_ABSMAX} must have a scale for each block of {size} weights, a power of two of them, in U8, "
            f"has {num_blocks}: {AGAIN}"
        )
    said = settings.get("bnb_4bit_compute_dtype")
    dtype = next((dtype for dtype in PLAIN_OF if dtype == said), "bfloat16")
    return Found(Bitsandbytes4(_STATES[state], block, state, dtype), (size,), (".weight",), companions)


FORMAT = Format((".weight", _ABSMAX, _MAP, *_STATES, *_NESTED), _recognise)
