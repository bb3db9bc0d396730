"""What is printed about trees: a dynamic one is never passed off as a fixed one of its size."""

import pytest

from offload.cli.console import candidate_rows, choice_lines, closing_lines, comparison_lines
from offload.planning.cost_model import Prediction, StepTime
from offload.planning.tree_policy import TreeChoice
from offload.stats import Stats
from offload.tree.spec import label_of, parse_tree
from offload.tree.topology import DynamicShape, Shape, best_first, chain

SHAPES = {"dynamic:64x8": DynamicShape(64, 8), "64x8": best_first((0.7, 0.2, 0.1), 64, 8), "none": chain(0)}


def stats(shape: Shape) -> Stats:
    """Of a short run."""
    is_dynamic = isinstance(shape, DynamicShape)
    figures = {"num_new_tokens": 9, "num_first_tokens": 1, "num_sweeps": 2, "decode_s": 1.0, "bytes_streamed": 1}
    size = {"tree_num_nodes": shape.num_nodes, "tree_depth": shape.depth, "is_tree_dynamic": is_dynamic}
    return Stats(**figures, **size, sweep_s=1.0, accepted_per_sweep=[4, 4])


@pytest.mark.parametrize("label", SHAPES)
def test_a_label_is_what_the_flag_would_call_it(label: str) -> None:
    assert label_of(SHAPES[label]) == label
    assert (parse_tree(label).kind == "dynamic") == isinstance(SHAPES[label], DynamicShape)


@pytest.mark.parametrize("label", ["dynamic:64x8", "64x8"])
def test_every_line_tells_dynamic_from_static(label: str) -> None:
    shape, is_dynamic = SHAPES[label], label.startswith("dynamic")
    words = f"{'dynamic tree of at most' if is_dynamic else 'tree of'} 64 nodes, 8 deep"
    assert f"(2 sweeps, {words})" in closing_lines(stats(shape), 1 << 30)
    assert choice_lines(TreeChoice(shape, "as named")).startswith(f"{words}: as named")
    row = comparison_lines(stats(chain(0)), stats(shape), 1, 0).splitlines()[2]
    assert row.strip().startswith("dynamic tree 64x8 " if is_dynamic else "tree 64x8 ")
    assert (
        candidate_rows([Prediction(label, shape, StepTime(0.0, 0.0, 1.0, 0.0), (4.0, 4.0))])[0]
        .strip()
        .startswith(f"{label}: ")
    )
    assert stats(shape).as_dict()["tree"] == {"num_nodes": 64, "depth": 8, "is_grown": is_dynamic}
