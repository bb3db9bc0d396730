"""Stored words of every kind that is expanded into weights, with random numbers in them."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.kernels.encode_exponents import encode_exponents_reference
from offload.kernels.encode_residuals import encode_residuals_reference
from offload.kernels.expansion import REFERENCE, Expansion
from offload.kernels.int4_blocks import FILE_LAYOUT, encode_int4_reference

# numbers of a row that share a scale, the usual ones
GROUP = 128
BLOCK = 128
SMALL_GROUP = 64  # where a table is used
MX_GROUP = 32
# kinds of GGUF blocks: bytes and weights of each
_BLOCKS = {"Q8_0": (34, 32), "Q4_K": (144, 256), "Q6_K": (210, 256)}
_EXPONENT_WIDTHS = (4, 3)


class Sample(NamedTuple):
    """Made-up words of one kind, and the shape that they expand to."""

    name: str
    kind: str  # the field of `Expansion`
    arguments: tuple[Any, ...]  # before `out`
    out_shape: tuple[int, ...]
    named: Mapping[str, Any] = {}

    def expand(self, expansion: Expansion, out: Tensor) -> None:
        """Fill `out`, of `out_shape`."""
        getattr(expansion, self.kind)(*self.arguments, out, **self.named)

    def agrees(self, expansion: Expansion, out: Tensor, wanted: Tensor) -> bool:
        """Fill `out`, and `wanted` by the reference; return whether both have the same bits."""
        self.expand(expansion, out)
        self.expand(REFERENCE, wanted)
        bits = {2: torch.int16, 4: torch.int32}[out.element_size()]
        return torch.equal(out.view(bits), wanted.view(bits))


def samples(num_rows: int, num_columns: int, device: torch.device | str = "cpu") -> list[Sample]:
    """Return one or more samples of each kind; sizes are multiples of 256."""

    def sent(part: Any) -> Any:
        return part.to(device) if isinstance(part, Tensor) else part

    random = torch.Generator().manual_seed(0)
    made = [*_in_rows(random, num_rows, num_columns), *_in_runs(random, num_rows, num_columns)]
    return [
        sample._replace(
            arguments=tuple(map(sent, sample.arguments)),
            named={name: sent(value) for name, value in sample.named.items()},
        )
        for sample in made
    ]


def _words(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=random).to(torch.uint8)


class _Matrix(NamedTuple):
    """Random words and scales of a matrix of this shape."""

    random: torch.Generator
    num_rows: int
    num_columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.num_columns

    def packed(self, num_bits: int) -> Tensor:
        """Return int32 words of codes, row by row."""
        num_bytes = num_bits * self.num_columns // 8
        return _words(self.random, self.num_rows, num_bytes).view(torch.int32)

    def packed_columns(self, num_bits: int) -> Tensor:
        """Return int32 words of codes, packed down each column and seen as rows."""
        sizes = (num_bits * self.num_columns // 32, 4 * self.num_rows)
        return _words(self.random, *sizes).view(torch.int32).t()

    def scales(self, group: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a scale for each row and group of columns."""
        return (torch.rand(self.num_rows, self.num_columns // group) + 0.5).to(dtype)

    def zeros(self, group: int, num_bits: int) -> Tensor:
        """Return a zero point (int8) for each row and group of columns."""
        words = _words(self.random, self.num_rows, self.num_columns // group)
        return words.bitwise_and_((1 << num_bits) - 1).to(torch.int8)

    def integers(self, name: str, codes: Tensor, num_bits: int, scale_NG: Tensor) -> Sample:
        """Return a sample of integers without zero points."""
        group = self.num_columns // scale_NG.shape[1]
        return Sample(name, "integers", (codes, num_bits, scale_NG, None, group), self.shape)


def _in_rows(random: torch.Generator, num_rows: int, num_columns: int) -> Iterator[Sample]:
    """Yield the kinds whose words keep the rows of the matrix."""
    matrix = _Matrix(random, num_rows, num_columns)
    yield from _float_samples(matrix)
    yield from _integer_samples(matrix)
    yield from _table_samples(matrix)


def _float_samples(matrix: _Matrix) -> Iterator[Sample]:
    """Yield FP8 with scales for blocks, and MXFP8."""
    shape = matrix.shape
    scale_AB = torch.rand(matrix.num_rows // BLOCK, matrix.num_columns // BLOCK) + 0.5
    words = _words(matrix.random, *shape)
    weight_NK = words.bitwise_and_(0xBF).view(torch.float8_e4m3fn)  # no NaN
    yield Sample("fp8, blocks", "float8", (weight_NK, scale_AB, (BLOCK, BLOCK)), shape)
    sizes = (matrix.num_rows, matrix.num_columns // MX_GROUP)
    exponent_NG = _words(matrix.random, *sizes).bitwise_and_(0x7F)
    levels = torch.arange(256).to(torch.uint8).view(torch.float8_e8m0fnu).float()
    arguments = (weight_NK, exponent_NG, (1, MX_GROUP))
    yield Sample("mxfp8", "float8", arguments, shape, {"levels": levels})


def _integer_samples(matrix: _Matrix) -> Iterator[Sample]:
    """Yield integers of 3, 4 and 8 bits, as the formats pack them."""
    shape = matrix.shape
    scale_NG = matrix.scales(GROUP, torch.bfloat16)
    yield matrix.integers("int4, groups", matrix.packed(4), 4, scale_NG)
    scale_NG = matrix.scales(GROUP, torch.float16)
    yield matrix.integers("int4, GPTQ", matrix.packed_columns(4), 4, scale_NG)
    added_NG = matrix.scales(SMALL_GROUP, torch.bfloat16)
    scale_NG = matrix.scales(SMALL_GROUP, torch.bfloat16)
    mlx_arguments = (matrix.packed(4), 4, scale_NG, None, SMALL_GROUP)
    yield Sample("int4, MLX", "integers", mlx_arguments, shape, {"added_NG": added_NG})
    scale_NG = matrix.scales(GROUP, torch.float16)
    gptq_arguments = (matrix.packed_columns(3), 3, scale_NG, matrix.zeros(GROUP, 3), GROUP)
    yield Sample("int3, GPTQ", "integers", gptq_arguments, shape)
    codes = _words(matrix.random, *shape).view(torch.int8)
    yield matrix.integers("int8, rows", codes, 8, matrix.scales(matrix.num_columns))
    # words of eight rows
    packed = _words(matrix.random, matrix.num_columns, matrix.num_rows // 2).view(torch.int32).t()
    scale_NG = matrix.scales(GROUP, torch.float16)
    yield Sample("int4, AWQ", "columns", (packed, scale_NG, matrix.zeros(GROUP, 4), GROUP), shape)


def _table_samples(matrix: _Matrix) -> Iterator[Sample]:
    """Yield codes of 4 bits that index a table: NF4 and MXFP4."""
    codes = _words(matrix.random, matrix.num_rows, matrix.num_columns // 2)
    table = (torch.linspace(-1, 1, 16), matrix.scales(SMALL_GROUP))
    yield Sample("nf4", "codebook", (codes, *table), matrix.shape, {"is_high_first": True})
    codes = _words(matrix.random, matrix.num_rows, matrix.num_columns // 2)
    exponents = _words(matrix.random, matrix.num_rows, matrix.num_columns // MX_GROUP)
    levels = torch.rand(256) + 0.5
    yield Sample("mxfp4", "e2m1", (codes, exponents, levels), matrix.shape)


def _in_runs(random: torch.Generator, num_rows: int, num_columns: int) -> Iterator[Sample]:
    """Yield GGUF blocks, and words of bfloat16 weights that are spread as trained ones are."""
    for kind, (num_bytes, num_weights) in _BLOCKS.items():
        # scales of random bits, but no NaN among them
        block_MB = _words(random, num_rows * num_columns // num_weights, num_bytes)
        block_MB.bitwise_and_(0xBB)
        yield Sample(f"GGUF {kind}", "blocks", (kind, block_MB), (len(block_MB), num_weights))
    weight_NK = (torch.randn(num_rows, num_columns) * 0.02).bfloat16()
    copy = encode_int4_reference(weight_NK, SMALL_GROUP, FILE_LAYOUT)
    word_BKH = copy.word_NK.view(-1, num_columns, FILE_LAYOUT.block_rows // 2)
    residual = encode_residuals_reference(weight_NK, word_BKH, copy.scale_GN2)
    stored_B = torch.cat([part.flatten() for part in residual[:4]])
    start_3T = torch.nn.functional.pad(residual.count_3T.cumsum(1), (1, 0))
    beside = (stored_B, word_BKH, copy.scale_GN2, start_3T)
    yield Sample("bf16 beside int4", "residuals", beside, (num_rows, num_columns))
    for width in _EXPONENT_WIDTHS:
        weight_N = (torch.randn(num_rows * num_columns) * 0.02).bfloat16()
        top = int(weight_N.abs().max().view(torch.int16)) >> 7
        words = encode_exponents_reference(weight_N, top, width)
        start_C = torch.nn.functional.pad(words.count_C.cumsum(0), (1, 0))
        escapes = words.escape_3E.reshape(-1)
        arguments = (words.mantissa_N, words.distance_B, escapes, start_C, torch.tensor([top]))
        yield Sample(f"bf16, {8 + width} bits", "exponents", arguments, (len(weight_N),))
