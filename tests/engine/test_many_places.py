"""Places of texts and their memory: what is kept is what was computed, and no pass or tree is larger than planned."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import plan_memory
from tiny import Pair, advance

import offload
from offload.checkpoint.safetensors import open_checkpoint
from offload.drafting import draft_model, dynamic
from offload.engine.decoder import Decoder
from offload.engine.request import Request
from offload.engine.sequence import Caches
from offload.memory.planner import ModelFiles, least_budget
from offload.model.streamed import StreamedModel
from offload.planning.cost_model import Traffic
from offload.planning.selector import TreeSelector
from offload.sampling_options import Sampling
from offload.trees.spec import parse_tree

GREEDY, LONG, OTHER = Sampling(), list(range(9, 150)), list(range(150, 90, -1))


def opened(pair: Sequence[Path], tree: str = "none", **more: Any) -> Decoder:
    how = {"ram": "512MiB", "dtype": "float32", "context": 256, "profile": "none", "threads": 1, "invariant": False}
    return offload.load(*pair, tree=tree, **{**how, **more})


@pytest.mark.parametrize("parallel", [1, 3])
def test_keys_and_values_of_all_texts_take_what_was_planned(pair: Pair, parallel: int) -> None:
    with opened(pair, "8x3", parallel=parallel) as decoder:
        decoder.generate([5, 9], max_new_tokens=2)
        buffers = decoder._pool.caches.target._buffers.of_layer
        assert sum(states.nbytes for held in buffers.values() for states in held.values()) == decoder.plan.kv_bytes


def test_what_a_cancelled_text_had_not_taken_in_yet_is_copied(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(pair, parallel=2) as decoder:
        first = decoder.start(Request(LONG, GREEDY, 20))
        advance(decoder, [first])
        with monkeypatch.context() as patch:
            patch.setattr(decoder._speculation, "_max_prompt_rows", 16)
            goner = decoder.start(Request(LONG, GREEDY, 20))
            advance(decoder, [goner])
            decoder.release(goner)
        again = decoder.start(Request(LONG, GREEDY, 20), continues=True)
        assert again.sequence.stats.num_kept_tokens == len(LONG) - 1


def test_a_copy_that_was_cut_short_is_kept_by_nobody(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(pair, parallel=2) as decoder:
        wanted = decoder.generate(LONG, max_new_tokens=12).token_ids
        first = decoder.start(Request(LONG, GREEDY, 12))
        second = decoder.start(Request(OTHER, GREEDY, 12))
        advance(decoder, [first, second])
        decoder.release(second)
        with monkeypatch.context() as patch:
            patch.setattr(Caches, "copy_from", lambda *_: _interrupt())
            with pytest.raises(KeyboardInterrupt):
                decoder.start(Request(LONG, GREEDY, 12), continues=True)
        first.sequence.caches.clear()  # so that nothing is to be copied
        decoder.release(first)
        runs = [decoder.start(Request(LONG, GREEDY, 12), continues=True) for _ in range(2)]
        while not all(run.is_finished for run in runs):
            advance(decoder, runs)
        assert [run.sequence.new_ids for run in runs] == [wanted, wanted]


def test_who_is_interrupted_takes_no_place_along(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error may be held for long, and with it all that was under way, as a notebook does."""
    with opened(pair, parallel=2) as decoder:
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "_pass", lambda *_: _interrupt())
            errors = [_held(lambda: decoder.generate([5, 9], max_new_tokens=2)) for _ in range(4)]
        assert all(isinstance(error, KeyboardInterrupt) for error in errors)
        assert len(decoder.generate([7], max_new_tokens=2).token_ids) == 2


@pytest.mark.parametrize("tree", ["dynamic:12x5", "chain:auto"])
def test_chains_that_grow_leave_room_for_those_of_others(pair: Pair, tree: str) -> None:
    """Their lengths change as steps go by: what memory was planned for is shared out before."""
    with opened(pair, tree, parallel=3) as decoder:
        *_, choice = decoder.check(Request(LONG, GREEDY, 4), tree="chain:auto")
        chains = choice.chains
        assert chains is not None and 3 * (1 + chains.max_length) <= decoder.plan.num_nodes


@pytest.mark.parametrize(("tree", "has_draft", "wanted"), [("chain:auto", True, 40), ("auto", False, 32)])
def test_trees_of_all_texts_have_room_together(tree: str, has_draft: bool, wanted: int) -> None:
    """Chains have five nodes each, guesses four: what one text has room for is too much for eight."""
    room = Traffic(1000, 100)
    trees = TreeSelector(parse_tree(tree), lambda *_: (None, ""), lambda num: room if num <= 40 else None, context=200)
    assert replace(trees, parallel=8, has_draft=has_draft).most_nodes == wanted


def test_a_draft_takes_in_no_more_at_once_than_planned(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "_CHUNK", 20)
    prompts, widths, right = [LONG[start : start + 18] for start in (0, 20, 40)], list[int](), StreamedModel.run
    with opened(pair) as decoder:
        wanted = [decoder.generate(ids, max_new_tokens=10).token_ids for ids in prompts]
    with opened(pair, "dynamic:12x5", parallel=3) as decoder:
        model = decoder.drafter.model  # type: ignore[attr-defined]

        def run(own: StreamedModel, token_T: torch.Tensor, *arguments: Any, **more: Any) -> torch.Tensor:
            widths.extend([len(token_T)] if own is model else [])
            return right(own, token_T, *arguments, **more)

        monkeypatch.setattr(StreamedModel, "run", run)
        assert [one.token_ids for one in decoder.generate(prompts, max_new_tokens=10)] == wanted
    assert 15 < max(widths) <= 20


def test_rows_of_a_forest_take_memory_as_they_are_run(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text may have all rows, but not all texts together."""
    grown, right = list[dynamic.GrowingTree](), dynamic.GrowingTree.__init__
    monkeypatch.setattr(dynamic.GrowingTree, "__init__", lambda own, *given: (right(own, *given), grown.append(own))[0])
    with opened(pair, "dynamic:40x5", parallel=12) as decoder:
        prompts = [[seed, seed + 1] for seed in range(3, 15)]
        many = decoder.generate(prompts, max_new_tokens=12)
        assert [one.token_ids for one in many] == [
            decoder.generate(ids, max_new_tokens=12).token_ids for ids in prompts
        ]
    assert max(own.num_run for own in grown) > 40
    assert all(len(own._position_U) <= 2 * max(32, own.num_run) for own in grown)


def _held(act: Callable[[], object]) -> BaseException | None:
    try:
        act()
    except BaseException as error:
        return error
    return None


def _interrupt() -> None:
    raise KeyboardInterrupt


CONTEXT = 128


@pytest.fixture(scope="module")
def ram_bytes(pair: Pair) -> int:
    """With which all layers stay beside one node, and some must pass beside 64."""
    files = ModelFiles(*map(open_checkpoint, pair))
    plan = partial(plan_memory, files, dtype="auto", context=CONTEXT)
    least = least_budget(lambda ram: require_whole(plan(ram=ram, num_nodes=1)))
    many = least_budget(lambda ram: require_whole(plan(ram=ram, num_nodes=64)))
    assert least < many - 1
    return many - 1


def require_whole(plan: Any) -> None:
    if plan.is_streamed:
        raise offload.UserError("layers pass")


@pytest.mark.parametrize("num_nodes", [1, 64])
def test_a_larger_tree_that_is_not_chosen_takes_nothing(
    num_nodes: int, pair: Pair, ram_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal bits are promised where layers are streamed: where the chosen tree makes them, and nowhere else."""
    monkeypatch.setattr(TreeSelector, "nodes_to_plan", lambda *_: num_nodes)
    with offload.load(*pair, ram_bytes, "auto", context=CONTEXT, threads=1, profile="none") as decoder:
        assert decoder.plan.num_nodes == num_nodes and decoder.plan.is_streamed == (num_nodes == 64)
        assert decoder.invariance.holds == decoder.plan.is_streamed, decoder.invariance.reason
