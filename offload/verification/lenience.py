"""Verification that accepts more than is exact: Leviathan et al.'s lenience l (2211.17192, section A.5).

Where tokens are drawn, q is multiplied by l before it is compared with p, so a trial's chance min(1, p / q) becomes
min(1, p / (l q)); what is drawn after a rejection stays as it was. Then no token is emitted with more than p(x) / l:
by induction from a node's last child to its first, if what remains emits no more than R / l of the remaining R, so does
the trial before it, whose chance of failing has only become less. That holds for all ratio rules. There is no bound
from below: tokens that the draft never proposes become rarer.

At temperature 0 a child x is accepted if p(x) >= l max(p), p being the distribution at temperature 1, and of several
such children the one that the target likes best. The token that ends a walk is the target's argmax as ever.

Invariant: a lenience of 1 never comes here: exact rules have no part in this file.
"""

import math
from collections.abc import Callable

from offload.sampling.logits import Rows
from offload.sampling.sampler import Sampler
from offload.tree.token_tree import TokenTree, children_of
from offload.verification.walk import Acceptance, Trials, walk


def lenient(trials: Trials | None, lenience: float) -> Callable[[TokenTree, Rows, Sampler, int], Acceptance]:
    """A `Verify` with this lenience, in (0, 1); without `trials` there is none but at temperature 0."""
    assert 0 < lenience < 1, "a lenience of 1 is no lenience"

    def verify(tree: TokenTree, logits_NV: Rows, sampler: Sampler, root_position: int) -> Acceptance:
        if sampler.is_greedy:
            return greedily_lenient(tree, logits_NV, sampler, lenience)
        assert trials is not None, "`check_lenience` refuses a rule without a ratio test where tokens are drawn"
        return walk(tree, logits_NV, sampler, trials, lenience=lenience)

    return verify


def greedily_lenient(tree: TokenTree, logits_NV: Rows, sampler: Sampler, lenience: float) -> Acceptance:
    """Descend as long as a child is nearly the likeliest token. Raises `UserError` where scores are not finite."""
    nodes, guesses = [0], list[float]()
    while True:
        logits_V, children = logits_NV[nodes[-1]], children_of(tree.topology)[nodes[-1]]
        best = sampler.draw(logits_V, 0)
        score = {child: float(logits_V[tree.tokens[child]]) for child in children}
        least = float(logits_V[best]) + math.log(lenience)
        accepted = [child for child in children if score[child] >= least]
        guesses += [float(first in accepted) for first in children[:1]]
        if not accepted:
            return Acceptance(nodes, [*(tree.tokens[node] for node in nodes[1:]), best], guesses)
        nodes.append(max(accepted, key=score.__getitem__))
