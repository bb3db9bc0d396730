"""The yield of runs in flight where it is known beforehand: drafts that are always, never and just once right."""

import pytest

from offload.bench.studies.runs_in_flight import Guesses, Path, flight_yield

PROMPT, TEXT = (9, 8), tuple(index % 7 for index in range(120))
EVERYTHING = (*PROMPT, *TEXT)


def right(paths: list[Path]) -> list[Guesses]:
    return [[(EVERYTHING[len(path)], 0.9)] if len(path) < len(EVERYTHING) else [(0, 0.9)] for path in paths]


def wrong(paths: list[Path]) -> list[Guesses]:
    return [[(7, 0.5), (8, 0.4)] for _ in paths]


def second(paths: list[Path]) -> list[Guesses]:
    """The right token is the second best, behind one that it never is."""
    return [[(7, 0.5), *((token, 0.4) for token, _ in guesses)] for guesses in right(paths)]


@pytest.mark.parametrize("num_runs", [1, 2, 4])
def test_a_draft_that_is_right_fills_every_cycle(num_runs: int) -> None:
    found = flight_yield(right, PROMPT, TEXT, num_nodes=4, num_runs=num_runs)
    assert found.num_tokens >= len(TEXT) and found.num_cycles == pytest.approx(len(TEXT) / 4 + num_runs - 1, abs=1)
    assert found.num_dead == 0


@pytest.mark.parametrize("num_runs", [1, 2, 4])
def test_a_draft_that_is_wrong_leaves_one_token_a_trip(num_runs: int) -> None:
    found = flight_yield(wrong, PROMPT, TEXT, num_nodes=4, num_runs=num_runs)
    assert found.num_cycles == pytest.approx(len(TEXT) * num_runs, abs=num_runs)
    assert found.num_dead == pytest.approx(found.num_ended * (1 - 1 / num_runs), abs=num_runs)


def test_a_wider_run_holds_the_second_best() -> None:
    """f of the three below the root: .5, .4, then .25 below the wrong one: one guess comes true in every run."""
    assert flight_yield(second, PROMPT, TEXT, num_nodes=3, num_runs=1).num_cycles == len(TEXT) / 2
