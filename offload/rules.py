"""The rules of verification by name: how drafts choose children, what judges these. No torch."""

from enum import Enum
from typing import NamedTuple

from offload.declaration import number
from offload.errors import UserError, require
from offload.sampling_options import Sampling


class ChildSampling(Enum):
    """How a drafter chooses the children of a node."""

    COUPLED = "coupled"  # the best by log q + G, with the very noise that the target draws with
    TOP_K = "top-k"  # the likeliest
    WITHOUT_REPLACEMENT = "without replacement"  # drawn from q, no token twice
    WITH_REPLACEMENT = "with replacement"  # independent draws from q

    @property
    def keeps_distributions(self) -> bool:
        """Return True if verification needs q itself and not just the tokens."""
        return self in (ChildSampling.WITHOUT_REPLACEMENT, ChildSampling.WITH_REPLACEMENT)


class RuleTerms(NamedTuple):
    """The two halves of a rule, which must fit."""

    drafting: ChildSampling
    test: str  # name of the function in `offload.trees.verification` that judges the children


# All rules of verification by name. The functions need torch, this table does not.
RULES: dict[str, RuleTerms] = {
    "match": RuleTerms(ChildSampling.COUPLED, "match"),
    "sequoia": RuleTerms(ChildSampling.WITHOUT_REPLACEMENT, "ratio"),
    "specinfer": RuleTerms(ChildSampling.WITH_REPLACEMENT, "ratio"),
    "spectr": RuleTerms(ChildSampling.WITH_REPLACEMENT, "k_sequential"),
    "topk": RuleTerms(ChildSampling.TOP_K, "match"),
}


def drafting_of(rule: str) -> ChildSampling:
    """Return the child sampling that goes with a rule. Raises `UserError` for an unknown rule."""
    if not isinstance(rule, str) or rule not in RULES:
        known = f"`rule` must be one of {', '.join(RULES)}"
        raise UserError(f"{known}, got {rule!r}: leave it out for match")
    return RULES[rule].drafting


def check_lenience(lenience: float, rule: str, sampling: Sampling | None = None) -> float:
    """Return `lenience`, checked for rule and, where known, `sampling`. Raises `UserError`."""
    lenience = number(lenience, "`lenience`")
    remedy = "1 is exact, and the default"
    require(0 < lenience <= 1, "`lenience` must lie in (0, 1]", lenience, remedy)
    is_drawn = sampling is not None and not sampling.is_greedy
    if lenience < 1 and is_drawn and not drafting_of(rule).keeps_distributions:
        why = f"scales a ratio that `rule` {rule} does not take where tokens are drawn"
        remedy = "use `rule` sequoia, or `temperature` 0"
        raise UserError(f"`lenience` {lenience:g} {why}: {remedy}")
    return lenience
