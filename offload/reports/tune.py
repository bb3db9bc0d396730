"""Full calibration: passes over given text, what a decoder learns by them, and the profile of both.

The decoder is one that chooses its tree, and observes its passes as any other does; only the trees
are given here, so that passes of all sizes are run, and tokens are counted for each.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from offload.engine.hooks import NO_HOOKS, Hooks
from offload.engine.opening import open_setup
from offload.engine.request import Request
from offload.engine.resolve import resolve
from offload.engine.setup import Setup
from offload.errors import require
from offload.planning.acceptance import bounds_to_count
from offload.planning.choice import TreeChoice, TreeRequest, choose
from offload.planning.load_options import LoadOptions
from offload.planning.profile import (
    Identity,
    Profile,
    profiles_folder,
    require_writable,
    save_profile,
    tuning_text,
)
from offload.reports.measured_profile import profile_of
from offload.reports.tune_question import TuneQuestion, for_windows, trees_of
from offload.reports.windows import encode_windows, trace_windows
from offload.sampling_options import Sampling
from offload.trees.spec import TreeSpec


class TuneResult(NamedTuple):
    """The saved profile and the tree that it leads to."""

    profile: Profile
    path: Path
    choice: TreeChoice  # of `--tree auto` with this profile, in this budget


def tune(
    options: LoadOptions,
    texts: Sequence[Path],
    sampling: Sampling,
    *,
    num_tokens: int = 2048,
    hooks: Hooks = NO_HOOKS,
) -> TuneResult:
    """Measure, and save a profile.

    Args:
        options: both models, and how they load. A tree that they name is the largest to run; their
            context is set here, their profile is not used.
        texts: UTF-8 files of the kind that will be decoded.
        sampling: what the profile is for; window i draws with its seed plus i.
        num_tokens: positions to trace.

    Raises:
        UserError: text that is missing, not UTF-8, empty or shorter than a window; whatever `load`
            refuses.
    """
    read = [tuning_text(path) for path in texts]
    _require_profiled(options, sampling)
    named = options.tree_spec()
    require_writable(profiles_folder())
    later = replace(options, tree="auto", profile="none")
    setup = resolve(later, admit=partial(for_windows, named=named), hooks=hooks)
    measured = for_windows(setup, named)
    target, draft = setup.files
    windows = encode_windows(target, read, num_tokens)
    requirement = "a tune is of a draft that ranks candidates"
    require(draft is not None, requirement, f"`draft` {options.draft}", "name one")
    assert draft is not None
    identity = Identity.from_models(target, draft, sampling, options.rule, setup.machine)
    with open_setup(measured, Request(sampling=sampling, is_named=True)) as decoder:
        bounds = bounds_to_count(decoder.plan.num_nodes)
        question = TuneQuestion(
            identity=identity,
            sampling=sampling,
            windows=windows,
            trees=trees_of(decoder, sampling, bounds),
        )
        traced = trace_windows(decoder, question, hooks.on_count)
        profile = profile_of(question, traced, decoder, measured)
    path = save_profile(profile)
    question.state_path.unlink(missing_ok=True)
    return TuneResult(profile, path, choice_from(profile, sampling, setup, measured))


def _require_profiled(options: LoadOptions, sampling: Sampling) -> None:
    requirement = "a tune is of one process, `device` must be one"
    require(not options.cards, requirement, options.device, "name one card")
    lenience = options.lenience
    require(lenience == 1, "`lenience` must be 1 for a profile", lenience, "leave it out")
    unprofiled = sampling.unprofiled
    requirement = "a profile is of text without penalties, biases and min-p"
    require(not unprofiled, requirement, unprofiled, "leave them out")


def choice_from(profile: Profile, sampling: Sampling, setup: Setup, measured: Setup) -> TreeChoice:
    """Return the tree that a run like this chooses, with a window's context if no other fits."""
    chosen = measured if setup.traffic_of(1) is None else setup
    known = chosen.knowledge(setup.settings(sampling)).by_profile_alone(profile)
    return choose(TreeSpec("auto"), known, TreeRequest(chosen.room, setup.options.rule))
