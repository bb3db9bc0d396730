"""What rows of a tree choose by an index: by each row's own path, computed one after another, in any tree and cut."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offload.kernels.path_attention import PathRows, ScoreTerms
from offload.model import indexed
from offload.model.indexed import Choice, Pool, choose, index_scores
from offload.model.parts import BatchMask, PartMask
from offload.model.path_attention import path_attention, path_rows

NUM_HEADS, WIDTH = 3, 8
MEANS = Pool(4, lambda raw_JRW, first_J: raw_JRW.mean(1) + first_J[:, None])


def random_tree(num_rows: int, seed: int) -> np.ndarray:
    """Which rows lie on the path to each; chains that branch now and then, and some from the start."""
    chance = np.random.default_rng(seed)
    sees_NN = np.eye(num_rows, dtype=bool)
    for row in range(1, num_rows):
        parent = row - 1 if chance.random() < 0.7 else int(chance.integers(-1, row))
        if parent >= 0:
            sees_NN[row] |= sees_NN[parent]
    return sees_NN


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Small whole ones, so that sums are exact and many scores are equal."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def case(num_prefix: int, num_rows: int, seed: int, num_earlier: int = 0) -> tuple[PathRows, list[list[int]], Any]:
    """Rows of a pass, the columns of each one's path, and queries, weights and states for them."""
    sees_NN = random_tree(num_earlier + num_rows, seed)[num_earlier:]
    rows = path_rows(num_prefix, torch.from_numpy(sees_NN), path_attention)
    paths = [[*range(num_prefix), *(num_prefix + np.flatnonzero(sees)).tolist()] for sees in sees_NN]
    query_THK = numbers(num_rows, NUM_HEADS, WIDTH, seed=seed)
    weight_TH = numbers(num_rows, NUM_HEADS, seed=seed + 1)
    state_SW = numbers(num_prefix + num_earlier + num_rows, WIDTH, seed=seed + 2)
    return rows, paths, (query_THK, weight_TH, state_SW)


def wanted(choice: Choice, path: list[int], query_HK: Tensor, weight_H: Tensor, state_SW: Tensor) -> set[int]:
    """The columns that a row with this path chooses, by itself."""
    size = choice.pool.size if choice.pool else 1
    pools = [path[lo : lo + size] for lo in range(0, len(path) - size + 1, size)]
    keys = [
        choice.pool.keys(state_SW[pool][None], torch.tensor([index * size]))[0] if choice.pool else state_SW[pool[0]]
        for index, pool in enumerate(pools)
    ]
    scores = [float((weight_H * (query_HK @ key).relu()).sum()) for key in keys]
    best = sorted(range(len(pools)), key=lambda index: (-scores[index], index))[: choice.num_keys]
    return {column for index in best for column in pools[index]} | {*path[len(pools) * size :]}


def chosen(rows: PathRows, paths: list[list[int]]) -> list[set[int]]:
    """The columns that each row sees."""
    if rows.chosen_TS is None:
        return [{*path} for path in paths]
    return [{*path} & {*own.nonzero().flatten().tolist()} for path, own in zip(paths, rows.chosen_TS, strict=True)]


def assert_chooses(choice: Choice, num_prefix: int, num_rows: int, seed: int, num_earlier: int = 0) -> None:
    rows, paths, (query_THK, weight_TH, state_SW) = case(num_prefix, num_rows, seed, num_earlier)
    got = choose(choice, rows, query_THK, weight_TH, state_SW)
    for row, own in enumerate(chosen(got, paths)):
        assert own == wanted(choice, paths[row], query_THK[row], weight_TH[row], state_SW), row
    if got.chosen_TS is not None:
        found = ({*own.nonzero().flatten().tolist()} for own in got.chosen_TS)
        assert all(own <= {*path} for own, path in zip(found, paths, strict=True)), "nothing beside the path"


CHOICES = {"tokens": Choice(12), "pools": Choice(3, MEANS), "odd pools": Choice(2, MEANS._replace(size=5))}
SIZES = [(0, 1), (0, 40), (5, 24), (63, 64), (64, 30), (130, 24), (600, 9)]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("num_prefix", "num_rows"), SIZES)
def test_each_row_chooses_on_its_own_path(choice: str, num_prefix: int, num_rows: int) -> None:
    for seed in range(3):
        assert_chooses(CHOICES[choice], num_prefix, num_rows, seed)
    assert_chooses(CHOICES[choice], num_prefix, num_rows, 7, num_earlier=11)


def test_a_prompt_chooses_row_by_row() -> None:
    """Rows that lie in order, most of which end before the blocks that all have in common."""
    rows = path_rows(70, torch.ones(150, 150, dtype=torch.bool).tril(), path_attention)
    paths = [[*range(70 + row + 1)] for row in range(150)]
    query_THK, weight_TH = numbers(150, NUM_HEADS, WIDTH), numbers(150, NUM_HEADS, seed=1)
    state_SW = numbers(220, WIDTH)
    for choice in CHOICES.values():
        got = chosen(choose(choice, rows, query_THK, weight_TH, state_SW), paths)
        for row in (0, 5, 57, 58, 120, 149):
            assert got[row] == wanted(choice, paths[row], query_THK[row], weight_TH[row], state_SW)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_in_the_whole_tree_would_show(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a row chooses among all columns, its cousins' among them."""
    monkeypatch.setattr(indexed, "_seen", lambda rows, num: torch.ones(len(rows.walk_TL), num, dtype=torch.bool))
    with pytest.raises(AssertionError):
        assert_chooses(CHOICES[choice], 30, 64, 0)


def test_texts_that_share_a_pass_choose_among_their_own() -> None:
    one, other = case(40, 9, seed=3), case(70, 12, seed=4)
    query_THK, weight_TH = (torch.cat([one[2][at], other[2][at]]) for at in range(2))
    gap_SW = torch.full((7, WIDTH), torch.nan)  # slots that nothing was written to
    state_SW = torch.cat([one[2][2], gap_SW, other[2][2]])
    num_first = len(one[2][2])
    parts = (PartMask(0, 9, 0, num_first, one[0]), PartMask(9, 21, num_first + 7, len(state_SW), other[0]))
    for choice in CHOICES.values():
        got = choose(choice, BatchMask(parts), query_THK, weight_TH, state_SW)
        for part, (rows, paths, what) in zip(got.parts, (one, other), strict=True):
            assert chosen(part.mask, paths) == chosen(choose(choice, rows, *what), paths)


def test_scores_are_added_up_over_heads() -> None:
    query_THK, weight_TH = torch.randn(40, NUM_HEADS, WIDTH), torch.randn(40, NUM_HEADS)
    key_JK = torch.randn(700, WIDTH)
    wanted_TJ = ((query_THK @ key_JK.T).relu() * weight_TH[..., None]).sum(1)
    torch.testing.assert_close(index_scores(query_THK, weight_TH, key_JK), wanted_TJ, atol=1e-4, rtol=1e-5)
    even_TJ = (query_THK @ key_JK.T).relu().sum(1)
    torch.testing.assert_close(index_scores(query_THK, None, key_JK), even_TJ, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("num_prefix", "num_rows"), SIZES[1:])
def test_attention_sees_what_was_chosen(num_prefix: int, num_rows: int) -> None:
    rows, paths, (query_THK, weight_TH, state_SW) = case(num_prefix, num_rows, seed=5)
    rows = choose(CHOICES["tokens"], rows, query_THK, weight_TH, state_SW)
    query_HTK, key_GSK, value_GSV = torch.randn(4, num_rows, 16), *torch.randn(2, 2, len(state_SW), 16)
    got_THV = path_attention(query_HTK, key_GSK, value_GSV, rows, ScoreTerms(0.3))
    without = path_attention(query_HTK, key_GSK, value_GSV, replace(rows, chosen_TS=None), ScoreTerms(0.3))
    for row, own in enumerate(chosen(rows, paths)):
        columns = sorted(own)
        for head in range(4):
            weight_C = (0.3 * key_GSK[head // 2, columns] @ query_HTK[head, row]).softmax(0)
            wanted_V = weight_C @ value_GSV[head // 2, columns]
            torch.testing.assert_close(got_THV[row, head], wanted_V, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(got_THV, without, atol=1e-2), "a choice that is not heeded would show"
