"""Attention along paths: the CPU's against the formula in float64, the kernel against the CPU's, and its one promise.

A row's bits are those that it has alone, whatever tree is around it. Without a GPU the kernel runs in Triton's
interpreter, which multiplies bfloat16 wrongly: that type is tried on a GPU only.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from marks import DEVICE, ON_DEVICE, needs_triton
from matrix import matrix
from passes import causal, sees
from torch import Tensor

from offload.kernels.path_attention import (
    BLOCK,
    HEADER,
    AttentionChunk,
    PathRows,
    ScoreTerms,
    Window,
    path_attention_kernel,
)
from offload.model import path_attention as reference
from offload.model.path_attention import path_attention, path_rows

TOLERANCE = {torch.float32: 2e-5 if DEVICE == "cpu" else 2e-4, torch.float16: 6e-3, torch.bfloat16: 3e-2}
TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
pytestmark = ON_DEVICE


class Case(NamedTuple):
    """Sizes of one call; U uncommitted rows, of which the last T are those of the pass."""

    num_heads: int
    num_groups: int
    num_rows: int
    num_uncommitted: int
    num_prefix: int
    width: int = 32
    value_width: int = 32
    window: Window = None
    cap: float | None = None
    has_sinks: bool = False


CASES = {
    "one row": Case(4, 4, 1, 1, 5),
    "one row, long prefix": Case(8, 1, 1, 1, 300),
    "no prefix": Case(8, 2, 33, 33, 0),
    "a prefix of whole blocks": Case(4, 2, 12, 12, 128),
    "groups of 8": Case(8, 1, 19, 19, 64),
    "more heads than a program takes": Case(40, 2, 7, 7, 70),
    "wide heads": Case(4, 2, 7, 7, 40, 128, 128),
    "widest heads": Case(2, 1, 5, 5, 40, 512, 512),
    "odd widths": Case(3, 1, 13, 13, 21, 80, 48),
    "a level of a tree": Case(4, 2, 5, 41, 30),
    "window": Case(4, 2, 21, 21, 150, window=7),
    "window within the tree": Case(4, 2, 40, 40, 3, window=3),
    "window as long as the text": Case(4, 1, 33, 33, 0, window=64),
    "chunk": Case(4, 2, 21, 21, 150, window=AttentionChunk(60)),
    "chunk within the tree": Case(4, 2, 40, 40, 30, window=AttentionChunk(16)),
    "capped": Case(4, 2, 9, 9, 80, cap=2.0),
    "sinks": Case(4, 2, 9, 9, 80, has_sinks=True),
    "all at once": Case(6, 2, 9, 70, 100, 96, 64, window=20, cap=5.0, has_sinks=True),
}


class Inputs(NamedTuple):
    query_HTK: Tensor
    key_GSK: Tensor
    value_GSK: Tensor
    rows: PathRows
    terms: ScoreTerms
    seen_TU: Tensor
    num_prefix: int

    @property
    def call(self) -> tuple[Any, ...]:
        return self[:5]


def random_tree(num_nodes: int, generator: torch.Generator) -> Tensor:
    return sees([-1, *(int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, num_nodes))])


def inputs(case: Case, dtype: torch.dtype = torch.float32) -> Inputs:
    """A random tree; queries and caches are views with gaps, as those of a model and a cache are."""
    generator = torch.Generator().manual_seed(sum(case[:6]))
    query = torch.randn(case.num_rows, case.num_heads, case.width, generator=generator).transpose(0, 1)
    num_slots = case.num_prefix + case.num_uncommitted + 9
    key, value = (
        torch.randn(case.num_groups, num_slots, width, generator=generator) for width in (case.width, case.value_width)
    )
    key[:, -9:] = value[:, -9:] = torch.nan  # slots that no row may read
    states = [states.to(DEVICE, dtype) for states in (query, key[:, :-9], value[:, :-9])]
    sink_H = torch.randn(case.num_heads, generator=generator).to(DEVICE) if case.has_sinks else None
    seen_TU = random_tree(case.num_uncommitted, generator)[-case.num_rows :]
    rows = path_rows(case.num_prefix, seen_TU, path_attention, lambda walk: walk.to(DEVICE))
    terms = ScoreTerms(0.3, case.cap, sink_H)
    return Inputs(*states, replace(rows, window=case.window), terms, seen_TU, case.num_prefix)


def by_definition(given: Inputs) -> Tensor:
    """The formula in float64, row by row and head by head; positions are counted along the path."""
    query, key, value = (states.cpu().double() for states in given[:3])
    window, terms = given.rows.window, given.terms
    group, num_rows = len(query) // len(key), query.shape[1]
    out = torch.zeros(num_rows, len(query), value.shape[2], dtype=torch.float64)
    for row in range(num_rows):
        path = [*range(given.num_prefix), *(given.seen_TU[row].nonzero()[:, 0] + given.num_prefix).tolist()]
        own_place = len(path) - 1
        if isinstance(window, AttentionChunk):
            path = path[own_place // window.size * window.size :]
        elif window is not None:
            path = path[max(0, own_place - window + 1) :]
        for head in range(len(query)):
            score = key[head // group][path] @ query[head, row] * terms.scaling
            score = score if terms.cap is None else terms.cap * (score / terms.cap).tanh()
            sink = [] if terms.sink_H is None else [terms.sink_H[head : head + 1].cpu().double()]
            out[row, head] = torch.cat([score, *sink]).softmax(0)[: len(path)] @ value[head // group][path]
    return out


@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_the_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of few rows and of many."""
    given = inputs(CASES[name])
    got = path_attention(*given.call).cpu().double()
    torch.testing.assert_close(got, by_definition(given), atol=TOLERANCE[torch.float32], rtol=0)
    monkeypatch.setattr(reference, "_TILE_BYTES", 4096)
    in_pieces = path_attention(*given._replace(rows=replace(given.rows)).call).cpu().double()
    torch.testing.assert_close(in_pieces, got, atol=1e-6, rtol=1e-6)


@needs_triton
@matrix("dtype", TYPES, ids=str, daily=1)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_its_reference(name: str, dtype: torch.dtype) -> None:
    given = inputs(CASES[name], dtype)
    got = path_attention_kernel(*given.call)
    assert got.dtype == dtype and got.is_contiguous()
    torch.testing.assert_close(got, path_attention(*given.call), atol=TOLERANCE[dtype], rtol=0)


Mistake = Callable[[Inputs], Inputs]


def lost_ancestor(given: Inputs) -> Inputs:
    """The last row takes its own column in place of its parent's."""
    walk_TL = given.rows.walk_TL.clone()
    last = int(walk_TL[-1, 0] - walk_TL[-1, 1]) - 1
    walk_TL[-1, HEADER + last - 1] = walk_TL[-1, HEADER + last]
    return given._replace(rows=replace(given.rows, walk_TL=walk_TL))


def other_rows(**changes: Any) -> Mistake:
    return lambda given: given._replace(rows=replace(given.rows, **changes))


def other_terms(**changes: Any) -> Mistake:
    return lambda given: given._replace(terms=replace(given.terms, **changes))


MISTAKES: dict[str, tuple[str, Mistake]] = {
    "lost ancestor": ("no prefix", lost_ancestor),
    "no window": ("window", other_rows(window=None)),
    "one wider": ("window", other_rows(window=8)),
    "no cap": ("capped", other_terms(cap=None)),
    "no sink": ("sinks", other_terms(sink_H=None)),
}


@needs_triton
@pytest.mark.parametrize(("name", "mistake"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_would_show(name: str, mistake: Mistake) -> None:
    given = inputs(CASES[name])
    got = path_attention_kernel(*mistake(given).call)
    assert (got - path_attention(*given.call)).abs().max() > 10 * TOLERANCE[torch.float32]


LENGTH = 140


class Text(NamedTuple):
    """One path of 140 positions, and the states of all its rows."""

    query_HPK: Tensor
    key_GPK: Tensor
    value_GPK: Tensor

    @classmethod
    def random(cls, dtype: torch.dtype) -> "Text":
        generator = torch.Generator().manual_seed(7)
        return cls(*(torch.randn(n, LENGTH, 16, generator=generator).to(DEVICE, dtype) for n in (2, 1, 1)))

    def rows(self, lo: int, hi: int, terms: ScoreTerms, window: Window) -> Tensor:
        """Those of these positions, as a pass over a chain."""
        rows = path_rows(lo, causal(hi - lo), path_attention, _to_device)
        some = (self.query_HPK[:, lo:hi], self.key_GPK[:, :hi], self.value_GPK[:, :hi])
        return path_attention_kernel(*some, replace(rows, window=window), terms)

    def in_a_tree(self, lo: int, terms: ScoreTerms, window: Window) -> Tensor:
        """Rows from `lo` on, at every second column among strangers who see parts of their path."""
        generator, num_own = torch.Generator().manual_seed(9), LENGTH - lo
        column_N = lo + 2 * torch.arange(num_own)
        seen_UU = torch.eye(2 * num_own, dtype=torch.bool)
        for nth in range(num_own):
            seen_UU[2 * nth, : 2 * nth : 2] = True
            parent = int(torch.randint(0, nth + 1, (1,), generator=generator))
            seen_UU[2 * nth + 1, : 2 * parent + 1 : 2] = True
        states = []
        for part in self:
            wide = torch.randn(len(part), lo + 2 * num_own, 16, generator=generator).to(part)
            wide[:, :lo] = part[:, :lo]
            wide[:, column_N] = part[:, lo:]
            states.append(wide)
        rows = path_rows(lo, seen_UU, path_attention, _to_device)
        out = path_attention_kernel(states[0][:, lo:], *states[1:], replace(rows, window=window), terms)
        return out[column_N - lo]


def _to_device(walk: Tensor) -> Tensor:
    return walk.to(DEVICE)


WAYS: dict[str, tuple[Window, float | None, bool]] = {
    "plain": (None, None, False),
    "window": (50, None, False),
    "chunk": (AttentionChunk(48), None, False),
    "capped with sinks": (None, 3.0, True),
}


@needs_triton
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_row_has_the_bits_that_it_has_alone(way: str, dtype: torch.dtype) -> None:
    """In a prompt, in chains cut anywhere, and scattered in a tree; on both sides of `base`."""
    text, (window, cap, has_sinks) = Text.random(dtype), WAYS[way]
    terms = ScoreTerms(0.3, cap, torch.linspace(-1, 1, 2).to(DEVICE) if has_sinks else None)
    whole = text.rows(0, LENGTH, terms, window)
    for position in (0, 63, 64, 129):
        alone = text.rows(position, position + 1, terms, window)
        assert torch.equal(alone[0], whole[position]), f"alone at {position}"
    for lo, hi in ((60, 70), (64, 90), (120, LENGTH)):
        assert torch.equal(text.rows(lo, hi, terms, window), whole[lo:hi]), f"a chain from {lo} to {hi}"
    for lo in (110, 130):
        assert torch.equal(text.in_a_tree(lo, terms, window), whole[lo:]), f"in a tree behind {lo}"


@needs_triton
def test_sums_in_another_order_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were blocks cut where a pass begins, as a kernel's tiles usually are, bits would differ."""
    text, terms = Text.random(torch.float32), ScoreTerms(0.3)
    whole = text.rows(0, LENGTH, terms, None)
    states = (text.query_HPK[:, 130:], text.key_GPK, text.value_GPK)
    rows = path_rows(130, causal(10), path_attention, _to_device)
    walk_TL = rows.walk_TL
    order = torch.arange(int(walk_TL[0, 1]), device=walk_TL.device)
    moved_TL = torch.cat([walk_TL[:, :HEADER], order.roll(32).int().expand(10, -1), walk_TL[:, HEADER:]], 1)
    moved_TL[:, 1] = 0
    got = path_attention_kernel(*states, replace(rows, walk_TL=moved_TL), terms)
    torch.testing.assert_close(got, whole[130:], atol=TOLERANCE[torch.float32], rtol=0)
    assert not torch.equal(got, whole[130:])


@pytest.mark.parametrize("num_prefix", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("seed", range(3))
def test_a_walk_names_the_columns_of_a_path(num_prefix: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    chain_then_tree = causal(100)
    chain_then_tree[70:, 70:] = random_tree(30, generator)
    for seen_UU in (random_tree(40, generator), chain_then_tree, chain_then_tree[60:], chain_then_tree[99:]):
        rows = path_rows(num_prefix, seen_UU, path_attention)
        assert rows.walk_TL.dtype == torch.int32 and (rows.walk_TL.shape[1] - HEADER) % BLOCK == 0
        num_uncommitted = seen_UU.shape[1]
        for seen_U, walk_L in zip(seen_UU, rows.walk_TL.tolist(), strict=True):
            path = [*range(num_prefix), *(seen_U.nonzero()[:, 0] + num_prefix).tolist()]
            num_keys, base, *columns = walk_L
            assert num_keys == len(path) and base % BLOCK == 0
            walked = [*range(min(base, num_keys)), *columns[: max(0, num_keys - base)]]
            assert walked == path
            assert all(0 <= column < num_prefix + num_uncommitted for column in columns)
