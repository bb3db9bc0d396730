"""A random matrix in each kind of words that a checkpoint may have, to time its expansion."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.kernels.encode_exponents import encode_exponents_reference
from offload.kernels.expansion import Expansion

# numbers of a row that share a scale, the usual ones
GROUP = 128
BLOCK = 128
SMALL_GROUP = 64  # where a table is used
# kinds of GGUF blocks: bytes and weights of each
_BLOCKS = {"Q8_0": (34, 32), "Q4_K": (144, 256), "Q6_K": (210, 256)}
_EXPONENT_WIDTHS = (4, 3)


class Sample(NamedTuple):
    name: str
    kind: str  # the field of `Expansion`
    arguments: tuple[Any, ...]  # before `out`
    out_shape: tuple[int, ...]
    named: Mapping[str, Any] = {}

    def expand(self, expansion: Expansion, out: Tensor) -> None:
        """Fill `out`, of `out_shape`."""
        getattr(expansion, self.kind)(*self.arguments, out, **self.named)


def samples(num_rows: int, num_columns: int, device: torch.device | str = "cpu") -> list[Sample]:
    """Return one or more samples of each kind; sizes are multiples of 256."""

    def sent(part: Any) -> Any:
        return part.to(device) if isinstance(part, Tensor) else part

    random = torch.Generator().manual_seed(0)
    made = [*_in_rows(random, num_rows, num_columns), *_in_runs(random, num_rows, num_columns)]
    return [one._replace(arguments=tuple(map(sent, one.arguments))) for one in made]


def _words(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=random).to(torch.uint8)


def _in_rows(random: torch.Generator, num_rows: int, num_columns: int) -> Iterator[Sample]:
    """Yield the kinds whose words keep the rows of the matrix."""

    def scales(num_groups: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return (torch.rand(num_rows, num_groups) + 0.5).to(dtype)

    def integers(name: str, codes: Tensor, num_bits: int, scale_NG: Tensor) -> Sample:
        group = num_columns // scale_NG.shape[1]
        return Sample(name, "integers", (codes, num_bits, scale_NG, None, group), shape)

    shape = (num_rows, num_columns)
    num_groups = num_columns // GROUP
    scale_AB = torch.rand(num_rows // BLOCK, num_columns // BLOCK) + 0.5
    weight_NK = _words(random, *shape).bitwise_and_(0xBF).view(torch.float8_e4m3fn)  # no NaN
    yield Sample("fp8, blocks", "float8", (weight_NK, scale_AB, (BLOCK, BLOCK)), shape)
    packed = _words(random, num_rows, num_columns // 2).view(torch.int32)
    yield integers("int4, groups", packed, 4, scales(num_groups, torch.bfloat16))
    # words of eight numbers of a column
    packed = _words(random, num_columns // 8, 4 * num_rows).view(torch.int32).t()
    yield integers("int4, GPTQ", packed, 4, scales(num_groups, torch.float16))
    yield integers("int8, rows", _words(random, *shape).view(torch.int8), 8, scales(1))
    packed = _words(random, num_columns, num_rows // 2).view(torch.int32).t()
    scale_NG = scales(num_groups, torch.float16)
    zero_NG = _words(random, num_rows, num_groups).bitwise_and_(15).to(torch.int8)
    yield Sample("int4, AWQ", "columns", (packed, scale_NG, zero_NG, GROUP), shape)
    codes = _words(random, num_rows, num_columns // 2)
    arguments = (codes, torch.linspace(-1, 1, 16), scales(num_columns // SMALL_GROUP))
    yield Sample("nf4", "codebook", arguments, shape, {"is_high_first": True})
    codes = _words(random, num_rows, num_columns // 2)
    mx_arguments = (codes, _words(random, num_rows, num_columns // 32), torch.rand(256) + 0.5)
    yield Sample("mxfp4", "e2m1", mx_arguments, shape)


def _in_runs(random: torch.Generator, num_rows: int, num_columns: int) -> Iterator[Sample]:
    """Yield GGUF blocks, and words of bfloat16 weights that are spread as trained ones are."""
    for kind, (num_bytes, num_weights) in _BLOCKS.items():
        # scales of random bits, but no NaN among them
        block_MB = _words(random, num_rows * num_columns // num_weights, num_bytes)
        block_MB.bitwise_and_(0xBB)
        yield Sample(f"GGUF {kind}", "blocks", (kind, block_MB), (len(block_MB), num_weights))
    for width in _EXPONENT_WIDTHS:
        weight_N = (torch.randn(num_rows * num_columns) * 0.02).bfloat16()
        top = int(weight_N.abs().max().view(torch.int16)) >> 7
        words = encode_exponents_reference(weight_N, top, width)
        start_C = torch.nn.functional.pad(words.count_C.cumsum(0), (1, 0))
        escapes = words.escape_3E.reshape(-1)
        arguments = (words.mantissa_N, words.distance_B, escapes, start_C, torch.tensor([top]))
        yield Sample(f"bf16, {8 + width} bits", "exponents", arguments, (len(weight_N),))
