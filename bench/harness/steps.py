"""Where the bench touches a decoder beyond `generate` and `run`: passes, steps, poisoned slots.

The timeline of a few steps is a Chrome trace. Nothing in it is inferred but the moment at which a
copy really began: it is asked for while the ones before it still read, so it begins when they end,
at the earliest. Invariant: what a pass emits is the target's own greedy token, so every pass that
is timed can be proved.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.bench.harness.gate import Written
from offload.bench.harness.record import store
from offload.calibration.threads import draft_curve
from offload.calibration.trial import rows_of
from offload.drafting.base import DraftText
from offload.engine.decoder import Decoder
from offload.planning.cost_model import Curve
from offload.sampling_options import Sampling
from offload.trees.token_tree import TokenTree
from offload.trees.topology import DEFAULT_ACCEPTANCE, best_first, chain

LANES = ("sweep", "draft", "verify", "wait", "compute", "copy")  # from top to bottom
_DEPTH = 24
_BURSTS = (1, 2, 4, 8, 16, 24)  # tokens that a sweep may yield


class Pass(NamedTuple):
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
        """Run a pass over a tree of this many nodes; the first one takes the prompt in as well."""
        target = self._decoder.target
        stream = target.stream
        tokens = self._text.tokens
        cache = self._text.caches.target
        shape = best_first(DEFAULT_ACCEPTANCE, num_rows, _DEPTH) if num_rows > 1 else chain(0)
        node_N = torch.cat([torch.tensor(tokens[-1:]), torch.arange(num_rows - 1) % 1000 + 3])
        stalled_s = stream.stall_s
        moved_bytes = stream.bytes_read
        started = time.perf_counter()
        part = target.part_of(tokens, cache, TokenTree(shape, node_N))
        (scores,) = target.score([part])
        host_s = time.perf_counter() - started
        target.wait()
        seconds = time.perf_counter() - started
        token = int(scores.whole()[0].argmax())
        target.commit([0], len(tokens), cache)
        tokens.append(token)
        moved_bytes = stream.bytes_read - moved_bytes
        return Pass(num_rows, seconds, stream.stall_s - stalled_s, moved_bytes, host_s)

    def written(self) -> Written:
        text = self._text
        return Written(text.tokens[: text.num_prompt_tokens], text.new_ids)


def kernel_rows(decoder: Decoder) -> list[dict[str, Any]]:
    return rows_of(decoder.comparisons)


def draft_passes(decoder: Decoder, prompt_ids: Sequence[int], budget_s: float) -> Curve:
    """Return seconds of a draft pass against its rows, recorded before as a run records them."""
    drafter = decoder.drafter
    text = decoder.begin(prompt_ids, Sampling())
    assert drafter.model is not None, "there is a draft"
    for width in _BURSTS:
        text.caches.clear()
        tokens = [prompt_ids[-1]] * width
        drafter.propose([DraftText(chain(1), tokens, text.sampler, text.caches.draft)])
    return draft_curve(drafter, text.sampler, prompt_ids, text.caches.draft, budget_s=budget_s)


class Event(NamedTuple):
    kind: str  # one of LANES
    layer: int  # -1 where it concerns none
    start_s: float
    end_s: float


class Timeline:
    """Collects events; `add` may be called by any thread, since a list takes one at a time."""

    def __init__(self) -> None:
        self._events = list[Event]()

    def add(self, kind: str, layer: int, start_s: float, end_s: float) -> None:
        self._events.append(Event(kind, layer, start_s, end_s))

    def events(self) -> list[Event]:
        """Return all events in the order of their starts, copies one behind the other."""
        free_s = float("-inf")
        events = []
        for event in sorted(self._events, key=lambda event: event.end_s):
            if event.kind == "copy":
                event = event._replace(start_s=min(max(event.start_s, free_s), event.end_s))
                free_s = event.end_s
            events.append(event)
        return sorted(events, key=lambda event: event.start_s)

    def write(self, path: Path) -> None:
        """Write complete events in microseconds, one row per kind. Raises `UserError`."""
        events = self.events()
        zero_s = min((event.start_s for event in events), default=0.0)
        records = list[dict[str, object]]()
        for at, kind in enumerate(LANES):
            named = {"name": "thread_name", "args": {"name": kind}}
            records.append({"ph": "M", "pid": 1, "tid": at, **named})
        for kind, layer, start_s, end_s in events:
            spans = {"ts": (start_s - zero_s) * 1e6, "dur": (end_s - start_s) * 1e6}
            named = {"name": kind, "cat": kind, "args": {"layer": layer}}
            records.append({"ph": "X", "pid": 1, "tid": LANES.index(kind), **named, **spans})
        store({"displayTimeUnit": "ms", "traceEvents": records}, path)


def record_steps(
    decoder: Decoder, prompt_ids: Sequence[int], tree: str, num_steps: int
) -> tuple[Timeline, list[int]]:
    """Take greedy steps behind a prompt's own; return their events and all new tokens."""
    stream = decoder.target.stream
    timeline = Timeline()
    shape = decoder.run(prompt_ids, Sampling(), max_new_tokens=1, tree=tree).tree_choice.shape
    text = decoder.begin(prompt_ids, Sampling(), shape=shape)
    decoder.step(text)
    stream.carrier.spans.listener = timeline.add
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
        stream.carrier.spans.listener = None
    return timeline, text.new_ids


def repeated_scores(
    decoder: Decoder, num_rows: int, num_sweeps: int, held_bytes: Callable[[], int]
) -> tuple[int, int]:
    """Poison free slots; return how many passes repeat the first scores, and lost bytes."""
    target = decoder.target
    tree = TokenTree(best_first(DEFAULT_ACCEPTANCE, num_rows, 12), torch.arange(num_rows) + 3)
    tokens = [5, 6, 7]
    cache = decoder.begin(tokens, Sampling()).caches.target

    def scored() -> torch.Tensor:
        cache.clear()
        return target.score([target.part_of(tokens, cache, tree)])[0].whole()

    target.stream.poison_released = True
    try:
        wanted = scored()
        assert not wanted.isnan().any(), "a slot was read before its layer had arrived"
        before_bytes = held_bytes()
        num_same = sum(torch.equal(scored(), wanted) for _ in range(num_sweeps))
        return num_same, held_bytes() - before_bytes
    finally:
        target.stream.poison_released = False
