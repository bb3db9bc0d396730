"""Full calibration: measure which of a draft's guesses come true on this machine, and every cost.

The target goes on writing from many places of the given text, because that is what decoding meets;
then the draft ranks every token that was written, many positions per pass (`trace_acceptance`). The
cost curves come from real steps: trees of all sizes take turns, round after round, and medians are
kept, so that a disk that drifts slows all of them alike.

Invariants: a tune that is interrupted goes on behind its last finished window, and only for the
very same question. What is timed is `Decoder.step` itself, so the figures hold what readers and
compute take from each other.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from offload.calibration.curves import draft_curve
from offload.calibration.link import link_bytes_per_s
from offload.checkpoint.files import read_given, read_object
from offload.checkpoint.sizes import config_sizes, model_shape
from offload.checkpoint.t5 import has_encoder
from offload.drafting.model import ModelDrafter
from offload.engine.decoder import Decoder
from offload.engine.hooks import Counted, Hooks
from offload.engine.opening import open_run
from offload.engine.request import Request, encode
from offload.engine.resolve import ResolvedRun, resolve
from offload.engine.text import load_tokenizer
from offload.errors import UserError
from offload.memory.planner import ModelFiles
from offload.planning.acceptance import NUM_RANKS, acceptance, bounds_to_count, yields_of
from offload.planning.cost_model import (
    Costs,
    Curve,
    Traffic,
    draft_widths,
    fit_overlap_penalty,
    step_time,
)
from offload.planning.options import LoadOptions
from offload.planning.profile import (
    ExpertUses,
    Identity,
    Profile,
    profiles_folder,
    require_writable,
    save_profile,
    unprofiled,
    write_atomically,
)
from offload.planning.room import traffic_in
from offload.planning.search import best_smoothing
from offload.planning.selector import TreeChoice
from offload.reports.trace_acceptance import dynamic_again, given_trace, ranks_of, write
from offload.stats import Stats
from offload.trees.spec import TreeSpec
from offload.trees.topology import (
    DEFAULT_ACCEPTANCE,
    DynamicShape,
    Topology,
    best_first,
    chain,
    isotonic,
)
from offload.units import Sampling, require

# takes the rounds done and the rounds in all
Progress = Callable[[int, int], None]

# timed too where experts come on demand: each row asks for some, so few rows may be best
SMALL_SIZES = (2, 4, 8)
TIMED_SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
# depth of the trees that are timed
_TIMED_DEPTH = 12
_NUM_ROUNDS = 5
# passes of one row in turn, the first of which finds slots that were filled while a tree grew
_NUM_PLAIN = 4
# the link counts as the slower side where a pass waits for it longer than this share
_STALLED_SHARE = 0.05

# tokens of a window: what is given, and what is written or read behind it
NUM_PROMPT = 64
NUM_NEW = 128
# depth of the largest tree
DEPTH = 24
# Nodes of the largest tree that is timed: the first that fits. Larger ones are chosen all the same,
# by the same costs: from some hundred rows on, computing grows by as much for each row, and the
# curves go on so.
SIZES = (512, 384, 256, 192, 128, 64, 32, 16)
_WRITING_NODES = 64
_WRITING_DEPTH = 16
# positions: a window, or the steps of one round of timing
_CONTEXT = 512
_NO_HOOKS = Hooks()
_MAX_TEXT_BYTES = 1 << 30


def measure_costs(
    decoder: Decoder,
    prompt: Sequence[int],
    sampling: Sampling,
    progress: Progress = lambda done, total: None,
) -> Costs:
    """Measure the cost curves of a decoder, up to the largest tree that its memory holds.

    Each round goes on from `prompt`.
    """
    largest = decoder.plan.num_nodes
    wanted = (
        (*SMALL_SIZES, *TIMED_SIZES, largest)
        if decoder.plan.has_experts
        else (*TIMED_SIZES, largest)
    )
    sizes = sorted({size for size in wanted if 1 < size <= largest})
    topologies = [best_first(DEFAULT_ACCEPTANCE, size, _TIMED_DEPTH) for size in sizes]
    plain: list[Stats] = []
    rounds: list[list[Stats]] = []
    for index in range(_NUM_ROUNDS):
        progress(index, _NUM_ROUNDS)
        steps = _steps(decoder, prompt, sampling, [*[chain(0)] * (_NUM_PLAIN + 1), *topologies])
        plain += steps[2 : _NUM_PLAIN + 1]
        rounds.append(steps[_NUM_PLAIN + 1 :])
    progress(_NUM_ROUNDS, _NUM_ROUNDS)
    by_size = [plain, *zip(*rounds, strict=True)]
    compute_s = np.maximum.accumulate(
        [median(step.sweep_s - step.stall_s for step in steps) for steps in by_size]
    )
    draft_s = [median(step.draft_s for step in steps) for steps in by_size[1:]]
    sequence = decoder.begin(prompt, sampling)
    torch.set_num_threads(decoder.threads.modes(largest).draft.num_threads)
    assert isinstance(decoder.drafter, ModelDrafter), "a tune has a draft model"
    curve = draft_curve(decoder.drafter, sequence.sampler, prompt, sequence.caches.draft)
    costs = Costs(
        compute_s=Curve((1, *sizes), tuple(compute_s.tolist())),
        draft_step_s=_scaled(curve, topologies, draft_s),
        verify_s=median(step.verify_s for steps in by_size for step in steps),
        link_bytes_per_s=_link_bytes_per_s(decoder, plain),
    )
    sweep_s = [median(step.sweep_s for step in steps) for steps in by_size[1:]]
    return replace(
        costs,
        overlap_penalty=_overlap_penalty(costs, Traffic.of(decoder.plan), topologies, sweep_s),
    )


def _steps(
    decoder: Decoder, prompt: Sequence[int], sampling: Sampling, topologies: Sequence[Topology]
) -> list[Stats]:
    """Return the figures of one step per topology, in their order, on one sequence.

    The first step takes the prompt in.
    """
    sequence = decoder.begin(prompt, sampling)
    figures = []
    for topology in topologies:
        figures.append(sequence.set_shape(topology))
        decoder.step(sequence)
    return figures


def _overlap_penalty(
    costs: Costs, traffic: Traffic, topologies: Sequence[Topology], sweep_s: Sequence[float]
) -> float:
    """Fit what passes took beyond their slower side; 0 where nothing streams or routers wait."""
    if not traffic.streamed_bytes or traffic.experts is not None:
        return 0.0
    steps = [step_time(costs, traffic, topology) for topology in topologies]
    return fit_overlap_penalty(
        [(step.compute_s, step.link_s, took) for step, took in zip(steps, sweep_s, strict=True)]
    )


def _scaled(curve: Curve, topologies: Sequence[Topology], draft_s: Sequence[float]) -> Curve:
    """Scale the curve of bare draft steps to what whole trees took.

    TreeSelector also rank, draw noise and catch up.
    """
    predicted = [sum(map(curve.at, draft_widths(topology))) for topology in topologies]
    scale = (
        median(took / wanted for took, wanted in zip(draft_s, predicted, strict=True))
        if draft_s
        else 1.0
    )
    return replace(curve, seconds=tuple(scale * second for second in curve.seconds))


def _link_bytes_per_s(decoder: Decoder, plain: Sequence[Stats]) -> float:
    """Return the rate of the link as streamed where passes of one row wait for it.

    Else as a plain reader finds it.
    """
    streamed_bytes = decoder.plan.streamed_bytes
    sweep_s = median(step.sweep_s for step in plain)
    is_slower = median(step.stall_s for step in plain) > _STALLED_SHARE * sweep_s
    if streamed_bytes and is_slower and not decoder.plan.has_experts:
        return streamed_bytes / sweep_s
    source = decoder.target.stream.source
    return link_bytes_per_s(source.paths, limit_bytes_per_s=source.rate_limit_bytes_per_s)


class TracedWindow(NamedTuple):
    """What one window has told."""

    ranks: list[int]
    # tokens of every pass, for each of the question's bounds
    bursts_B: list[list[int]]


class TuneResult(NamedTuple):
    """The saved profile and the tree that it leads to."""

    profile: Profile
    path: Path
    # what `--tree auto` makes of the profile in this budget
    choice: TreeChoice


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneSpec:
    """What is to be measured; unfinished work for another question is of no use."""

    identity: Identity
    sampling: Sampling
    # token ids; the first `NUM_PROMPT` of each are given
    windows: tuple[tuple[int, ...], ...]
    is_teacher_forced: bool
    # dynamic trees that are to be grown again over what is written
    bounds: tuple[DynamicShape, ...] = ()

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
    hooks: Hooks = _NO_HOOKS,
) -> TuneResult:
    """Measure, and save a profile.

    Args:
        texts: UTF-8 files of the kind that will be decoded.
        sampling: what the profile is for; window i draws with its seed plus i.
        options: for loading. Their tree is the largest to time, `auto` as large a one as the budget
            has room for; their context is set here, and their profile is not used.
        num_tokens: positions to trace.
        is_teacher_forced: trace the given text itself instead of what the target writes.

    Raises:
        UserError: text that is missing, not UTF-8, empty or shorter than a window; whatever `load`
        refuses.
    """
    read = [read_text(path) for path in texts]
    options = options or LoadOptions()
    _require_profiled(options, sampling)
    spec = options.tree_spec(has_draft=True)
    require_writable(profiles_folder())
    admit = partial(largest_that_fits, spec=spec)
    # experts come as they will in runs that choose their tree
    later = replace(options, tree="auto", profile="none")
    run = resolve(model, draft, later, admit=admit, hooks=hooks)
    files = run.files
    timed = largest_that_fits(run, spec)
    tokenizer = load_tokenizer(files.target.tokenizer_path)
    vocab_size = model_shape(files.target).vocab_size
    encoded = [encode(tokenizer, text, vocab_size, raw=True) for text in read]
    windows = cut_windows(encoded, num_tokens, is_teacher_forced)
    assert files.draft is not None, "two models were fetched"
    identity = Identity.of(files.target, files.draft, sampling, options.rule, run.machine)
    with open_run(timed, Request(is_named=True)) as decoder:
        # Not where scores must not shape a tree, nor where the target has written nothing to grow
        # along.
        can_grow = decoder.rule.repeats_draws and not is_teacher_forced
        question = TuneSpec(
            identity=identity,
            sampling=sampling,
            windows=windows,
            is_teacher_forced=is_teacher_forced,
            bounds=bounds_to_count(decoder.plan.num_nodes) if can_grow else (),
        )
        traced = trace_windows(decoder, question, hooks.on_count)
        uses = expert_uses(decoder.target.experts)
        costs = measure_costs(
            decoder,
            windows[0][:NUM_PROMPT],
            sampling,
            lambda done, total: hooks.on_count(done, total, "timing trees"),
        )
        hooks.on_phase("ranking trees")
        profile = _summarise(
            _proved(question, decoder), traced, costs, uses, files, decoder.num_threads
        )
    path = save_profile(profile)
    question.state_path.unlink(missing_ok=True)
    return TuneResult(profile, path, choice_from(profile, sampling, run, timed))


def _require_profiled(options: LoadOptions, sampling: Sampling) -> None:
    """Raise `UserError` for text that no profile is made for."""
    require(
        options.lenience == 1,
        "`lenience` must be 1 for a profile",
        options.lenience,
        "leave it out",
    )
    what = unprofiled(sampling)
    require(
        not what, "a profile is of text without penalties, biases and min-p", what, "leave them out"
    )


def choice_from(
    profile: Profile, sampling: Sampling, run: ResolvedRun, timed: ResolvedRun
) -> TreeChoice:
    """Return the tree that a run like this one chooses by the profile.

    Where memory has no room for such a run's context, it is that of the run that was timed.
    """
    settings = run.settings(sampling)
    one = timed if traffic_in(run.budget, run.files, 1) is None else run
    trees = replace(one, tree=TreeSpec("auto")).trees(sampling)
    trees.find = lambda *_: (profile, "")
    trees.link_bytes_per_s = profile.costs.link_bytes_per_s
    return trees.for_run(*settings)


def largest_that_fits(run: ResolvedRun, spec: TreeSpec) -> ResolvedRun:
    """Return the run with a tune's context and the largest tree to time that its memory holds.

    The tree is the named one, or of the first of `SIZES` that fits. Raises `UserError`.
    """
    target = run.files.target
    rule = "texts to tune by must go on, a model with an encoder writes anew"
    is_alone = not has_encoder(target.config)
    require(is_alone, rule, target.config.get("model_type"), "name a `tree` instead")
    longest = config_sizes(target).get("max_position_embeddings", _CONTEXT)
    budget = replace(run.budget, context=min(_CONTEXT, longest))
    sizes = SIZES if spec.is_chosen else (spec.num_nodes,)
    size = next((size for size in sizes if traffic_in(budget, run.files, size)), sizes[-1])
    budget.plan(run.files, size)
    tree = TreeSpec("best", size, DEPTH) if spec.is_chosen else spec
    # a draft alone fills a tree that is named
    options = replace(run.options, tree=tree.label)
    return replace(run, options=options, budget=budget, tree=tree)


def read_text(path: Path) -> str:
    """Return the text of a file to tune with.

    Raises `UserError` where it is missing, empty or not UTF-8.
    """
    try:
        # models write \n alone
        text = read_given(path, _MAX_TEXT_BYTES).decode("utf-8").replace("\r\n", "\n")
    except OSError as error:
        raise UserError(f"cannot read the text {path} ({error.strerror}): check the path") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"the text must be UTF-8, {path} is not at byte {error.start}: convert it first"
        ) from None
    if not text.strip():
        raise UserError(f"the text {path} is empty: give text of the kind that will be decoded")
    return text


def cut_windows(
    texts: Sequence[Sequence[int]], num_tokens: int, is_teacher_forced: bool
) -> tuple[tuple[int, ...], ...]:
    """Return windows that give `num_tokens` to trace, spread over all texts.

    Fewer where the texts hold no more. Raises `UserError` where no text is as long as one window.
    """
    size = NUM_PROMPT + (NUM_NEW if is_teacher_forced else 0)
    stride = NUM_PROMPT + NUM_NEW
    found = [
        tuple(ids[lo : lo + size]) for ids in texts for lo in range(0, len(ids) - size + 1, stride)
    ]
    if not found:
        longest = max(map(len, texts), default=0)
        raise UserError(
            f"a text must have {size} tokens for one window, the longest has {longest}: give more text"
        )
    wanted = max(1, -(-num_tokens // NUM_NEW))
    step = max(1.0, len(found) / wanted)
    return tuple(found[int(index * step)] for index in range(min(wanted, len(found))))


def trace_windows(decoder: Decoder, question: TuneSpec, progress: Counted) -> list[TracedWindow]:
    """Trace every window; those that an interrupted tune has left are not measured again."""
    traced = _unfinished(question)
    for index in range(len(traced), len(question.windows)):
        progress(index, len(question.windows), "tracing text")
        traced.append(trace_window(decoder, question, index))
        write_atomically(question.state_path, json.dumps({"windows": traced}))
    progress(len(traced), len(traced), "tracing text")
    return traced


def trace_window(decoder: Decoder, question: TuneSpec, index: int) -> TracedWindow:
    """Trace one window, and the passes of every kind of dynamic tree."""
    window = question.windows[index]
    seed = (question.sampling.seed + index) % 2**63
    sampling = replace(question.sampling, seed=seed)
    if question.is_teacher_forced:
        return TracedWindow(given_trace(decoder, window, NUM_PROMPT, sampling), [])
    # Any tree would do; this one is quick where there is room for it.
    tree = f"{min(_WRITING_NODES, decoder.plan.num_nodes)}x{_WRITING_DEPTH}"
    written = write(decoder, window, sampling, NUM_NEW, tree)
    bursts_B = [
        dynamic_again(decoder, window, written, sampling, bounds) for bounds in question.bounds
    ]
    return TracedWindow(ranks_of(decoder, window, written, sampling), bursts_B)


class CountsExperts(Protocol):
    """The counts that a pool of experts keeps of its passes."""

    @property
    def uses_LE(self) -> NDArray[Any]: ...
    @property
    def num_rows(self) -> int: ...


def expert_uses(pool: CountsExperts | None) -> ExpertUses | None:
    """Return how often experts were used.

    None where they do not come on demand, or an earlier tune has traced all windows.
    """
    if pool is None or not pool.num_rows:
        return None
    return ExpertUses(tuple(map(tuple, pool.uses_LE.tolist())), int(pool.num_rows))


def _summarise(
    question: TuneSpec,
    traced: list[TracedWindow],
    costs: Costs,
    uses: ExpertUses | None,
    files: ModelFiles,
    num_threads: int,
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


def _proved(question: TuneSpec, decoder: Decoder) -> TuneSpec:
    """Return the question with a sum of the weights, which all have been read by now."""
    known = {part: decoder.identities.of(part) for part in question.identity.proofs}
    proofs = {part: one.proofs for part, one in known.items() if one is not None}
    return replace(question, identity=replace(question.identity, proofs=proofs))


def _unfinished(question: TuneSpec) -> list[TracedWindow]:
    """Return the windows that an interrupted tune of this question has finished.

    A file that is not whole counts for nothing.
    """
    try:
        windows = read_object(question.state_path, "it is made anew")["windows"]
        traced = [TracedWindow(*window) for window in windows]
        is_sound = all(rank in range(-1, NUM_RANKS) for window in traced for rank in window.ranks)
        is_sound &= all(len(window.bursts_B) == len(question.bounds) for window in traced)
        is_sound &= all(
            burst >= 1 for window in traced for bursts in window.bursts_B for burst in bursts
        )
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return traced if is_sound and len(traced) <= len(question.windows) else []
