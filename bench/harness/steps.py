"""Where the bench touches a decoder beyond `generate` and `run`: passes, steps, poisoned slots.

Invariant: what a pass emits is the target's own greedy token, so every pass that is timed can be
proved.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from offload.bench.harness.gate import Written
from offload.bench.harness.timeline import Timeline
from offload.calibration.curves import draft_curve
from offload.calibration.trial import rows_of
from offload.drafting.base import DraftText
from offload.drafting.model import ModelDrafter
from offload.engine.decoder import Decoder
from offload.model.target import BatchEntry
from offload.planning.cost_model import Curve
from offload.sampling_options import Sampling
from offload.trees.token_tree import TokenTree
from offload.trees.topology import DEFAULT_ACCEPTANCE, best_first, chain

_DEPTH = 24
_BURSTS = (1, 2, 4, 8, 16, 24)  # tokens that a sweep may yield


class Pass(NamedTuple):
    """One forward of the target."""

    num_rows: int
    seconds: float
    # part of the seconds in which compute waited for the link
    stall_s: float
    # bytes that came over the link
    num_bytes: int
    # part of the seconds until the host had enqueued all of it
    host_s: float


class PassRunner:
    """Runs passes of any size behind one text, which goes on by one token in each."""

    def __init__(self, decoder: Decoder, prompt_ids: Sequence[int]) -> None:
        self._decoder = decoder
        self._text = decoder.begin(prompt_ids, Sampling())

    def run(self, num_rows: int) -> Pass:
        """Run one pass over a tree of so many nodes; the first one takes the prompt in as well."""
        target = self._decoder.target
        stream = self._decoder.target.stream
        tokens = self._text.tokens
        cache = self._text.caches.target
        shape = best_first(DEFAULT_ACCEPTANCE, num_rows, _DEPTH) if num_rows > 1 else chain(0)
        node_N = torch.cat([torch.tensor(tokens[-1:]), torch.arange(num_rows - 1) % 1000 + 3])
        tree = TokenTree(shape, node_N)
        stalled_s = stream.stall_s
        moved_bytes = stream.bytes_read
        started = time.perf_counter()
        (scores,) = target.score([BatchEntry.whole(tokens, cache, tree)])
        host_s = time.perf_counter() - started
        target.wait()
        seconds = time.perf_counter() - started
        token = int(scores.whole()[0].argmax())
        target.commit([0], len(tokens), cache)
        tokens.append(token)
        return Pass(
            num_rows, seconds, stream.stall_s - stalled_s, stream.bytes_read - moved_bytes, host_s
        )

    def written(self) -> Written:
        text = self._text
        return Written(text.tokens[: text.num_prompt_tokens], text.new_ids)


def kernel_rows(decoder: Decoder) -> list[dict[str, Any]]:
    """Return which kernels a decoder took beside their references, and why not the others."""
    return rows_of(decoder.comparisons)


def draft_passes(decoder: Decoder, prompt_ids: Sequence[int], budget_s: float) -> Curve:
    """Return seconds of a draft pass against its rows.

    The widths that a run records are recorded before.
    """
    drafter = decoder.drafter
    text = decoder.begin(prompt_ids, Sampling())
    assert isinstance(drafter, ModelDrafter), "there is a draft"
    for width in _BURSTS:
        text.caches.clear()
        tokens = [prompt_ids[-1]] * width
        drafter.grow([DraftText(chain(1), tokens, text.sampler, text.caches.draft)])
    return draft_curve(drafter, text.sampler, prompt_ids, text.caches.draft, budget_s=budget_s)


def record_steps(
    decoder: Decoder, prompt_ids: Sequence[int], tree: str, num_steps: int
) -> tuple[Timeline, list[int]]:
    """Take greedy steps behind a prompt; return their events and all new tokens, to be proved.

    The step that takes the prompt in is run but not recorded.
    """
    stream = decoder.target.stream
    timeline = Timeline()
    shape = decoder.run(prompt_ids, Sampling(), max_new_tokens=1, tree=tree).tree_choice.shape
    text = decoder.begin(prompt_ids, Sampling(), shape=shape)
    decoder.step(text)
    stream.record = timeline.add
    try:
        for _ in range(num_steps):
            stats = text.set_shape(shape)
            started = time.perf_counter()
            decoder.step(text)
            drafted = started + stats.draft_s
            swept = drafted + stats.sweep_s
            timeline.add("draft", -1, started, drafted)
            timeline.add("sweep", -1, drafted, swept)
            timeline.add("verify", -1, swept, swept + stats.verify_s)
    finally:
        stream.record = None
    return timeline, text.new_ids


def repeated_scores(
    decoder: Decoder, num_rows: int, num_sweeps: int, held_bytes: Callable[[], int]
) -> tuple[int, int]:
    """Run passes with NaN in every slot that is free.

    Returns how many repeat the first scores, and the bytes that are lost.
    """
    target = decoder.target
    topology = best_first(DEFAULT_ACCEPTANCE, num_rows, 12)
    tree = TokenTree(topology, torch.arange(num_rows) + 3)
    num_same = 0
    tokens = [5, 6, 7]
    cache = decoder.begin([5, 6, 7], Sampling()).caches.target
    target.stream.poison_released = True
    try:
        wanted = target.score([BatchEntry.whole(tokens, cache, tree)])[0].whole()
        assert not wanted.isnan().any(), "a slot was read before its layer had arrived"
        before_bytes = held_bytes()
        for _ in range(num_sweeps):
            cache.clear()
            (scores,) = target.score([BatchEntry.whole(tokens, cache, tree)])
            num_same += int(torch.equal(scores.whole(), wanted))
        return num_same, held_bytes() - before_bytes
    finally:
        target.stream.poison_released = False
