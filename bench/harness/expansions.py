"""A random matrix in each kind of words that a checkpoint may have, to time its expansion."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.kernels.encode_exponents import encode_exponents_reference
from offload.kernels.expansion import Expansion

# numbers of a row that share a scale, the usual ones
GROUP = 128
BLOCK = 128
SMALL_GROUP = 64  # where a table is used


class Sample(NamedTuple):
    """What a matrix is expanded from."""

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
    random = torch.Generator().manual_seed(0)

    def words(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=random).to(torch.uint8)

    made = [maker(words, num_rows, num_columns) for maker in _MAKERS]
    return [
        one._replace(arguments=tuple(_sent(part, device) for part in one.arguments)) for one in made
    ]


def _sent(part: Any, device: torch.device | str) -> Any:
    return part.to(device) if isinstance(part, Tensor) else part


Words = Callable[..., Tensor]  # of a shape, random bytes


def _float8(words: Words, num_rows: int, num_columns: int) -> Sample:
    scale_AB = torch.rand(num_rows // BLOCK, num_columns // BLOCK) + 0.5
    weight_NK = words(num_rows, num_columns).bitwise_and_(0xBF).view(torch.float8_e4m3fn)  # no NaN
    shape = (num_rows, num_columns)
    return Sample("fp8, blocks", "float8", (weight_NK, scale_AB, (BLOCK, BLOCK)), shape)


def _scales(num_rows: int, num_groups: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(num_rows, num_groups) + 0.5).to(dtype)


def _integers(
    name: str, codes: Tensor, num_bits: int, scale_NG: Tensor, shape: tuple[int, int]
) -> Sample:
    group = shape[1] // scale_NG.shape[1]
    return Sample(name, "integers", (codes, num_bits, scale_NG, None, group), shape)


def _int4(words: Words, num_rows: int, num_columns: int) -> Sample:
    packed = words(num_rows, num_columns // 2).view(torch.int32)
    scale_NG = _scales(num_rows, num_columns // GROUP, torch.bfloat16)
    return _integers("int4, groups", packed, 4, scale_NG, (num_rows, num_columns))


def _gptq(words: Words, num_rows: int, num_columns: int) -> Sample:
    """Return words of eight numbers of a column."""
    packed = words(num_columns // 8, 4 * num_rows).view(torch.int32).t()
    scale_NG = _scales(num_rows, num_columns // GROUP, torch.float16)
    return _integers("int4, GPTQ", packed, 4, scale_NG, (num_rows, num_columns))


def _int8(words: Words, num_rows: int, num_columns: int) -> Sample:
    codes_NK = words(num_rows, num_columns).view(torch.int8)
    return _integers("int8, rows", codes_NK, 8, _scales(num_rows, 1), (num_rows, num_columns))


def _awq(words: Words, num_rows: int, num_columns: int) -> Sample:
    packed = words(num_columns, num_rows // 2).view(torch.int32).t()
    scale_NG = _scales(num_rows, num_columns // GROUP, torch.float16)
    zero_NG = words(num_rows, num_columns // GROUP).bitwise_and_(15).to(torch.int8)
    shape = (num_rows, num_columns)
    return Sample("int4, AWQ", "columns", (packed, scale_NG, zero_NG, GROUP), shape)


def _nf4(words: Words, num_rows: int, num_columns: int) -> Sample:
    scale_NG = _scales(num_rows, num_columns // SMALL_GROUP)
    arguments = (words(num_rows, num_columns // 2), torch.linspace(-1, 1, 16), scale_NG)
    return Sample("nf4", "codebook", arguments, (num_rows, num_columns), {"is_high_first": True})


def _mxfp4(words: Words, num_rows: int, num_columns: int) -> Sample:
    codes = words(num_rows, num_columns // 2)
    scales = words(num_rows, num_columns // 32)
    arguments = (codes, scales, torch.rand(256) + 0.5)
    return Sample("mxfp4", "e2m1", arguments, (num_rows, num_columns))


def _blocks(
    kind: str, num_bytes: int, num_weights: int, words: Words, num_rows: int, num_columns: int
) -> Sample:
    """Return GGUF blocks, with scales of random bits but no NaN among them."""
    block_MB = words(num_rows * num_columns // num_weights, num_bytes).bitwise_and_(0xBB)
    return Sample(f"GGUF {kind}", "blocks", (kind, block_MB), (len(block_MB), num_weights))


def _exponents(width: int, _: Words, num_rows: int, num_columns: int) -> Sample:
    """Return words of bfloat16 weights that are spread as trained ones are."""
    weight_N = (torch.randn(num_rows * num_columns) * 0.02).bfloat16()
    top = int(weight_N.abs().max().view(torch.int16)) >> 7
    words = encode_exponents_reference(weight_N, top, width)
    start_C = torch.nn.functional.pad(words.count_C.cumsum(0), (1, 0))
    escapes = words.escape_3E.reshape(-1)
    arguments = (words.mantissa_N, words.distance_B, escapes, start_C, torch.tensor([top]))
    return Sample(f"bf16, {8 + width} bits", "exponents", arguments, (num_rows * num_columns,))


_MAKERS: tuple[Callable[[Words, int, int], Sample], ...] = (
    *(_float8, _int4, _gptq, _int8, _awq, _nf4, _mxfp4),
    *(
        partial(_blocks, *kind)
        for kind in (("Q8_0", 34, 32), ("Q4_K", 144, 256), ("Q6_K", 210, 256))
    ),
    *(partial(_exponents, width) for width in (4, 3)),
)
