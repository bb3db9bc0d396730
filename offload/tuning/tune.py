"""Measure a pair of models on this machine: which of the draft's guesses come true, and what everything costs.

The target goes on writing from many places of the given text, because that is what decoding meets; then the draft ranks
every token that was written, many positions per pass. The curves come from real steps with trees of many sizes.
Invariant: a tune that is interrupted goes on behind its last finished window, and only for the very same question.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from offload.checkpoint.compute_type import settled_dtype
from offload.checkpoint.encoder_decoder import has_encoder
from offload.checkpoint.hub import fetch
from offload.checkpoint.safetensors import compute_dtype_name
from offload.checkpoint.sizes import config_sizes, model_shape
from offload.checkpoint.small_files import read_given, read_object
from offload.config import Sampling, require
from offload.engine.decoder import Decoder
from offload.engine.hooks import Counted, Hooks
from offload.engine.load import open_decoder
from offload.engine.request import encode
from offload.engine.text import load_tokenizer
from offload.errors import UserError
from offload.memory.planner import Files
from offload.planning.cost_model import Costs
from offload.planning.expert_choice import with_experts
from offload.planning.near_copy import files_of, models_to_read
from offload.planning.options import LoadOptions
from offload.planning.profile import (
    ExpertUses,
    Identity,
    Machine,
    Profile,
    profiles_folder,
    require_writable,
    save_profile,
    unprofiled,
    write_atomically,
)
from offload.planning.room import Room
from offload.planning.traces import NUM_RANKS, acceptance, bounds_to_count, yields_of
from offload.planning.tree_policy import TreeChoice, TreeSelector
from offload.planning.tree_search import best_smoothing
from offload.streaming.device import open_device
from offload.tree.spec import TreeSpec
from offload.tree.topology import DynamicShape, isotonic
from offload.tuning.time_steps import measure_costs
from offload.tuning.trace_acceptance import dynamic_again, given_trace, ranks_of, write

NUM_PROMPT, NUM_NEW = 64, 128  # tokens of a window: what is given, and what is written or read behind it
DEPTH = 24
# Of the largest tree that is timed: the first that fits. Larger ones are chosen all the same, by the same costs: from
# some hundred rows on computing grows by as much for each row, which is how the curves go on.
SIZES = (512, 384, 256, 192, 128, 64, 32, 16)
_WRITING_NODES, _WRITING_DEPTH = 64, 16
_CONTEXT = 512  # positions: a window, or the steps of one round of timing
_NOBODY = Hooks()
_MAX_TEXT_BYTES = 1 << 30


class Traced(NamedTuple):
    """One window."""

    ranks: list[int]
    bursts_B: list[list[int]]  # tokens of every sweep, for each of the question's bounds


class Tuned(NamedTuple):
    """The outcome."""

    profile: Profile
    path: Path
    choice: TreeChoice  # what `--tree auto` makes of it in this budget


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is to be measured; unfinished work for another question is of no use."""

    identity: Identity
    sampling: Sampling
    windows: tuple[tuple[int, ...], ...]  # token ids; the first `NUM_PROMPT` of each are given
    is_teacher_forced: bool
    bounds: tuple[DynamicShape, ...] = ()  # of dynamic trees that are to be grown again over what is written

    @property
    def state_path(self) -> Path:
        """Where finished windows are kept until all are; the name tells questions apart."""
        digest = hashlib.sha256(repr((self, NUM_PROMPT, NUM_NEW, NUM_RANKS)).encode()).hexdigest()
        return profiles_folder() / f"{self.identity.file_name}.{digest[:12]}.unfinished"


def tune(
    model: str,
    draft: str,
    texts: Sequence[Path],
    sampling: Sampling,
    options: LoadOptions | None = None,
    *,
    num_tokens: int = 2048,
    is_teacher_forced: bool = False,
    hooks: Hooks = _NOBODY,
) -> Tuned:
    """Measure, and save a profile.

    Args:
        texts: UTF-8 files of the kind that will be decoded.
        sampling: what the profile is for; window i draws with its seed plus i.
        options: for loading. Their tree is the largest to time, `auto` as large a one as the budget has room for; their
            context is set here, and their profile is not used.
        num_tokens: positions to trace.
        is_teacher_forced: trace the given text itself instead of what the target writes.

    Raises:
        UserError: text that is missing, not UTF-8, empty or shorter than a window; whatever `load` refuses.
    """
    read, options = [read_text(path) for path in texts], options or LoadOptions()
    _require_profiled(options, sampling)
    hooks.on_phase("reading texts and headers")
    spec, device = options.tree_spec(has_draft=True), open_device(options.device, options.gpu_memory)
    require_writable(profiles_folder())
    room = Room.of(options, str(device.place) if device else None)
    sizes = SIZES if spec.is_chosen else (spec.num_nodes,)
    as_files = partial(files_of, draft=draft, draft_dtype=options.draft_dtype)
    refuse = lambda *headers: largest_that_fits(room, as_files(headers), sizes)  # noqa: E731
    files = as_files(fetch(models_to_read(model, draft), refuse, hooks.on_phase, options.config))
    dtype, _ = settled_dtype(files.target, options.dtype, is_on_cpu=device is None)  # as loading settles it
    room, num_nodes = largest_that_fits(with_experts(replace(room, dtype=dtype), files), files, sizes)
    tokenizer, vocab_size = load_tokenizer(files.target.tokenizer_path), model_shape(files.target).vocab_size
    encoded = [encode(tokenizer, text, vocab_size, raw=True) for text in read]
    windows = cut_windows(encoded, num_tokens, is_teacher_forced)
    machine = Machine.here(compute_dtype_name(files.target, dtype), device.name if device else "cpu")
    assert files.draft is not None, "two models were fetched"
    identity = Identity.of(files.target, files.draft, sampling, options.rule, machine)
    tree = f"{num_nodes}x{DEPTH}" if spec.is_chosen else options.tree
    options = replace(options, tree=tree, context=room.context, profile="none", experts=room.experts)
    with open_decoder(model, draft, options, hooks=hooks) as decoder:
        # Not where scores must not shape a tree, nor where the target has written nothing to grow along.
        can_grow = decoder.rule.repeats_draws and not is_teacher_forced
        question = Question(
            identity=identity, sampling=sampling, windows=windows, is_teacher_forced=is_teacher_forced,
            bounds=bounds_to_count(decoder.plan.num_nodes) if can_grow else (),
        )  # fmt: skip
        traced, uses = trace_windows(decoder, question, hooks.on_count), expert_uses(decoder.target.experts)
        costs = measure_costs(
            decoder, windows[0][:NUM_PROMPT], sampling, lambda done, total: hooks.on_count(done, total, "timing trees")
        )
        hooks.on_phase("ranking trees")
        profile = _summarise(question, traced, costs, uses, files, decoder.num_threads)
    path = save_profile(profile)
    question.state_path.unlink(missing_ok=True)
    return Tuned(profile, path, choice_from(profile, files, room))


def _require_profiled(options: LoadOptions, sampling: Sampling) -> None:
    """Raises `UserError` for text that no profile is of."""
    require(options.lenience == 1, "`lenience` must be 1 for a profile", options.lenience, "leave it out")
    what = unprofiled(sampling)
    require(not what, "a profile is of text without penalties, biases and min-p", what, "leave them out")


def choice_from(profile: Profile, files: Files, room: Room) -> TreeChoice:
    """The tree that a run in this room would choose by the profile."""
    traffic_of, max_depth = partial(room.traffic, files), room.plan(files, 1).context - 1
    selector = TreeSelector(room.rule, profile, "", profile.costs, traffic_of, max_depth=max_depth)
    return selector.choose(TreeSpec("auto"))


def largest_that_fits(room: Room, files: Files, sizes: Sequence[int]) -> tuple[Room, int]:
    """The room with the context of a tune, and the first of `sizes`, in nodes, that it holds. Raises `UserError`."""
    kind = files.target.config.get("model_type")
    is_alone = not has_encoder(files.target.config)
    require(is_alone, "texts to tune by must go on, a model with an encoder writes anew", kind, "name a `tree` instead")
    room = replace(room, context=min(_CONTEXT, config_sizes(files.target).get("max_position_embeddings", _CONTEXT)))
    for size in sizes[:-1]:
        if room.traffic(files, size) is not None:
            return room, size
    room.plan(files, sizes[-1])
    return room, sizes[-1]


def read_text(path: Path) -> str:
    """A file to tune with. Raises `UserError` where it is missing, empty or not UTF-8."""
    try:
        text = read_given(path, _MAX_TEXT_BYTES).decode("utf-8").replace("\r\n", "\n")  # which is what models write
    except OSError as error:
        raise UserError(f"cannot read the text {path} ({error.strerror}): check the path") from None
    except UnicodeDecodeError as error:
        raise UserError(f"the text must be UTF-8, {path} is not at byte {error.start}: convert it first") from None
    if not text.strip():
        raise UserError(f"the text {path} is empty: give text of the kind that will be decoded")
    return text


def cut_windows(
    texts: Sequence[Sequence[int]], num_tokens: int, is_teacher_forced: bool
) -> tuple[tuple[int, ...], ...]:
    """Windows that give `num_tokens` to trace, spread over all texts; fewer where the texts hold no more.

    Raises `UserError` where no text is as long as one window.
    """
    size, stride = NUM_PROMPT + (NUM_NEW if is_teacher_forced else 0), NUM_PROMPT + NUM_NEW
    found = [tuple(ids[lo : lo + size]) for ids in texts for lo in range(0, len(ids) - size + 1, stride)]
    if not found:
        longest = max(map(len, texts), default=0)
        raise UserError(f"a text must have {size} tokens for one window, the longest has {longest}: give more text")
    wanted = max(1, -(-num_tokens // NUM_NEW))
    step = max(1.0, len(found) / wanted)
    return tuple(found[int(index * step)] for index in range(min(wanted, len(found))))


def trace_windows(decoder: Decoder, question: Question, progress: Counted) -> list[Traced]:
    """What every window has told; those that an interrupted tune has left are not measured again."""
    traced = _unfinished(question)
    for index in range(len(traced), len(question.windows)):
        progress(index, len(question.windows), "tracing text")
        traced.append(trace_window(decoder, question, index))
        write_atomically(question.state_path, json.dumps({"windows": traced}))
    progress(len(traced), len(traced), "tracing text")
    return traced


def trace_window(decoder: Decoder, question: Question, index: int) -> Traced:
    """One window: its trace, and the sweeps of every kind of dynamic tree."""
    window, seed = question.windows[index], (question.sampling.seed + index) % 2**63
    sampling = replace(question.sampling, seed=seed)
    if question.is_teacher_forced:
        return Traced(given_trace(decoder, window, NUM_PROMPT, sampling), [])
    # Any tree would do; this one is quick where there is room for it.
    tree = f"{min(_WRITING_NODES, decoder.plan.num_nodes)}x{_WRITING_DEPTH}"
    written = write(decoder, window, sampling, NUM_NEW, tree)
    bursts_B = [dynamic_again(decoder, window, written, sampling, bounds) for bounds in question.bounds]
    return Traced(ranks_of(decoder, window, written, sampling), bursts_B)


class CountsExperts(Protocol):
    """What a pool of experts tells of its passes."""

    @property
    def uses_LE(self) -> NDArray[Any]: ...
    @property
    def num_rows(self) -> int: ...


def expert_uses(pool: CountsExperts | None) -> ExpertUses | None:
    """What experts were used for; None where they do not come on demand, or an earlier tune has traced it all."""
    if pool is None or not pool.num_rows:
        return None
    return ExpertUses(tuple(map(tuple, pool.uses_LE.tolist())), int(pool.num_rows))


def _summarise(
    question: Question, traced: list[Traced], costs: Costs, uses: ExpertUses | None, files: Files, num_threads: int
) -> Profile:
    assert files.draft is not None, "a tune has a draft model"
    traces = [window.ranks for window in traced]
    p_K, error_K = acceptance(traces)
    return Profile(
        identity=question.identity,
        target_name=files.target.directory.name,
        draft_name=files.draft.directory.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        num_tokens=sum(map(len, traces)),
        is_teacher_forced=question.is_teacher_forced,
        acceptance=tuple(p_K.tolist()),
        standard_error=tuple(error_K.tolist()),
        smoothing=best_smoothing(isotonic(p_K), traces),
        num_threads=num_threads,
        costs=costs,
        dynamic_yields=yields_of(question.bounds, [window.bursts_B for window in traced]),
        traces=tuple(map(tuple, traces)),
        expert_uses=uses,
    )


def _unfinished(question: Question) -> list[Traced]:
    """What an interrupted tune of the same question has finished; a file that is not whole counts for nothing."""
    try:
        windows = read_object(question.state_path, "it is made anew")["windows"]
        traced = [Traced(*window) for window in windows]
        is_sound = all(rank in range(-1, NUM_RANKS) for window in traced for rank in window.ranks)
        is_sound &= all(len(window.bursts_B) == len(question.bounds) for window in traced)
        is_sound &= all(burst >= 1 for window in traced for bursts in window.bursts_B for burst in bursts)
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return traced if is_sound and len(traced) <= len(question.windows) else []
