"""Which tree passes go on with: the one they have, the best that is known, or one that is worth a trial."""

from collections import Counter
from collections.abc import Sequence

from offload.planning.cost_model import Prediction
from offload.planning.observed_passes import MOST_KEPT, TRIED, ObservedPasses
from offload.trees.topology import Shape

_WORTH_CHANGING = 1.25  # times as fast as the tree that a lone text has
_WORTH_CHANGING_LATE = 1.05  # the same after `_MANY` passes
_MANY = 24
_WORTH_TRYING = 1.02  # times as fast as the best known tree of several texts


def next_tree(
    passes: ObservedPasses, ranked: Sequence[Prediction], num_texts: int, current: Shape | None
) -> Prediction:
    """Return the prediction to go on with.

    A lone text keeps its tree unless another promises far more: what it would gain by trying others,
    it loses in its few passes. Later, when many have shown what they cost, less is enough, and in
    the end its neighbours are tried.

    Args:
        ranked: all trees, by costs and acceptance that `passes` have corrected, the quickest first.
        current: the tree so far.
    """
    best = ranked[0]
    if num_texts > 1:
        return _best_or_trial(passes, ranked, num_texts, best, _WORTH_TRYING)
    num_passes = len(passes.among(1))
    worth = _WORTH_CHANGING_LATE if num_passes >= _MANY else _WORTH_CHANGING
    bounds = current and (current.num_nodes, current.depth)
    kept = next(
        (tree for tree in ranked if (tree.shape.num_nodes, tree.shape.depth) == bounds), best
    )
    followed = kept if kept.s_per_token < worth * best.s_per_token else best
    if num_passes < MOST_KEPT:
        return followed
    return _best_or_trial(passes, ranked, 1, followed, worth)


def _best_or_trial(
    passes: ObservedPasses,
    ranked: Sequence[Prediction],
    num_texts: int,
    best: Prediction,
    worth: float,
) -> Prediction:
    """Return the best tree, or one of nearly its size that may be `worth` times as fast.

    That is asked of sizes that were hardly run. Mistakes at sizes that were not observed therefore
    do not last.
    """
    observed = passes.of_texts(num_texts)
    times = Counter(each.most_rows for each in observed)
    if times[num_texts * best.shape.num_nodes] < TRIED:
        return best
    is_link_known = any(each.has_waited for each in observed)
    quickest = {tree.shape.num_nodes: tree for tree in reversed(ranked)}
    for size in _nearby(sorted(quickest), best.shape.num_nodes):
        is_known = times[num_texts * size] >= TRIED
        least_s = _least_s_per_token(quickest[size], best, is_link_known=is_link_known)
        if not is_known and least_s * worth < best.s_per_token:
            return quickest[size]
    return best


def _nearby(sizes: Sequence[int], num_nodes: int) -> Sequence[int]:
    """Return the sizes beside one, and half of it.

    Where passes compute in parts, the next smaller size may take as long, and that one half of it.
    """
    place = sizes.index(num_nodes)
    return (*sizes[max(0, place - 1) : place + 2], sizes[max(0, place - 2)])


def _least_s_per_token(tree: Prediction, best: Prediction, *, is_link_known: bool) -> float:
    """Return the least seconds per token of a tree that the time of the best one leaves possible.

    More rows compute no faster, and fewer rows take no less than their share. A link that was never
    waited for may be of any speed.
    """
    share = min(1.0, tree.shape.num_nodes / best.shape.num_nodes)
    step = tree.step._replace(compute_s=min(tree.step.compute_s, share * best.step.compute_s))
    if not is_link_known:
        step = step._replace(link_s=0.0, asked_s=0.0)
    return step.total_s / tree.tokens_per_sweep
