"""Tree attention: reference against formula in float64, kernel against reference, and mistakes that must show.

Without a GPU the kernel runs in Triton's interpreter, which multiplies bfloat16 wrongly: that type is tried on a GPU
only.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from offload.kernels.jit import HAS_TRITON
from offload.kernels.tree_attention import (
    Chunk,
    Sight,
    Window,
    pack_bits,
    tree_attention_kernel,
    tree_attention_reference,
    unpack_bits,
)
from offload.model.attention import folded_attention, tree_mask, tree_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# On a GPU float32 is multiplied in three halves, and the reference's attention rounds at places of its own.
TOLERANCE = {torch.float32: 2e-5 if DEVICE == "cpu" else 2e-4, torch.float16: 6e-3, torch.bfloat16: 3e-2}
TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []  # on a GPU they are tests of the GPU


class Case(NamedTuple):
    """Sizes of one call; U uncommitted rows, of which the last T are queries."""

    num_heads: int
    num_groups: int
    num_rows: int
    num_uncommitted: int
    num_prefix: int
    width: int = 64
    value_width: int = 64
    options: dict[str, Any] = {}  # noqa: RUF012


CASES = {
    "one row": Case(4, 4, 1, 1, 5),
    "one row, long prefix": Case(8, 1, 1, 1, 300),
    "no prefix": Case(8, 2, 33, 33, 0),
    "groups of 4": Case(8, 2, 37, 37, 70),
    "groups of 8": Case(8, 1, 19, 19, 64),
    "wide heads": Case(4, 2, 17, 17, 40, 128, 128),
    "widest heads": Case(4, 2, 17, 17, 40, 256, 256),
    "odd widths": Case(3, 1, 13, 13, 21, 80, 48),
    "a level of a tree": Case(4, 2, 5, 41, 30),
    "window": Case(4, 2, 37, 37, 150, options={"window": 7}),
    "window within the tree": Case(4, 2, 40, 40, 3, options={"window": 3}),
    "window, no prefix": Case(4, 1, 33, 33, 0, options={"window": 4}),
    "chunk": Case(4, 2, 37, 37, 150, options={"window": Chunk(60)}),
    "chunk within the tree": Case(4, 2, 40, 40, 30, options={"window": Chunk(16)}),
    "all at once": Case(6, 2, 9, 70, 100, 96, 64, options={"window": 20}),
}


class Inputs(NamedTuple):
    """Arguments of a call in their order, and those by name."""

    query_HTK: Tensor
    key_GSK: Tensor
    value_GSK: Tensor
    seen_TU: Tensor
    num_prefix: int
    options: dict[str, Any]

    def call(self, attend: Callable[..., Tensor], **more: Any) -> Tensor:
        options = {**self.options, **more}
        sight = Sight(pack_bits(self.seen_TU), self.num_prefix, options.pop("position_U"), options.pop("window", None))
        return attend(*self[:3], sight, **options)


def inputs(case: Case, dtype: torch.dtype = torch.float32) -> Inputs:
    """A random tree; queries and caches are views with gaps, as those of a model and a cache are."""
    generator = torch.Generator().manual_seed(sum(case[:6]))
    num_rows, num_nodes, width = case.num_rows, case.num_uncommitted, case.width
    parents = [-1, *(int(torch.randint(0, n, (1,), generator=generator)) for n in range(1, num_nodes))]
    seen_UU, depth_U = torch.eye(num_nodes, dtype=torch.bool), torch.zeros(num_nodes, dtype=torch.long)
    for node, parent in enumerate(parents[1:], start=1):
        seen_UU[node] |= seen_UU[parent]
        depth_U[node] = depth_U[parent] + 1
    query = torch.randn(num_rows, case.num_heads, width, generator=generator).transpose(0, 1)
    num_slots = case.num_prefix + num_nodes + 9
    key = torch.randn(case.num_groups, num_slots, width, generator=generator)
    value = torch.randn(case.num_groups, num_slots, case.value_width, generator=generator)
    key[:, -9:] = value[:, -9:] = torch.nan  # slots that nobody may read
    options = {"scaling": 0.3, "position_U": (depth_U + case.num_prefix).to(DEVICE), **case.options}
    states = [states.to(DEVICE, dtype) for states in (query, key[:, :-9], value[:, :-9])]
    return Inputs(*states, seen_UU[-num_rows:].to(DEVICE), case.num_prefix, options)


def by_definition(given: Inputs) -> Tensor:
    """The formula in float64, row by row and key by key."""
    query, key, value = (states.cpu().double() for states in given[:3])
    position_U, window = given.options["position_U"].cpu(), given.options.get("window")
    position_S = torch.cat([torch.arange(given.num_prefix), position_U])
    group, num_rows = len(query) // len(key), query.shape[1]
    out = torch.zeros(num_rows, len(query), value.shape[2], dtype=torch.float64)
    for row in range(num_rows):
        is_seen = torch.cat([torch.ones(given.num_prefix, dtype=torch.bool), given.seen_TU[row].cpu()])
        own = position_U[len(position_U) - num_rows + row]
        if isinstance(window, Chunk):
            is_seen &= position_S // window.size == own // window.size
        elif window is not None:
            is_seen &= own - position_S < window
        for head in range(len(query)):
            score = key[head // group][is_seen] @ query[head, row] * given.options["scaling"]
            out[row, head] = score.softmax(0) @ value[head // group][is_seen]
    return out


@pytest.mark.parametrize("num_columns", [1, 31, 32, 33, 100])
def test_bits_are_where_they_are_said_to_be(num_columns: int) -> None:
    seen = torch.rand(7, num_columns, generator=torch.Generator().manual_seed(num_columns)) < 0.5
    words = pack_bits(seen)
    assert words.dtype == torch.int32 and words.shape == (7, (num_columns + 31) // 32)
    for row, column in seen.nonzero().tolist():
        assert int(words[row, column // 32]) >> (column % 32) & 1
    assert sum((int(word) & 0xFFFFFFFF).bit_count() for word in words.flatten()) == seen.sum()
    assert torch.equal(unpack_bits(words, num_columns), seen)


@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_the_formula(name: str) -> None:
    given = inputs(CASES[name])
    torch.testing.assert_close(
        given.call(tree_attention_reference).cpu().double(), by_definition(given), atol=TOLERANCE[torch.float32], rtol=0
    )


@needs_triton
@pytest.mark.parametrize(("dtype", "num_splits"), [(torch.float32, 3), *((dtype, 1) for dtype in TYPES[1:])], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_its_reference(name: str, dtype: torch.dtype, num_splits: int) -> None:
    given = inputs(CASES[name], dtype)
    got = given.call(tree_attention_kernel, num_splits=num_splits)
    assert got.dtype == dtype and got.is_contiguous()
    torch.testing.assert_close(got, given.call(tree_attention_reference), atol=TOLERANCE[dtype], rtol=0)


def reversed_bits(given: Inputs) -> Inputs:
    return given._replace(seen_TU=given.seen_TU.flip(1))


def next_row_of_bits(given: Inputs) -> Inputs:
    return given._replace(
        seen_TU=given.seen_TU.roll(1, 0) | torch.eye(len(given.seen_TU), dtype=torch.bool, device=DEVICE)
    )


def one_ancestor_lost(given: Inputs) -> Inputs:
    seen = given.seen_TU.clone()
    seen[-1, 0] = False
    return given._replace(seen_TU=seen)


def heads_by_turns(given: Inputs) -> Inputs:
    return given._replace(query_HTK=given.query_HTK[[0, 2, 1, 3]])


def option(**change: Any) -> Callable[[Inputs], Inputs]:
    return lambda given: given._replace(options={**given.options, **change})


def other_positions(given: Inputs) -> Inputs:
    return option(position_U=given.options["position_U"] + 1)(given)


MISTAKES = {
    "bits in the wrong order": ("a level of a tree", reversed_bits),
    "another row's bits": ("wide heads", next_row_of_bits),
    "one bit": ("wide heads", one_ancestor_lost),
    "heads by turns": ("wide heads", heads_by_turns),
    "window one wider": ("window", option(window=8)),
    "window one narrower": ("window", option(window=6)),
    "tree window one wider": ("window within the tree", option(window=4)),
    "chunk one wider": ("chunk", option(window=Chunk(61))),
    "chunk as a window": ("chunk", option(window=60)),
    "tree chunk one wider": ("chunk within the tree", option(window=Chunk(17))),
    "positions off by one": ("window", other_positions),
    "scale": ("groups of 4", option(scaling=0.29)),
}


@needs_triton
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_would_show(name: str) -> None:
    """The kernel with one thing wrong, in the type with the widest tolerance."""
    case, mistake = MISTAKES[name]
    given = inputs(CASES[case], torch.float16)
    wrong = mistake(given).call(tree_attention_kernel, num_splits=1)
    error = (wrong - given.call(tree_attention_reference)).abs().max()
    assert error > 3 * TOLERANCE[torch.float16]


@pytest.mark.parametrize("window", [None, 3, Chunk(16)])
def test_rows_in_bits_mean_what_the_mask_means(window: Window) -> None:
    given = inputs(CASES["a level of a tree"])
    query, key, value = (states[None].cpu() for states in given[:3])
    what = (given.num_prefix, given.options["position_U"].cpu(), given.seen_TU.cpu(), window)
    rows = tree_rows(*what, tree_attention_reference)
    want, _ = folded_attention(nn.Module(), query, key, value, tree_mask(*what, torch.float32), scaling=0.3)
    got, _ = folded_attention(nn.Module(), query, key, value, rows, scaling=0.3)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    last, _ = folded_attention(nn.Module(), query[:, :, -2:], key, value, rows, scaling=0.3)
    torch.testing.assert_close(last, want[:, -2:], atol=1e-6, rtol=1e-5)
