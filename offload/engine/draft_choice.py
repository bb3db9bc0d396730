"""`draft` auto: the drafter that is fastest here, as a few passes of each show.

The candidates are no draft, layers that the target's files carry, a small model at hand, and a copy
in four bits. Each runs with the tree chosen for it, and with lookup in the way that suits it. The
result is kept by model, machine and memory. Invariant: a draft decides no token, so a wrong choice
only costs time; a candidate that cannot run is skipped.
"""

import hashlib
import math
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import msgspec

from offload.checkpoint.checkpoint import Checkpoint, ModelFiles
from offload.checkpoint.download import cached_models, in_cache
from offload.checkpoint.files import cache_folder
from offload.checkpoint.identity import identity_of
from offload.checkpoint.open import open_checkpoint
from offload.engine.decoder import Decoder
from offload.engine.opening import open_setup
from offload.engine.request import Request
from offload.engine.setup import Setup
from offload.engine.tokenizer import require_described_vocabulary
from offload.errors import UserError
from offload.planning.draft_kinds import carried_kind
from offload.planning.load_options import LoadOptions
from offload.planning.profile import write_atomically
from offload.sampling_options import Sampling

_MOST_TOKENS = 96  # new tokens of a trial
_MOST_S = 10.0  # seconds of a trial, after its least passes
_LEAST_PASSES = 4
_FAR = 1.5  # a trial ends when it is that many times as slow as the fastest draft so far
# A trial is left out if its predicted time is that many times as long; acceptance is assumed.
_OFF_AT_MOST = 2.5
_SMALL = 8  # a small model's bytes are at most the target's divided by this
_MOST_FOLDERS = 64
_COPY = "self:int4"
_NONE = "none"


class DraftTrials(msgspec.Struct, frozen=True):
    """Seconds per token for each drafter; `none` is lookup alone."""

    s_per_token: dict[str, float | None]  # None: it cannot run, or was not tried
    predicted: dict[str, float] = {}  # of those that were not tried

    @property
    def by_speed(self) -> list[tuple[float, str]]:
        """Return the candidates that run, the fastest first."""
        return sorted((took, name) for name, took in self.s_per_token.items() if took is not None)

    @property
    def why(self) -> str:
        """Return a line for the user."""
        tried = [f"{Path(name).name} {seconds:.3g}" for seconds, name in self.by_speed]
        best = Path(self.by_speed[0][1]).name
        not_tried = [f"{Path(name).name} {took:.3g}" for name, took in self.predicted.items()]
        passed_over = f"; not tried, as predicted: {', '.join(not_tried)}" if not_tried else ""
        return f"draft {best}, by trials in seconds per token: {', '.join(tried)}{passed_over}"


def settle_draft(
    setup: Setup, request: Request | None, again: Callable[[LoadOptions], Setup]
) -> Setup:
    """Return the setup with the fastest draft in place of auto, and a note with the reason.

    `again` resolves options on the same device. Raises `UserError` if not even the target alone
    runs.
    """
    options = setup.options
    sampling, _ = setup.settings(None if request is None else request.sampling)
    is_guessing = setup.tree.kind != "none"
    names = [_NONE, *(drafts_at_hand(options, setup.files.target) if is_guessing else ())]
    place = _place(setup, sampling)
    trials = _read_trials(place)
    if trials is None or {*trials.s_per_token} != {*names}:

        def resolved(name: str) -> Setup:
            setup.hooks.on_phase(f"trying drafts: {Path(name).name}")
            return again(with_draft(options, name))

        trials = _run_trials(names, sampling, resolved)
        write_atomically(place, msgspec.json.encode(trials).decode())
    settled = again(with_draft(options, trials.by_speed[0][1]))
    return replace(settled, hooks=setup.hooks, notes=(*settled.notes, trials.why))


def with_draft(options: LoadOptions, name: str) -> LoadOptions:
    """Return the options with this draft; without one, and without sources, also without a tree."""
    if name != _NONE:
        return replace(options, draft=name)
    has_sources = options.lookup is not False or options.ngram or options.datastore
    return replace(options, draft=None, tree=options.tree if has_sources else "none")


def drafts_at_hand(options: LoadOptions, target: Checkpoint) -> Iterator[str]:
    """Yield possible drafts of a target whose files are here, by the names that options take."""
    ways = [(name, [target]) for name in (carried_kind(target), _COPY) if name is not None]
    small = max(_small_models(target), default=None, key=lambda model: model.num_bytes)
    if small is not None:
        ways.append((str(small.directory), [target, small]))
    for name, headers in ways:
        try:
            with_draft(options, name).files_of(headers)
        except UserError:
            continue
        yield name


def _small_models(target: Checkpoint) -> Iterator[Checkpoint]:
    """Yield small models with the target's vocabulary, beside it or in the hub's cache."""
    beside = islice(target.directory.parent.glob("*/config.json"), _MOST_FOLDERS)
    for folder in (*sorted(config.parent for config in beside), *map(in_cache, cached_models())):
        try:
            small = open_checkpoint(folder)
            require_described_vocabulary(ModelFiles(target, small))
        except (UserError, OSError):
            continue
        if small.num_bytes * _SMALL <= target.num_bytes and small.is_here:
            yield small


def _run_trials(
    names: list[str],
    sampling: Sampling,
    resolved: Callable[[str], Setup],
    opened: Callable[[Setup], Decoder] = open_setup,
) -> DraftTrials:
    """Time each way to draft; those that are predicted to be far slower than the best are left out."""
    s_per_token = dict[str, float | None]()
    predicted = dict[str, float]()
    for name in names:
        s_per_token[name] = None
        best_s = min((took for took in s_per_token.values() if took is not None), default=math.inf)
        try:
            setup = resolved(name)
            # what has no chance is not even read
            least_s = 0.0 if best_s == math.inf else setup.link_s(sampling)
            if least_s <= _OFF_AT_MOST * best_s:
                with opened(setup) as decoder:
                    least_s = _predicted_s(decoder, sampling)
                    if least_s <= _OFF_AT_MOST * best_s:
                        s_per_token[name] = _s_per_token(decoder, sampling, best_s)
                        continue
            predicted[name] = least_s
        except UserError:
            # for instance no room: no other run of these options could load it either
            if name == _NONE:
                raise
    return DraftTrials(s_per_token, predicted)


def _predicted_s(decoder: Decoder, sampling: Sampling) -> float:
    """Return the predicted seconds per token with the best tree; 0 if nothing is predicted."""
    best = next(iter(decoder.tree_choice(sampling).candidates), None)
    return 0.0 if best is None else best.s_per_token


def _s_per_token(decoder: Decoder, sampling: Sampling, best_s: float) -> float:
    """Return the seconds per token of a short text after some Python source.

    The text ends where it is far slower than `best_s`.
    """
    source = Path(textwrap.__file__).read_text(encoding="utf-8")
    has_words = decoder.tokenizer is not None
    prompt = decoder.encode(source[:1000], raw=True) if has_words else [1, 2, 3]
    num_new = min(_MOST_TOKENS, decoder.plan.context // 2)
    run = decoder.run(prompt[:num_new], sampling, max_new_tokens=num_new)
    for _ in run:
        stats = run.result().stats
        is_far = stats.tpot_s > _FAR * best_s
        if stats.num_sweeps >= _LEAST_PASSES and (is_far or stats.decode_s > _MOST_S):
            break
    stats = run.result().stats
    return stats.tpot_s or stats.ttft_s


def _read_trials(place: Path) -> DraftTrials | None:
    """Return an earlier choice; None if no readable one was kept."""
    if not place.is_file():
        return None
    try:
        return msgspec.json.decode(place.read_bytes(), type=DraftTrials)
    except (msgspec.MsgspecError, OSError):
        return None


def _place(setup: Setup, sampling: Sampling) -> Path:
    options = setup.options
    memory = (options.ram, options.gpu_memory, options.context, options.parallel)
    others = (options.tree, options.rule, options.link_limit, options.threads, sampling.kind)
    key = repr((identity_of(setup.files.target).digest, setup.machine, memory, others))
    return cache_folder() / "drafts" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
