"""Where the bench touches a decoder beyond `generate` and `run`: passes, poisoned slots.

Invariant: what a pass emits is the target's own greedy token, so every pass that is timed can be
proved.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from offload.bench.harness.gate import Written
from offload.calibration.threads import draft_curve
from offload.calibration.trial import rows_of
from offload.drafting.base import DraftText
from offload.engine.decoder import Decoder
from offload.planning.cost_model import Curve
from offload.sampling_options import Sampling
from offload.trees.token_tree import TokenTree
from offload.trees.topology import DEFAULT_ACCEPTANCE, best_first, chain

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
