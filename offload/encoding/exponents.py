"""Weights of 16 bits stored without loss in about 12 or 11: exponents as distances below a top.

The weights are bfloat16, or float16 converted from bfloat16. `offload pack` writes them;
`kernels/exponents_layout.py` has the layout. A weight X consists of `X.mantissas` (sign and
mantissa of each number, of its shape; U8 for bfloat16, I8 for float16), `X.exponents` (distances),
`X.escapes` (exponents outside the window, padded with zeros so that the next tensor begins at a
multiple of 64), streamed as one run, and `X.code`, which stays in memory: the top and the number of
escapes in each chunk.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from offload.encoding.base import (
    NOWHERE,
    STORED,
    Format,
    Headers,
    RecognisedWeight,
    Settings,
    Site,
    Tensors,
    must,
)
from offload.kernels.exponents_layout import BLOCK, CHUNK, RUN, word_of_half

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from offload.kernels.expansion import Expansion

ESCAPE_BYTES = 3
ALIGN_BYTES = 64
WORDS = (".mantissas", ".exponents", ".escapes")
CODE = ".code"
MANTISSAS = {"BF16": "U8", "F16": "I8"}  # type of weights -> stored type of their mantissas
_WIDTHS = (4, 3)  # bits of a distance
_AGAIN = "pack it again"
DAMAGED = "it was damaged, pack the model again"


class ExponentWindow(NamedTuple):
    """The exponents top, top - 1, ... that need no escape, and the resulting bits per weight."""

    top: int
    width: int  # bits of a distance; the largest distance marks an escape
    bits: float


def best_window(histogram_256: "np.ndarray") -> ExponentWindow:
    """Return the window with the fewest bits for weights with this histogram of exponents."""
    import numpy as np

    below = np.concatenate(([0], np.cumsum(histogram_256, dtype=np.float64)))
    windows = []
    for width in _WIDTHS:
        lowest = np.maximum(np.arange(1, 257) - ((1 << width) - 1), 0)
        inside = below[1:] - below[lowest]
        escaped = float(1 - inside.max() / max(below[-1], 1))
        windows.append(
            ExponentWindow(int(inside.argmax()), width, 8 + width + 8 * ESCAPE_BYTES * escaped)
        )
    return min(windows, key=lambda window: window.bits)


def histogram(bits_N: "np.ndarray", dtype: str) -> "np.ndarray":
    """Count each of the 256 exponents; `bits_N` is bfloat16 or float16 seen as int16."""
    import numpy as np

    word_N = word_of_half(bits_N) if dtype == "F16" else bits_N
    return np.bincount((word_N >> 7) & 0xFF, minlength=256)


def distance_bytes(num_weights: int, width: int) -> int:
    """Return the bytes of the distances, in whole blocks."""
    return -(-num_weights // BLOCK) * RUN * width


def width_of(num_weights: int, num_bytes: int) -> int | None:
    """Return the width in bits at which distances take this many bytes; None if no width does."""
    return next(
        (width for width in _WIDTHS if distance_bytes(num_weights, width) == num_bytes), None
    )


@dataclass(frozen=True, slots=True)
class Exponents:
    """See `Coding`."""

    width: int
    # bytes with padding; not compared, since weights with different escapes expand alike
    escape_bytes: int = field(compare=False)
    dtype: str = "bfloat16"
    align_bytes: int = 1
    is_transposed: bool = False

    @property
    def name(self) -> str:
        return f"{self.dtype} without loss in {8 + self.width} bits"

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of mantissas, distances and escapes."""
        return math.prod(shape) + distance_bytes(math.prod(shape), self.width) + self.escape_bytes

    def companion_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes (int64) of the start of each chunk's escapes, their end, and the top."""
        return 8 * (-(-math.prod(shape) // CHUNK) + 2)

    def prepare(self, companions: Tensors, shape: Sequence[int]) -> Tensors:
        """Check that every index into the escapes lies inside them; return starts and top."""
        import torch

        (code,) = companions.values()
        top_1 = code[:1]
        count_C = code[1:]
        num_chunks = -(-math.prod(shape) // CHUNK)
        top = top_1.tolist()
        is_code = len(count_C) == num_chunks and bool(top) and 0 <= top[0] < 256
        requirement = f"its code must be a top below 256 and {num_chunks} counts"
        must(is_code, requirement, f"got {code[:8].tolist()}", DAMAGED)
        start_C = torch.cat((torch.zeros(1, dtype=torch.int64), count_C.cumsum(0)))
        spare_bytes = self.escape_bytes - ESCAPE_BYTES * int(start_C[-1])
        is_odd = bool(((count_C < 0) | (count_C > CHUNK)).any())
        complaint = f"{int(start_C[-1])} escapes are not what {self.escape_bytes} bytes hold"
        if is_odd or not 0 <= spare_bytes < ALIGN_BYTES:
            raise ValueError(f"{complaint}: {DAMAGED}")
        return {"start": start_C, "top": top_1}

    def expand(
        self, stored_B: "Tensor", companions: Tensors, out: "Tensor", expansion: "Expansion"
    ) -> None:
        """Fill `out` with the original numbers."""
        import torch

        num_weights = out.numel()
        sizes = (num_weights, distance_bytes(num_weights, self.width), self.escape_bytes)
        mantissa_N, *others = stored_B.split(sizes)
        if self.dtype == "float16":
            mantissa_N = mantissa_N.view(torch.int8)
        expansion.exponents(
            mantissa_N, *others, companions["start"], companions["top"], out.view(-1)
        )


def _recognise(
    stem: str, stored: Headers, _settings: Settings, _: Site = NOWHERE
) -> RecognisedWeight | None:
    """Recognise a weight by tensors whose suffixes begin with `stem`."""
    names = [stem + suffix for suffix in (*WORDS, CODE)]
    if not any(name in stored for name in names):
        return None
    missing = [name for name in names if name not in stored]
    requirement = f"packed weights have {', '.join(names)}"
    must(not missing, requirement, f"without {', '.join(missing)}", _AGAIN)
    mantissas, exponents, escapes, code = (stored[name] for name in names)
    num_weights = math.prod(mantissas.shape)
    width = width_of(num_weights, math.prod(exponents.shape))
    types = [stored[name].dtype for name in names]
    source = {stored_as: dtype for dtype, stored_as in MANTISSAS.items()}.get(mantissas.dtype)
    if width is None or source is None or types[1:] != ["U8", "U8", "I64"] or len(code.shape) != 1:
        has = f"{num_weights} mantissas have {math.prod(exponents.shape)} bytes of exponents"
        types_of = f"{has} in {', '.join(types)}"
        raise ValueError(f"packed as by another version, {types_of}: {_AGAIN}")
    coding = Exponents(width, math.prod(escapes.shape), STORED[source].dtype)
    return RecognisedWeight(coding, mantissas.shape, tuple(names[:3]), (names[3],))


# the second form is for parameters without `.weight`, such as fused experts
FORMATS = tuple(
    Format(tuple(stem + suffix for suffix in (*WORDS, CODE)), partial(_recognise, stem), stem)
    for stem in (".weight", "")
)
