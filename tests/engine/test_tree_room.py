"""Memory, and what goes by it, is that of the tree that was chosen: not of the largest that might have been."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from plans import plan_memory

import offload
from offload.checkpoint.safetensors import open_checkpoint
from offload.engine.decoder import Decoder
from offload.memory.planner import ModelFiles, least_budget
from offload.planning.selector import TreeSelector

CONTEXT = 128


@pytest.fixture(scope="module")
def ram_bytes(pair: tuple[Path, Path]) -> int:
    """With which all layers stay beside one node, and some must pass beside 64."""
    files = ModelFiles(*map(open_checkpoint, pair))
    plan = partial(plan_memory, files, dtype="auto", context=CONTEXT)
    least = least_budget(lambda ram: whole(plan(ram=ram, num_nodes=1)))
    many = least_budget(lambda ram: whole(plan(ram=ram, num_nodes=64)))
    assert least < many - 1
    return many - 1


def whole(plan: Any) -> Any:
    """The plan, where nothing passes."""
    if plan.is_streamed:
        raise offload.UserError("layers pass")
    return plan


def opened(pair: tuple[Path, Path], ram_bytes: int) -> Decoder:
    return offload.load(*pair, ram_bytes, "auto", context=CONTEXT, threads=1, profile="none")


@pytest.mark.parametrize("num_nodes", [1, 64])
def test_a_larger_tree_that_is_not_chosen_takes_nothing(
    num_nodes: int, pair: tuple[Path, Path], ram_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal bits are promised where layers are streamed: where the chosen tree makes them, and nowhere else."""
    monkeypatch.setattr(TreeSelector, "nodes_to_plan", lambda *_: num_nodes)
    with opened(pair, ram_bytes) as decoder:
        assert decoder.plan.num_nodes == num_nodes and decoder.plan.is_streamed == (num_nodes == 64)
        assert decoder.invariance.holds == decoder.plan.is_streamed, decoder.invariance.reason
