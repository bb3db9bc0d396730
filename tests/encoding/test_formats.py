"""Every format x shape x type x form of expansion: the weights that were stored, to the bit; mistakes would be seen."""

from collections.abc import Callable

import pytest
import torch
from coded_weights import (
    DTYPES,
    EXPANSIONS,
    are_equal,
    can_round,
    expanded,
    forbid_operators,
    recognise,
)
from quantised import RECIPES, Stored, random_weight
from torch import Tensor

from offload.kernels.expansion import COMPILED, Expansion

# Rows and columns: of whole groups and chunks, and as ragged as each format allows.
_SHAPES = {
    "fp8": [(66, 160), (13, 77), (1, 1)],
    "ct": [(66, 160), (13, 77), (2, 33)],
    "awq": [(136, 80), (24, 77), (8, 32)],
    "gptq": [(72, 160), (24, 88), (8, 32)],
    "nf4": [(66, 128), (13, 50), (5, 64), (1, 2)],
    "nvfp4": [(66, 160), (13, 48), (1, 16)],
    "mxfp4": [(3, 96, 25), (1, 32, 7)],  # as the model has them: experts, in, out
}


def weight_of(shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 2:
        return random_weight(*shape)
    return torch.stack([random_weight(*shape[1:], seed=seed) for seed in range(shape[0])])


def as_stored(name: str, stored: Stored) -> Tensor:
    """What is expanded: MXFP4 has the model's matrices the other way round."""
    return stored.weight.mT.contiguous() if name == "mxfp4" else stored.weight


def shapes_of(name: str) -> list[tuple[int, ...]]:
    return list(_SHAPES[name.partition("-")[0]])


@pytest.mark.parametrize("expansion", EXPANSIONS)
@pytest.mark.parametrize("name", RECIPES)
def test_weights_are_those_that_were_stored(name: str, expansion: Expansion) -> None:
    for shape in shapes_of(name):
        stored = RECIPES[name].store(weight_of(shape))
        wanted = as_stored(name, stored)
        for dtype in DTYPES:
            if can_round(expansion, dtype):
                got = expanded(stored.tensors, RECIPES[name].config, tuple(wanted.shape), dtype, expansion)
                assert are_equal(got, wanted.to(dtype)), (shape, dtype)


@pytest.mark.parametrize("name", RECIPES)
def test_headers_tell_the_shape(name: str) -> None:
    """But for columns that pad the last word, and for matrices that are stored flattened."""
    stored = RECIPES[name].store(weight_of(shapes_of(name)[0]))
    wanted, found = as_stored(name, stored), recognise(stored.tensors, RECIPES[name].config)
    assert found.shape in (tuple(wanted.shape), (wanted.numel(),))
    assert hash(found.coding) == hash(recognise(stored.tensors, RECIPES[name].config).coding)
    assert found.coding.is_transposed == (name == "mxfp4")


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("name", RECIPES)
def test_threads_share_rows(name: str, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    forbid_operators(monkeypatch)
    torch.set_num_threads(num_threads)
    stored = RECIPES[name].store(weight_of((2, 64, 40) if name == "mxfp4" else (152, 64)))
    wanted = as_stored(name, stored)
    got = expanded(stored.tensors, RECIPES[name].config, tuple(wanted.shape), torch.bfloat16, COMPILED)
    assert are_equal(got, wanted.bfloat16())


def swapped(words: Tensor) -> Tensor:
    """Both halves of each byte change places."""
    byte = words.contiguous().view(torch.uint8)
    return ((byte << 4) | (byte >> 4)).view(words.dtype)


def moved_by_one(words: Tensor) -> Tensor:
    """The last bit of each byte is another one."""
    return (words.contiguous().view(torch.uint8) ^ 1).view(words.dtype)


def beside(scale: Tensor) -> Tensor:
    """Scales of the group, row or block beside."""
    return scale.contiguous().view(torch.uint8 if scale.element_size() == 1 else scale.dtype).flatten().roll(
        1).view(scale.shape).view(scale.dtype)  # fmt: skip


_HALVES = (swapped, ("ct-w4", "awq", "gptq", "gptq-v2", "nf4", "nvfp4", "mxfp4"))
_SCALES = (beside, ("fp8-block", "fp8-channel", "ct-w4", "ct-int8", "awq", "gptq", "nf4", "nvfp4", "mxfp4"))
_ZEROS = (moved_by_one, ("ct-w4-zeros", "awq", "gptq", "gptq-v2"))
_ORDERS = (beside, ("ct-w4-order", "gptq-order"))
_MISTAKES = [
    *((name, ("_blocks", ".weight_packed", ".qweight", ".weight"), _HALVES[0]) for name in _HALVES[1]),
    *((name, ("_scales", ".weight_scale_inv", ".weight_scale", ".scales", ".weight.absmax"), _SCALES[0])
      for name in _SCALES[1]),
    *((name, (".weight_zero_point", ".qzeros"), _ZEROS[0]) for name in _ZEROS[1]),
    *((name, (".weight_g_idx", ".g_idx"), _ORDERS[0]) for name in _ORDERS[1]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "suffixes", "mistake"), _MISTAKES)
def test_mistakes_would_be_seen(name: str, suffixes: tuple[str, ...], mistake: Callable[[Tensor], Tensor]) -> None:
    stored = RECIPES[name].store(weight_of(shapes_of(name)[0]))
    wanted = as_stored(name, stored)
    suffix = next(suffix for suffix in suffixes if suffix in stored.tensors)
    tensors = {**stored.tensors, suffix: mistake(stored.tensors[suffix])}
    got = expanded(tensors, RECIPES[name].config, tuple(wanted.shape))
    assert not are_equal(got, wanted)
