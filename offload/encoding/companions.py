"""What is asked of the small tensors that belong to words, wherever they come from: shapes, finite scales, orders."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offload.encoding.base import Header
from offload.encoding.registry import ENCODINGS

if TYPE_CHECKING:
    from torch import Tensor

AGAIN = "download the checkpoint again"


def float_type(stored: Mapping[str, Header], suffix: str) -> str:
    """The header's name of the type of scales. Raises `ValueError` where they are of no floating-point type."""
    dtype = stored[suffix].dtype
    if dtype not in ENCODINGS:
        raise ValueError(f"{suffix} must be of type {', '.join(ENCODINGS)}, is {dtype}: {AGAIN}")
    return dtype


def require(stored: Mapping[str, Header], suffixes: Sequence[str], beside: str) -> None:
    """Raises `ValueError` where a tensor is missing."""
    for suffix in suffixes:
        if suffix not in stored:
            raise ValueError(f"{beside} needs a {suffix} beside it, there is none: {AGAIN}")


def matrix_shape(stored: Mapping[str, Header], suffix: str) -> tuple[int, int]:
    """Raises `ValueError` where a tensor has not two dimensions."""
    shape = stored[suffix].shape
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"{suffix} must have two dimensions, has shape {list(shape)}: {AGAIN}")
    return shape[0], shape[1]


def packed_shapes(stored: Mapping[str, Header]) -> list[tuple[int, int]] | None:
    """Of `.qweight`, `.qzeros` and `.scales`, as AWQ and GPTQ name them alike; None where there are no such words.

    Raises `ValueError` for a tensor that is missing, or is none of what both store.
    """
    if ".qweight" not in stored:
        return None
    require(stored, (".scales", ".qzeros"), ".qweight")
    require_integers(stored, (".qweight", ".qzeros", ".g_idx"))
    return [matrix_shape(stored, suffix) for suffix in (".qweight", ".qzeros", ".scales")]


def require_integers(stored: Mapping[str, Header], suffixes: Sequence[str]) -> None:
    """Raises `ValueError` where a tensor, if it is there, is not of type I32; orders may be of I64."""
    for suffix in suffixes:
        known = ("I32", "I64") if suffix.endswith("g_idx") else ("I32",)
        if suffix in stored and stored[suffix].dtype not in known:
            raise ValueError(f"{suffix} must be of type {' or '.join(known)}, is {stored[suffix].dtype}: {AGAIN}")


def require_shape(suffix: str, shape: Sequence[int], wanted: Sequence[int]) -> None:
    """Raises `ValueError` where a tensor has another shape than the words ask for."""
    if tuple(shape) != tuple(wanted):
        raise ValueError(f"{suffix} must have shape {list(wanted)}, has {list(shape)}: {AGAIN}")


def group_size(num_columns: int, num_groups: int, said: object) -> int:
    """How many columns share a scale: what the config says, or what divides them; 0 where all do.

    Raises `ValueError` where so many groups do not fit so many columns.
    """
    if num_groups == 1:
        return 0
    if type(said) is int and said > 0 and math.ceil(num_columns / said) == num_groups:
        return said
    if num_groups > 0 and num_columns % num_groups == 0:
        return num_columns // num_groups
    raise ValueError(
        f"group_size must divide {num_columns} columns into {num_groups} groups, is {said!r:.20}: mend config.json"
    )


def config_weights(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What groups in compressed-tensors' config say of weights; names of modules, which tensors need not, are left."""
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            yield weights


def checked_scale(suffix: str, scale: "Tensor", shape: Sequence[int]) -> "Tensor":
    """Scales in that shape, contiguous. Raises `ValueError` where one is not finite."""
    if scale.numel() != math.prod(shape):
        raise ValueError(f"{suffix} must have {math.prod(shape)} numbers, has {scale.numel()}: {AGAIN}")
    num_wrong = int((~scale.float().isfinite()).sum())
    if num_wrong:
        raise ValueError(f"{suffix} must be finite, {num_wrong} of {scale.numel()} are not: {AGAIN}")
    return scale.reshape(tuple(shape)).contiguous()


def checked_order(suffix: str, order: "Tensor", num_columns: int, num_groups: int) -> "Tensor":
    """Which scale each column has, int32. Raises `ValueError` where there is no such scale."""
    import torch

    if order.numel() != num_columns:
        raise ValueError(f"{suffix} must have {num_columns} numbers, has {order.numel()}: {AGAIN}")
    if num_columns and not 0 <= int(order.min()) <= int(order.max()) < num_groups:
        least, most = int(order.min()), int(order.max())
        raise ValueError(f"{suffix} must lie in 0..{num_groups - 1}, has {least}..{most}: {AGAIN}")
    return order.reshape(num_columns).to(torch.int32)


def unpacked(words: "Tensor", bits: int, dim: int, num_codes: int) -> "Tensor":
    """Codes (uint8) that lie one behind the other in int32 words along a dimension, the first in the lowest bits."""
    import torch

    shift_E = torch.arange(0, 32, bits, dtype=torch.int32)
    code = (words.movedim(dim, -1)[..., None] >> shift_E) & ((1 << bits) - 1)
    return code.flatten(-2)[..., :num_codes].movedim(-1, dim).to(torch.uint8).contiguous()
