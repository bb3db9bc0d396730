"""Weights of 4 and 8 bits as bitsandbytes stores them.

Weights of 4 bits are codes of a table (NF4, FP4), scaled in blocks of the flattened matrix. Their
scales may be quantised once more ("nested") and are expanded when they are read. The JSON beside
them is checked against the shapes and used for the nested scales alone. Weights of 8 bits are
signed bytes with the largest number (`SCB`) of each row.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.encoding.base import (
    AGAIN,
    ANOTHER,
    ENCODINGS,
    NOWHERE,
    PLAIN_OF,
    STORED,
    Format,
    Headers,
    RecognisedWeight,
    Settings,
    Site,
    Tensors,
    checked_scale,
    must,
    require,
    require_shape,
)
from offload.encoding.integers import ByteIntegers

if TYPE_CHECKING:
    from torch import Tensor

    from offload.kernels.expansion import Expansion

_STATE = ".weight.quant_state.bitsandbytes__"
_STATES = {f"{_STATE}nf4": "nf4", f"{_STATE}fp4": "fp4"}
_NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")
_ABSMAX = ".weight.absmax"
_MAP = ".weight.quant_map"
_FORM = ".weight_format"  # 0 is row-major; other values are GPU tiles
# block sizes, the usual one first: for small weights several fit
_BLOCKS = (64, 32, 128, 256, 512, 1024, 2048, 4096)
_MOST_JSON_BYTES = 1 << 16
_PER_127 = 7.874015718698502e-3  # bitsandbytes 0.50's constant: not the nearest number to 1 / 127
_CHUNK_ROWS = 64


@dataclass(frozen=True)
class Bitsandbytes4:
    """See `Coding`. Companions: "scale", float32, one per block, and "values" of the 16 codes."""

    kind: str
    block: int
    state: str  # suffix of the JSON
    dtype: str = "bfloat16"
    align_bytes: int = 1
    is_transposed: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind} in blocks of {self.block}"

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of codes, two to a byte."""
        return math.ceil(math.prod(shape) / 2)

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a float32 scale per block, and of the table."""
        return 4 * self._num_blocks(shape) + 64

    def prepare(self, companions: Tensors, shape: Sequence[int]) -> Tensors:
        """See `Coding`."""
        requirement = "weights must be even in number, two to a byte"
        must(math.prod(shape) % 2 == 0, requirement, f"have shape {list(shape)}", ANOTHER)
        said = _parsed_state(companions[self.state])
        num_blocks = self._num_blocks(shape)
        stated = (said.get("blocksize"), said.get("shape"))
        requirement = f"quant_state must tell of shape {list(shape)} in blocks of {self.block}"
        has = f"has shape {stated[1]!r:.60} in blocks of {stated[0]!r:.20}"
        must(stated == (self.block, list(shape)), requirement, has)
        absmax = companions[_ABSMAX]
        if _NESTED[0] in companions:
            absmax = _unnested(absmax, companions, said)
        values = checked_scale(_MAP, companions[_MAP].float(), (16,))
        return {"scale": checked_scale(_ABSMAX, absmax.float(), (num_blocks,)), "values": values}

    def expand(
        self, stored_B: "Tensor", companions: Tensors, out: "Tensor", expansion: "Expansion"
    ) -> None:
        """See `Coding`.

        Blocks are expanded as rows of their own unless they divide the rows of the weight.
        """
        scale = companions["scale"]
        values = companions["values"]
        flat = out.view(-1)
        width = out.shape[-1] if out.shape[-1] % self.block == 0 else self.block
        whole = flat.numel() // width * width
        for lo, hi, size in ((0, whole, width), (whole, flat.numel(), flat.numel() - whole)):
            if lo < hi:
                words = stored_B[lo // 2 : hi // 2]
                scale_of_rows = scale[lo // self.block : -(-hi // self.block)]
                place = flat[lo:hi].view(-1, size)
                words_NB, scale_NG = (
                    tensor.view(len(place), -1) for tensor in (words, scale_of_rows)
                )
                expansion.codebook(words_NB, values, scale_NG, place, is_high_first=True)

    def _num_blocks(self, shape: Sequence[int]) -> int:
        return math.ceil(math.prod(shape) / self.block)


def _parsed_state(state: "Tensor") -> Mapping[str, Any]:
    num_bytes = state.numel()
    requirement = f"quant_state must have at most {_MOST_JSON_BYTES} bytes"
    must(num_bytes <= _MOST_JSON_BYTES, requirement, f"has {num_bytes}")
    try:
        said = json.loads(bytes(state.tolist()))
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise ValueError(f"quant_state must be a JSON object: {AGAIN}")
    return said


def _unnested(absmax: "Tensor", companions: Tensors, said: Mapping[str, Any]) -> "Tensor":
    """Return scales that are stored as 8-bit codes, with block scales and an offset of their own."""
    import torch

    block: Any = said.get("nested_blocksize")
    offset = said.get("nested_offset")
    is_size = type(block) is int and block > 0
    if not is_size or not isinstance(offset, float) or not math.isfinite(offset):
        requirement = "quant_state must have a nested_blocksize and a nested_offset"
        raise ValueError(f"{requirement}, has {block!r:.20} and {offset!r:.20}: {AGAIN}")
    outer, levels = (companions[suffix].float() for suffix in _NESTED)
    num_scales = absmax.numel()
    block = min(block, max(1, num_scales))  # a single number, however large the header says it is
    num_blocks = -(-num_scales // block)
    outer = checked_scale(_NESTED[0], outer, (num_blocks,))
    levels = checked_scale(_NESTED[1], levels, (256,))
    return levels[absmax.int()] * outer[torch.arange(num_scales) // block] + offset


def _recognise_4_bits(
    stored: Headers, settings: Settings, _: Site = NOWHERE
) -> RecognisedWeight | None:
    """Return a weight with a table of 16 codes; None without its JSON. Raises `ValueError`."""
    state = next((suffix for suffix in _STATES if suffix in stored), None)
    if state is None:
        return None
    is_nested = stored[_ABSMAX].dtype == "U8" if _ABSMAX in stored else False
    companions = (_ABSMAX, _MAP, state, *(_NESTED if is_nested else ()))
    require(stored, (".weight", *companions), state)
    dtype = stored[state].dtype
    must(dtype == "U8", f"{state} must be of type U8", f"is {dtype}")
    # the library may store bytes as numbers of the model's type (`quant_storage`)
    words = stored[".weight"]
    is_known = words.dtype in ("U8", *ENCODINGS)
    requirement = f".weight must be stored as U8, {', '.join(ENCODINGS)}"
    must(is_known, requirement, f"is {words.dtype}", ANOTHER)
    size = 2 * STORED[words.dtype].stored_bytes(words.shape)
    num_blocks = math.prod(stored[_ABSMAX].shape)
    block = next((block for block in _BLOCKS if math.ceil(size / block) == num_blocks), None)
    if block is None:
        requirement = f"{_ABSMAX} must have a scale for each block of {size} weights"
        raise ValueError(f"{requirement}, a power of two of them, has {num_blocks}: {AGAIN}")
    said = settings.get("bnb_4bit_compute_dtype")
    dtype = next((dtype for dtype in PLAIN_OF if dtype == said), "bfloat16")
    coding = Bitsandbytes4(_STATES[state], block, state, dtype)
    return RecognisedWeight(coding, (size,), (".weight",), companions, "U8")


BITSANDBYTES_4 = Format((".weight", _ABSMAX, _MAP, *_STATES, *_NESTED), _recognise_4_bits)


@dataclass(frozen=True)
class BitsandbytesBytes(ByteIntegers):
    """See `Coding`."""

    def prepare(self, companions: Tensors, shape: Sequence[int]) -> Tensors:
        """See `Coding`; code 127 is the row's largest number, which is stored."""
        form = [0] if _FORM not in companions else companions[_FORM].flatten().tolist()
        requirement = f"{_FORM} must be 0 (row-major)"
        must(form == [0], requirement, f"is {form!r:.40}", "store the model again")
        return {"scale": checked_scale(".SCB", companions[".SCB"].float(), self.grid(shape))}

    def expand(
        self, stored_B: "Tensor", companions: Tensors, out: "Tensor", expansion: "Expansion"
    ) -> None:
        """See `Coding`; the library multiplies twice, by the largest number and by a constant."""
        words_NK = self.words(stored_B, out.shape)
        for lo in range(0, len(out), _CHUNK_ROWS):
            rows = slice(lo, lo + _CHUNK_ROWS)
            product = out[rows].float()
            scale = companions["scale"][rows]
            expansion.integers(words_NK[rows], 8, scale, None, out.shape[1], product)
            out[rows] = product.mul_(_PER_127)


def _recognise_8_bits(
    stored: Headers, _settings: Settings, _: Site = NOWHERE
) -> RecognisedWeight | None:
    weight = stored.get(".weight")
    largest = stored.get(".SCB")
    if weight is None or largest is None or weight.dtype != "I8" or len(weight.shape) != 2:
        return None
    require_shape(".SCB", largest.shape, weight.shape[:1])
    companions = (".SCB", _FORM) if _FORM in stored else (".SCB",)
    coding = BitsandbytesBytes(8, 0, "F32", align_bytes=1)
    return RecognisedWeight(coding, weight.shape, (".weight",), companions)


BITSANDBYTES_8 = Format((".weight", ".SCB", _FORM), _recognise_8_bits)
