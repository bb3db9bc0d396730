"""`--tree` in words: what a user may ask for, and the shape that it names.

Every kind but `dynamic` and `chain:auto` names one static tree. `dynamic` names bounds: the shape
is settled in every step by the draft's scores for the very tokens that it proposes, which only
rules that repeat the target's own draws allow. `chain:auto` is a chain whose length follows
from how guesses fared in the passes before.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from offload.errors import UserError, require
from offload.rules import drafting_of
from offload.trees.topology import (
    DEFAULT_ACCEPTANCE,
    AcceptanceVector,
    DynamicShape,
    Shape,
    best_first,
    chain,
    sequences,
)

# the most that `--tree` may ask for; far beyond any size whose verification hides behind a link
MAX_TREE_NODES = 65536
MOST_MATCHED = 64
# a tree where nothing was measured; else `planning.choice` answers
AUTO_NODES = 64
AUTO_DEPTH = 16
MAX_CHAIN = 32  # guesses of a chain whose length is chosen

TreeKind = Literal["auto", "none", "best", "dynamic", "chain", "auto_chain", "sequences"]
_TREE_FORMS: dict[TreeKind, str] = {
    "auto": "auto",
    "none": "none",
    "best": r"(\d{1,9})x(\d{1,9})",
    "dynamic": r"(?:dynamic|grown):(\d{1,9})x(\d{1,9})",  # the second as it was called once
    "chain": r"chain:(\d{1,9})",
    "auto_chain": "chain:auto",
    "sequences": r"sequences:(\d{1,9})x(\d{1,9})",
}
_IN_WORDS = "auto, none, NxD, dynamic:NxD, chain:L, chain:auto or sequences:KxL"


@dataclass(frozen=True, slots=True)
class TreeSpec:
    """A tree as the user named it, not built yet."""

    kind: TreeKind
    count: int = 1  # of nodes for best and dynamic, of sequences for the others: a chain is one
    depth: int = 0  # at most, in draft steps

    @property
    def num_nodes(self) -> int:
        """The most nodes of a named tree; of one that is to be chosen, those where nothing is measured."""
        match self.kind:
            case "auto":
                return AUTO_NODES
            case "auto_chain":
                return 1 + MAX_CHAIN
            case "best" | "dynamic":
                return self.count
            case "none" | "chain" | "sequences":
                return 1 + self.count * self.depth

    @property
    def is_chosen(self) -> bool:
        """Whether the tree is chosen by measurements rather than named."""
        return self.kind in ("auto", "auto_chain")

    def __str__(self) -> str:
        return self.label

    @property
    def label(self) -> str:
        size = f"{self.count}x{self.depth}"
        shown = {"auto": "auto", "auto_chain": "chain:auto", "none": "none"}
        shown |= {"best": size, "chain": f"chain:{self.depth}"}
        return shown.get(self.kind, f"{self.kind}:{size}")

    def build(self, p: AcceptanceVector = DEFAULT_ACCEPTANCE) -> Shape:
        """Return the shape. Raises `UserError` where best-first meets a `p` that rises."""
        match self.kind:
            case "auto":
                return best_first(p, AUTO_NODES, AUTO_DEPTH)
            case "none" | "chain":
                return chain(self.depth)
            case "auto_chain":
                return chain(MAX_CHAIN)
            case "best":
                return best_first(p, self.count, self.depth)
            case "dynamic":
                return DynamicShape(self.count, min(self.depth, self.count - 1))
            case "sequences":
                return sequences(self.count, self.depth)

    def check_rule(self, rule: str) -> None:
        """Refuse a rule that needs growth to look at no drawn token. Raises `UserError`."""
        if self.kind == "dynamic" and drafting_of(rule).keeps_distributions:
            raise UserError(
                f"`tree` {self.label} looks at the tokens it proposes and rule {rule} is exact only without that: "
                f"use `tree` {self.count}x{self.depth} or `rule` match"
            )


def label_of(shape: Shape) -> str:
    """Return the `--tree` name of a chosen shape."""
    if shape.num_nodes == 1:
        return "none"
    return f"{'dynamic:' if isinstance(shape, DynamicShape) else ''}{shape.num_nodes}x{shape.depth}"


def parse_tree(text: str) -> TreeSpec:
    """Parse `--tree`: `NxD` has N nodes, at most D deep. Raises `UserError`."""
    spec, numbers = _parsed(str(text))
    if spec is None:
        raise UserError(f'`tree` must be {_IN_WORDS}, got {text!r}: try `tree="64x16"`')
    requirement = f"`tree` must have numbers of 1 or more and at most {MAX_TREE_NODES} nodes"
    require(
        all(numbers) and spec.num_nodes <= MAX_TREE_NODES,
        requirement,
        repr(text),
        'try `tree="64x16"`',
    )
    return spec


@cache
def _parsed(text: str) -> tuple[TreeSpec | None, list[int]]:
    """Return the kind and the numbers of a tree's label; None for an unknown label."""
    for kind, form in _TREE_FORMS.items():
        if match := re.fullmatch(form, text, re.ASCII):
            numbers = [int(group) for group in match.groups()]
            return TreeSpec(kind, *(1, *numbers)[-2:]), numbers
    return None, []


def tree_to_fill(text: str, rule: str, *, is_ranked: bool, has_sources: bool = False) -> TreeSpec:
    """Return the tree that `text` asks for; without a draft, which ranks candidates, or sources, the root alone.

    Guesses of sources are point masses that the context settles: with them alone any rule allows
    any shape. Raises `UserError`.
    """
    spec = parse_tree(text)
    if is_ranked:
        spec.check_rule(rule)
        requirement = (
            "`tree` chain:auto is as long as a draft is right, which other guesses do not tell"
        )
        is_measured = spec.kind != "auto_chain" or not has_sources
        require(is_measured, requirement, "both", "leave the sources out, or name a length")
        return spec
    is_filled = has_sources or spec.kind in ("auto", "none")
    require(
        is_filled,
        "`tree` needs a draft or `lookup` to fill it",
        repr(text),
        "give `draft`, or allow `lookup`",
    )
    return spec if has_sources else TreeSpec("none")


class MatchLength(NamedTuple):
    """How many of its last tokens a text must share with what it is guessed to go on like."""

    least: int = 1
    most: int = 16


def parse_match_length(text: str) -> MatchLength:
    """Parse `MIN:MAX`. Raises `UserError`."""
    numbers = re.fullmatch(r"(\d{1,3}):(\d{1,3})", str(text), re.ASCII)
    length = MatchLength(*map(int, numbers.groups())) if numbers else MatchLength(0, 0)
    requirement = f"`lookup_length` must be MIN:MAX, two numbers from 1 to {MOST_MATCHED}"
    require(
        1 <= length.least <= length.most <= MOST_MATCHED,
        requirement,
        repr(text),
        "such as `lookup_length` 1:16",
    )
    return length
