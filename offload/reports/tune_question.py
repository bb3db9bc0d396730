"""The question that a tune asks of a pair: models and settings, windows of text, and trees."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from offload.checkpoint.sizes import longest_context, turning_point
from offload.checkpoint.small_files import has_encoder
from offload.engine.decoder import Decoder
from offload.engine.setup import Setup
from offload.errors import require
from offload.planning.acceptance import NUM_RANKS
from offload.planning.choice import is_free_of_trees
from offload.planning.profile import Identity, profiles_folder
from offload.sampling_options import Sampling
from offload.trees.spec import TreeSpec, label_of
from offload.trees.topology import DynamicShape, Shape, chain

# tokens of a window: those that are given, and those that are written behind them
NUM_PROMPT = 64
NUM_NEW = 128
_CONTEXT = 512  # positions of a tune's decoder
# nodes and depth of the largest tree to run; from some hundred rows on costs grow by as much a row
_SIZES = (256, 192, 128, 64, 32, 16)
_DEPTH = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneQuestion:
    """What is measured; unfinished work for another question is of no use.

    Args:
        windows: token ids, the first `NUM_PROMPT` of each stretch of text.
        trees: that take turns.
    """

    identity: Identity
    sampling: Sampling
    windows: tuple[tuple[int, ...], ...]
    trees: tuple[Shape, ...] = ()

    @property
    def dynamic_trees(self) -> list[DynamicShape]:
        """The trees whose tokens are counted."""
        return [tree for tree in self.trees if isinstance(tree, DynamicShape)]

    @property
    def state_path(self) -> Path:
        """Where finished windows are kept until all are; the name tells questions apart."""
        trees = [*map(label_of, self.trees)]
        key = (self.identity, self.sampling, self.windows, trees, NUM_PROMPT, NUM_NEW, NUM_RANKS)
        digest = hashlib.sha256(repr(key).encode()).hexdigest()
        return profiles_folder() / f"{self.identity.file_name}.{digest[:12]}.unfinished"

    def proved(self, decoder: Decoder) -> Identity:
        """Return the identity with sums of the weights, all of which have been read by now."""
        known = {part: decoder.identities.for_part(part) for part in self.identity.proofs}
        proofs = {part: identity.proofs for part, identity in known.items() if identity is not None}
        return replace(self.identity, proofs=proofs)


def for_windows(setup: Setup, named: TreeSpec) -> Setup:
    """Return the run with a context for windows, and with memory for the largest tree to run.

    That is the named tree, or the first of `_SIZES` that fits. Raises `UserError` for too little
    memory, and for a model with an encoder.
    """
    target = setup.files.target
    requirement = "texts to tune by are continued, and a model with an encoder begins new ones"
    is_alone = not has_encoder(target.config)
    require(is_alone, requirement, target.config.get("model_type"), "name a `tree` instead")
    # a path that is scored by parts lies on one side of a turning point
    longest = turning_point(target) or longest_context(target) or _CONTEXT
    budget = replace(setup.budget, context=min(_CONTEXT, longest))
    timed = replace(setup, budget=budget, is_timed=True)
    sizes = _SIZES if named.is_chosen else (named.num_nodes,)
    size = next((size for size in sizes if timed.traffic_of(size)), sizes[-1])
    timed.plan_for(size)
    tree = TreeSpec("best", size, _DEPTH)
    # a draft alone fills a tree that is named
    return replace(timed, tree=tree, options=replace(setup.options, tree=tree.label))


def trees_of(
    decoder: Decoder, sampling: Sampling, bounds: Sequence[tuple[int, int]]
) -> tuple[Shape, ...]:
    """Return the trees that take turns: none, and one for each of these nodes and depths."""
    form = "dynamic:{}x{}" if is_free_of_trees(decoder.rule.name) else "{}x{}"
    named = partial(decoder.tree_choice, sampling)
    return (chain(0), *(named(form.format(*size)).shape for size in bounds))
