"""What is printed about a run: trees by their kind and whole, memory beside all that it may take."""

import re
from typing import Any

import pytest

from offload.cli.demo_run import (
    ShownPass,
    tree_lines,
    usual_pass,
)
from offload.engine.sequence import StepMetrics

#        root
#       / | | |
#      1   2  3   4     1 is kept
#     / | |
#    5   6  7           5 is kept
PARENTS = [-1, 0, 0, 0, 0, 1, 1, 2]
WORDS = ["(", "self", " x", "*", "key", ",", "=", "\x1b[31m", "\n        "]


def a_pass(parents: list[int], accepted: list[int], root: int = 0) -> StepMetrics:
    moved: Any = None
    return StepMetrics(parents, [root, *range(1, len(parents))], accepted, 1, 0.1, 0.5, moved)


def lines(passed: StepMetrics) -> list[str]:
    return tree_lines(ShownPass(3, 9, passed, 8), lambda token: WORDS[token]).splitlines()


@pytest.mark.parametrize("accepted", [[0], [0, 1], [0, 2, 7], [0, 1, 6]])
def test_every_guess_is_drawn_or_counted(accepted: list[int]) -> None:
    drawn = lines(a_pass(PARENTS, accepted))
    body = "\n".join(drawn[2:])
    num_drawn = len(re.findall(r"├─ (?!\d+ more)|└\*", body))
    num_counted = sum(int(number) for number in re.findall(r"(\d+) (?:more|behind it)", body))
    assert num_drawn + num_counted == len(PARENTS) - 1
    assert body.count("└+") == 1 and "\x1b" not in body


def test_a_usual_pass_has_the_median_and_is_not_the_last() -> None:
    kept = [[0], [0, 1], [0, 1, 5], [0, 1], [0, 1, 5]]
    passes = [a_pass([-1], [0]), *(a_pass(PARENTS, accepted, root=index) for index, accepted in enumerate(kept))]
    shown = usual_pass(passes)
    assert shown is not None and shown.num_kept == 1 and shown.number in (3, 5) and shown.num_passes == 6
    assert shown.own_token == passes[shown.number].tokens[0]
    assert usual_pass([a_pass([-1], [0]), a_pass(PARENTS, [0])]) is None, "no pass but the last has guesses"
