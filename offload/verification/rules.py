"""Rules of acceptance: which nodes of a scored tree may be emitted so that the target's distribution stays what it is.

| rule | the draft's children | accepted |
|---|---|---|
| match | best by log q + G, the target's own noise | the target's own draw, if it is a child |
| topk | the k likeliest | the target's own draw, if it is a child |
| sequoia | drawn without replacement | ratio test, child by child (2402.12374, Alg. 1) |
| specinfer | drawn with replacement | the same test (2305.09781, Alg. 3 in 2402.12374) |
| spectr | drawn with replacement | k-sequential selection (2310.15141, Alg. 3) |

No model in sight. Invariant: for any tree whose growth was predictable, the emitted tokens have the target's
distribution; with `match` and `topk` they are, for one seed, the very same tokens whatever the tree. A rule that was
made lenient keeps neither promise, and says so (`is_exact`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from offload.config import RULES, Drafting, check_lenience, drafting_of
from offload.sampling.logits import Rows
from offload.sampling.sampler import Sampler
from offload.tree.token_tree import TokenTree
from offload.verification.k_sequential import k_sequential, k_sequential_trials
from offload.verification.lenience import lenient
from offload.verification.match import match
from offload.verification.ratio import ratio, ratio_trials
from offload.verification.walk import Acceptance, Trials

Verify = Callable[[TokenTree, Rows, Sampler, int], Acceptance]  # tree, logits, sampler, position of the root

_TESTS: dict[str, Verify] = {"match": match, "ratio": ratio, "k_sequential": k_sequential}  # as `RULES` names them
_TRIALS: dict[str, Trials | None] = {"match": None, "ratio": ratio_trials, "k_sequential": k_sequential_trials}


@dataclass(frozen=True, slots=True)
class Rule:
    """How children are chosen and how they are verified: the two must fit."""

    name: str
    drafting: Drafting
    verify: Verify
    lenience: float = 1.0  # less is not exact

    @property
    def is_exact(self) -> bool:
        """Whether it keeps the target's distribution, or its very tokens."""
        return self.lenience == 1

    @property
    def repeats_draws(self) -> bool:
        """Whether each token is the target's own draw for the seed, so that one seed gives one text for any tree."""
        return self.verify is match


def not_exact_line(rule: Rule) -> str:
    """For the user, at the start of whatever such a rule has a part in."""
    return (
        f"NOT EXACT: `lenience` {rule.lenience:g} accepts guesses that the target alone would not have written; "
        "leave it out for the target's own text"
    )


def find_rule(name: str, lenience: float = 1.0) -> Rule:
    """The rule of that name. Raises `UserError`."""
    drafting, lenience = drafting_of(name), check_lenience(lenience, name)
    test = RULES[name].test
    verify = _TESTS[test] if lenience == 1 else lenient(_TRIALS[test], lenience)
    return Rule(name, drafting, verify, lenience)
