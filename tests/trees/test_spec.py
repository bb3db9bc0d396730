"""`--tree` in words: each form builds its tree, and any other text is refused with the forms or bounds it misses."""

import pytest

from offload.errors import UserError
from offload.trees.spec import MAX_CHAIN, TreeSpec, parse_tree
from offload.trees.topology import DEFAULT_ACCEPTANCE, DynamicShape, Shape, best_first, chain, sequences

FORMS: list[tuple[str, TreeSpec, Shape]] = [
    ("auto", TreeSpec("auto"), best_first(DEFAULT_ACCEPTANCE, 64, 16)),
    ("none", TreeSpec("none"), chain(0)),
    ("48x6", TreeSpec("best", 48, 6), best_first(DEFAULT_ACCEPTANCE, 48, 6)),
    ("8x999", TreeSpec("best", 8, 999), best_first(DEFAULT_ACCEPTANCE, 8, 7)),
    ("chain:5", TreeSpec("chain", 1, 5), chain(5)),
    ("chain:auto", TreeSpec("auto_chain"), chain(MAX_CHAIN)),
    ("sequences:3x7", TreeSpec("sequences", 3, 7), sequences(3, 7)),
    ("dynamic:48x6", TreeSpec("dynamic", 48, 6), DynamicShape(48, 6)),
    ("dynamic:8x999", TreeSpec("dynamic", 8, 999), DynamicShape(8, 7)),
]


@pytest.mark.parametrize(("text", "spec", "tree"), FORMS)
def test_tree_specs(text: str, spec: TreeSpec, tree: Shape) -> None:
    assert parse_tree(text) == spec
    assert spec.build(DEFAULT_ACCEPTANCE) == spec.build() == tree
    assert spec.num_nodes == tree.num_nodes and spec.label == text


def test_old_names_large_trees_and_rising_vectors() -> None:
    old = parse_tree("grown:48x6")
    assert old == parse_tree("dynamic:48x6") and old.label == "dynamic:48x6", "what dynamic trees were called once"
    assert [parse_tree(text).num_nodes for text in ("65536x9", "chain:65535", "sequences:255x257")] == [65536] * 3
    with pytest.raises(UserError, match="non-increasing"):  # refused, not smoothed
        parse_tree("16x4").build([0.1, 0.5])


MALFORMED = [
    "",
    "64 x16",
    "64x16\n",
    *["64y16", "64", "x16", "64x", "-1x3", "64x-3", "AUTO", "chain", "chain:", "chain:2x3", "sequences:4"],
]
MALFORMED += ["dynamic:64", "dynamic", "grown:64", "grown", "64x16x2", "1e3x4", "6.4x2", "٣x٤", "9999999999x2"]
ABSURD = ["0x4", "4x0", "dynamic:0x4", "grown:4x0", "dynamic:65537x4", "chain:0", "sequences:0x3", "sequences:3x0"]
ABSURD += ["65537x4", "chain:65536", "sequences:256x256"]
RULE = "`tree` must be auto, none, NxD, dynamic:NxD, chain:L, chain:auto or sequences:KxL"
BOUNDS = "`tree` must have numbers of 1 or more and at most 65536 nodes"


@pytest.mark.parametrize(("text", "rule"), [*((one, RULE) for one in MALFORMED), *((one, BOUNDS) for one in ABSURD)])
def test_what_is_refused_is_told_the_forms_or_the_bounds(text: str, rule: str) -> None:
    with pytest.raises(UserError) as error:
        parse_tree(text)
    assert str(error.value) == f'{rule}, got {text!r}: try `tree="64x16"`'
