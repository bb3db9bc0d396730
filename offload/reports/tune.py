"""Full calibration: measure which of a draft's guesses come true on this machine, and every cost.

This is the way from options to a saved profile; what is measured: `windows` and `step_costs`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from offload.checkpoint.sizes import longest_context, turning_point
from offload.checkpoint.small_files import has_encoder
from offload.engine.hooks import NO_HOOKS, Hooks
from offload.engine.opening import open_setup
from offload.engine.request import Request
from offload.engine.resolve import resolve
from offload.engine.setup import Setup
from offload.errors import require
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
from offload.reports.step_costs import measure_costs
from offload.reports.windows import (
    NUM_PROMPT,
    TuneQuestion,
    bounds_to_grow,
    encode_windows,
    expert_uses,
    summarise,
    trace_windows,
)
from offload.sampling_options import Sampling
from offload.trees.spec import TreeSpec

# depth of the largest tree
DEPTH = 24
# Nodes of the largest tree that is timed: the first that fits. Larger ones are chosen all the same,
# by the same costs: from some hundred rows on, computing grows by as much for each row, and the
# curves go on so.
SIZES = (512, 384, 256, 192, 128, 64, 32, 16)
# positions: a window, or the steps of one round of timing
_CONTEXT = 512


class TuneResult(NamedTuple):
    """The saved profile and the tree that it leads to."""

    profile: Profile
    path: Path
    choice: TreeChoice  # what `--tree auto` makes of the profile in this budget


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
        options: both models, and how they load. Their tree is the largest to time, `auto` as large
            a one as the budget has room for; their context is set here, their profile is not used.
        texts: UTF-8 files of the kind that will be decoded.
        sampling: what the profile is for; window i draws with its seed plus i.
        num_tokens: positions to trace.

    Raises:
        UserError: text that is missing, not UTF-8, empty or shorter than a window; whatever `load`
            refuses.
    """
    read = [tuning_text(path) for path in texts]
    _require_profiled(options, sampling)
    spec = options.tree_spec()
    require_writable(profiles_folder())
    admit = partial(largest_that_fits, spec=spec)
    # experts come as they will in runs that choose their tree
    later = replace(options, tree="auto", profile="none")
    setup = resolve(later, admit=admit, hooks=hooks)
    timed = largest_that_fits(setup, spec)
    target, own_draft = setup.files
    windows = encode_windows(target, read, num_tokens)
    rule = "a tune is of a draft that ranks candidates"
    require(own_draft is not None, rule, f"`draft` {options.draft}", "name one")
    assert own_draft is not None
    identity = Identity.from_models(target, own_draft, sampling, options.rule, setup.machine)
    with open_setup(timed, Request(is_named=True)) as decoder:
        question = TuneQuestion(
            identity=identity,
            sampling=sampling,
            windows=windows,
            bounds=bounds_to_grow(decoder),
        )
        traced = trace_windows(decoder, question, hooks.on_count)
        uses = expert_uses(decoder)
        costs = measure_costs(
            decoder, timed.device, windows[0][:NUM_PROMPT], sampling, hooks.on_count
        )
        hooks.on_phase("ranking trees")
        names = (target.name, own_draft.name)
        proved = question.proved(decoder)
        profile = summarise(proved, traced, costs, uses, names, decoder.num_threads)
    path = save_profile(profile)
    question.state_path.unlink(missing_ok=True)
    return TuneResult(profile, path, choice_from(profile, sampling, setup, timed))


def _require_profiled(options: LoadOptions, sampling: Sampling) -> None:
    rule = "a tune is of one process, `device` must be one"
    require(not options.cards, rule, options.device, "name one card")
    lenience = options.lenience
    require(lenience == 1, "`lenience` must be 1 for a profile", lenience, "leave it out")
    unprofiled = sampling.unprofiled
    rule = "a profile is of text without penalties, biases and min-p"
    require(not unprofiled, rule, unprofiled, "leave them out")


def choice_from(profile: Profile, sampling: Sampling, setup: Setup, timed: Setup) -> TreeChoice:
    """Return the tree that a run like this chooses, with the timed one's context if it must be."""
    chosen = timed if setup.traffic_of(1) is None else setup
    known = chosen.knowledge(setup.settings(sampling)).by_profile_alone(profile)
    return choose(TreeSpec("auto"), known, TreeRequest(chosen.room, setup.options.rule))


def largest_that_fits(setup: Setup, spec: TreeSpec) -> Setup:
    """Return the run with a tune's context and the largest tree to time that its memory holds.

    That is the named tree, or one of the first of `SIZES` that fits. Raises `UserError`.
    """
    target = setup.files.target
    rule = "texts to tune by must go on, a model with an encoder writes anew"
    is_alone = not has_encoder(target.config)
    require(is_alone, rule, target.config.get("model_type"), "name a `tree` instead")
    # a path that is scored by parts lies on one side of a turning point
    longest = turning_point(target) or longest_context(target) or _CONTEXT
    timed = replace(setup, budget=replace(setup.budget, context=min(_CONTEXT, longest)))
    sizes = SIZES if spec.is_chosen else (spec.num_nodes,)
    size = next((size for size in sizes if timed.traffic_of(size)), sizes[-1])
    timed.plan_for(size)
    tree = TreeSpec("best", size, DEPTH) if spec.is_chosen else spec
    # a draft alone fills a tree that is named
    options = replace(setup.options, tree=tree.label)
    return replace(timed, options=options, tree=tree)
