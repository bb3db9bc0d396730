"""Windows of text in which a tune finds out which of a draft's guesses come true.

The target goes on writing from many places of the given text, because that is what decoding meets;
then the draft ranks every token that was written, many positions per pass (`trace_acceptance`).

Invariant: a tune that is interrupted goes on behind its last finished window, and only for the very
same question.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

from msgspec import Meta, MsgspecError, convert

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.files import read_object
from offload.checkpoint.sizes import model_shape
from offload.engine.decoder import Decoder
from offload.engine.hooks import Counted
from offload.engine.request import encode
from offload.engine.tokenizer import load_tokenizer
from offload.errors import UserError
from offload.planning.acceptance import NUM_RANKS, bounds_to_count, measured_acceptance, yields_of
from offload.planning.cost_model import Costs
from offload.planning.profile import (
    ExpertUses,
    Identity,
    Profile,
    Rank,
    profiles_folder,
    write_atomically,
)
from offload.planning.search import best_smoothing
from offload.reports.trace_acceptance import dynamic_again, ranks_of, write
from offload.sampling_options import Sampling
from offload.trees.topology import DynamicShape, isotonic

# tokens of a window: what is given, and what is written or read behind it
NUM_PROMPT = 64
NUM_NEW = 128
_WRITING_NODES = 64
_WRITING_DEPTH = 16


class TracedWindow(NamedTuple):
    """What one window has told."""

    ranks: Annotated[list[Rank], Meta(min_length=1)]
    # tokens of every pass, for each of the question's bounds
    bursts_B: list[list[Annotated[int, Meta(ge=1)]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneQuestion:
    """What is to be measured; unfinished work for another question is of no use."""

    identity: Identity
    sampling: Sampling
    # token ids; the first `NUM_PROMPT` of each are given
    windows: tuple[tuple[int, ...], ...]
    # dynamic trees that are to be grown again over what is written
    bounds: tuple[DynamicShape, ...] = ()

    @property
    def state_path(self) -> Path:
        """Where finished windows are kept until all are; the name tells questions apart."""
        digest = hashlib.sha256(repr((self, NUM_PROMPT, NUM_NEW, NUM_RANKS)).encode()).hexdigest()
        return profiles_folder() / f"{self.identity.file_name}.{digest[:12]}.unfinished"

    def proved(self, decoder: Decoder) -> "TuneQuestion":
        """Return the question with a sum of the weights, which all have been read by now."""
        known = {part: decoder.identities.for_part(part) for part in self.identity.proofs}
        proofs = {part: identity.proofs for part, identity in known.items() if identity is not None}
        return replace(self, identity=replace(self.identity, proofs=proofs))


def bounds_to_grow(decoder: Decoder) -> tuple[DynamicShape, ...]:
    """Return the dynamic trees to grow again, if scores may shape them and the target has written."""
    can_grow = decoder.rule.repeats_draws
    return bounds_to_count(decoder.plan.num_nodes) if can_grow else ()


def encode_windows(
    target: Checkpoint, texts: Sequence[str], num_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Return `cut_windows` of texts, by the target's tokenizer. Raises `UserError`."""
    tokenizer = load_tokenizer(target.tokenizer_path)
    vocab_size = model_shape(target).vocab_size
    encoded = [encode(tokenizer, text, vocab_size, raw=True) for text in texts]
    return cut_windows(encoded, num_tokens)


def cut_windows(texts: Sequence[Sequence[int]], num_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Return windows that give `num_tokens` to trace, or all there are, spread over the texts.

    Raises `UserError` where no text is as long as one window.
    """
    size = NUM_PROMPT
    stride = NUM_PROMPT + NUM_NEW
    windows = list[tuple[int, ...]]()
    for ids in texts:
        windows += (tuple(ids[lo : lo + size]) for lo in range(0, len(ids) - size + 1, stride))
    if not windows:
        longest = max(map(len, texts), default=0)
        rule = f"a text must have {size} tokens for one window"
        raise UserError(f"{rule}, the longest has {longest}: give more text")
    wanted = max(1, -(-num_tokens // NUM_NEW))
    step = max(1.0, len(windows) / wanted)
    return tuple(windows[int(index * step)] for index in range(min(wanted, len(windows))))


def trace_windows(
    decoder: Decoder, question: TuneQuestion, progress: Counted
) -> list[TracedWindow]:
    """Trace every window; those that an interrupted tune has left are not measured again."""
    traced = _unfinished(question)
    for index in range(len(traced), len(question.windows)):
        progress(index, len(question.windows), "tracing text")
        traced.append(trace_window(decoder, question, index))
        write_atomically(question.state_path, json.dumps({"windows": traced}))
    progress(len(traced), len(traced), "tracing text")
    return traced


def trace_window(decoder: Decoder, question: TuneQuestion, index: int) -> TracedWindow:
    """Trace one window, and the passes of every kind of dynamic tree."""
    window = question.windows[index]
    sampling = question.sampling.later(index)
    # Any tree would do; this one is quick where there is room for it.
    tree = f"{min(_WRITING_NODES, decoder.plan.num_nodes)}x{_WRITING_DEPTH}"
    written = write(decoder, window, sampling, NUM_NEW, tree)
    grow = partial(dynamic_again, decoder, window, written, sampling)
    bursts_B = list(map(grow, question.bounds))
    return TracedWindow(ranks_of(decoder, window, written, sampling), bursts_B)


def expert_uses(decoder: Decoder) -> ExpertUses | None:
    """Return the counts of experts' uses; None where they come unasked, or no window was traced."""
    pool = decoder.target.experts
    if pool is None or not pool.num_rows:
        return None
    return ExpertUses(tuple(map(tuple, pool.uses_LE.tolist())), int(pool.num_rows))


def _unfinished(question: TuneQuestion) -> list[TracedWindow]:
    """Return the finished windows of an interrupted tune; none of a file that is not whole."""
    try:
        windows = read_object(question.state_path, "it is made anew")["windows"]
        traced = convert(windows, list[TracedWindow])
    except (OSError, ValueError, KeyError, MsgspecError):
        return []
    is_sound = len(traced) <= len(question.windows)
    is_sound &= all(len(trace.bursts_B) == len(question.bounds) for trace in traced)
    return traced if is_sound else []


def summarise(
    question: TuneQuestion,
    traced: list[TracedWindow],
    costs: Costs,
    uses: ExpertUses | None,
    names: tuple[str, str],
    num_threads: int,
) -> Profile:
    """Return the profile of what was measured; `names` are those of target and draft."""
    traces = [window.ranks for window in traced]
    p_K, error_K = measured_acceptance(traces)
    return Profile(
        identity=question.identity,
        target_name=names[0],
        draft_name=names[1],
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        num_tokens=sum(map(len, traces)),
        acceptance=tuple(p_K.tolist()),
        standard_error=tuple(error_K.tolist()),
        smoothing=best_smoothing(isotonic(p_K), traces),
        num_threads=num_threads,
        costs=costs,
        dynamic_yields=yields_of(question.bounds, [window.bursts_B for window in traced]),
        traces=tuple(map(tuple, traces)),
        expert_uses=uses,
    )
