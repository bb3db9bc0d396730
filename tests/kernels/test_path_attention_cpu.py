"""Attention along paths by machine code: the formula in float64, and bits that depend on a path alone."""

from dataclasses import replace

import pytest
import torch
from rounding import Promise, assert_same_bits
from test_path_attention import CASES, Case, Inputs, by_definition, inputs
from torch import Tensor

from offload.kernels import path_attention_cpu
from offload.kernels.machine_code import fused_lanes
from offload.kernels.path_attention import BLOCK, HEADER
from offload.kernels.path_attention_cpu import attention_of, can_attend
from offload.model.path_attention import path_rows

TYPES = (torch.float32, torch.float16, torch.bfloat16)
TREE = Case(8, 2, 70, 70, 150, 48, 80)
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="inputs lie on the GPU"),
    pytest.mark.skipif(not fused_lanes(), reason="this processor: no fused products, or no llvmlite"),
]


def attended(given: Inputs, at_once: int = 1) -> Tensor:
    attention = attention_of(*given.call)
    room = torch.full((attention.num_room + 1,), torch.nan)
    room[-1] = 1e30
    attention.begin(at_once)
    attention.take_parts(room)
    assert attention.call[0] >= attention.num_parts, "all parts"
    assert room[-1] == 1e30, "no more room than was asked for"
    return attention.out


def row_alone(given: Inputs, row: int, sees_S: Tensor | None = None) -> Inputs:
    """Put the row behind a prefix that is its path, or what it sees of it, all of which is committed."""
    own_S = torch.cat([torch.ones(given.num_prefix, dtype=torch.bool), given.seen_TU[row]])
    own_S = (own_S if sees_S is None else own_S & sees_S).nonzero()[:, 0]
    states = (given.query_HTK[:, row : row + 1], given.key_GSK[:, own_S], given.value_GSK[:, own_S])
    rows = path_rows(len(own_S) - 1, torch.ones(1, 1, dtype=torch.bool), given.rows.attend)
    rows = replace(rows, window=given.rows.window)
    return Inputs(*states, rows, given.terms, torch.ones(1, 1, dtype=torch.bool), len(own_S) - 1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_it_is_the_formula(name: str, dtype: torch.dtype) -> None:
    given = inputs(CASES[name], dtype)
    assert can_attend(given.key_GSK, given.value_GSK)
    torch.testing.assert_close(attended(given).double(), by_definition(given), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["no prefix", "a level of a tree", "window within the tree", "all at once"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_row_has_the_bits_of_its_path_alone(name: str, dtype: torch.dtype) -> None:
    given = inputs(CASES[name], dtype)
    together = attended(given)
    for row in (0, given.seen_TU.shape[0] // 2, given.seen_TU.shape[0] - 1):
        assert_same_bits(attended(row_alone(given, row))[0], together[row], Promise.INVARIANT, f"row {row}")


def test_keys_in_another_order_would_show() -> None:
    """Planted: the last two keys of each path change places."""
    given = inputs(TREE)
    wanted = attended(given)
    for row_L in given.rows.walk_TL:
        last = HEADER + int(row_L[0] - row_L[1]) - 1
        row_L[last - 1 : last + 1] = row_L[last - 1 : last + 1].flip(0).clone()
    got = attended(given)
    assert not torch.equal(got, wanted)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("most_scores", "least_tiles"), [(1, 1), (1 << 11, 1), (1 << 20, 1), (1 << 20, 1000)])
def test_tiles_change_no_bit(most_scores: int, least_tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(TREE, torch.bfloat16)
    wanted = attended(given)
    monkeypatch.setattr(path_attention_cpu, "_MOST_SCORES", most_scores)
    monkeypatch.setattr(path_attention_cpu, "_LEAST_TILES", least_tiles)
    again = inputs(TREE, torch.bfloat16)
    assert_same_bits(attended(again, at_once=3), wanted, Promise.INVARIANT)


def test_threads_share_the_parts_and_scores_of_any_size_have_finite_weights() -> None:
    """A part that another thread began is left to it."""
    given = inputs(TREE)
    attention = attention_of(*given.call)
    attention.out.fill_(7.0)
    attention.begin(1)
    attention.call[0] = attention.num_parts
    attention.take_parts(torch.empty(attention.num_room))
    assert attention.out.eq(7.0).all()
    # Scores of any size have finite weights.
    given = inputs(Case(4, 2, 9, 9, 80, cap=30.0))
    for terms in (replace(given.terms, cap=None), given.terms):
        for factor in (1e-20, 1e4):
            scaled = given._replace(query_HTK=given.query_HTK * factor, terms=terms)
            torch.testing.assert_close(attended(scaled).double(), by_definition(scaled), atol=1e-4, rtol=1e-4)


def test_a_row_sees_what_it_chose_and_what_is_no_number_stays_none() -> None:
    given = inputs(Case(4, 2, 30, 30, 100))
    chance = torch.Generator().manual_seed(3)
    chosen_TS = torch.rand(30, 130, generator=chance) < 0.5
    chosen_TS[torch.arange(30), torch.arange(100, 130)] = True  # itself
    got = attended(given._replace(rows=replace(given.rows, chosen_TS=chosen_TS)))
    for row in (0, 11, 29):
        alone = row_alone(given, row, chosen_TS[row])
        torch.testing.assert_close(got[row].double(), by_definition(alone)[0], atol=1e-5, rtol=1e-5)
    # What is no number stays none.
    given = inputs(Case(4, 2, 3, 3, BLOCK))
    given.key_GSK[0, 5] = torch.nan
    got = attended(given)
    assert got[:, :2].isnan().all() and got[:, 2:].isfinite().all(), "the first group's heads alone"
