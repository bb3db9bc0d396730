"""What is printed about a run: trees by their kind and whole, memory beside all that it may take."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from offload.cli.console import Console
from offload.cli.demo_run import (
    DemoResult,
    ShownPass,
    comparison_lines,
    proof_details,
    proof_line,
    tree_lines,
    usual_pass,
)
from offload.cli.loading import Loading
from offload.cli.progress import Phase
from offload.cli.run_lines import (
    candidate_rows,
    choice_lines,
    clipped_line,
    closing_lines,
    cut_line,
    opening_lines,
    place_line,
    turn_line,
)
from offload.engine.sequence import StepMetrics
from offload.memory.plan import MemoryPlan
from offload.memory.tiers import LayerTier
from offload.options import OutputOptions
from offload.planning.choice import TreeChoice
from offload.planning.cost_model import Prediction, StepTime
from offload.planning.knowledge import Provenance
from offload.stats import Stats
from offload.trees.spec import label_of
from offload.trees.topology import DynamicShape, Shape, best_first, chain
from offload.units import format_bytes, is_decimal

SHAPES = {"dynamic:64x8": DynamicShape(64, 8), "64x8": best_first((0.7, 0.2, 0.1), 64, 8), "none": chain(0)}


def planned(num_streamed: int = 3, **others: Any) -> MemoryPlan:
    """A plan of four layers."""
    names = ["runtime", "rest", "draft", "distribution", "kv", "activation"]
    sizes = {f"{name}_bytes": 0 for name in names} | {"layer_bytes": (10**9,) * 4, "layer_slot_bytes": 10**9}
    counts = {"context": 64, "num_nodes": 8, "max_prompt_rows": 512, "num_logits_rows": 8}
    tier_L = (LayerTier.RESIDENT,) * (4 - num_streamed) + (LayerTier.DISK,) * num_streamed
    slots = {"num_layer_slots": 2 if num_streamed else 0, "tier_L": tier_L, "ram_bytes": 2 * 10**9}
    return MemoryPlan(**{**sizes, **counts, **slots, **others})  # type: ignore[arg-type]


def stats(shape: Shape) -> Stats:
    """Return figures of a short run."""
    is_dynamic = isinstance(shape, DynamicShape)
    figures = {"num_new_tokens": 9, "num_first_tokens": 1, "num_sweeps": 2, "decode_s": 1.0, "bytes_streamed": 1}
    size = {"tree_num_nodes": shape.num_nodes, "tree_depth": shape.depth, "is_tree_dynamic": is_dynamic}
    return Stats(**figures, **size, sweep_s=1.0, accepted_per_sweep=[4, 4])


def predicted(label: str) -> Prediction:
    return Prediction(label, SHAPES[label], StepTime(0.0, 0.0, 0.5, 0.0), (4.0, 4.0))


@pytest.mark.parametrize("label", ["dynamic:64x8", "64x8"])
def test_every_line_tells_dynamic_from_static(label: str) -> None:
    assert [label_of(one) for one in SHAPES.values()] == [*SHAPES], "as the flag would call it"
    shape, is_dynamic = SHAPES[label], label.startswith("dynamic")
    words = f"{'dynamic tree of at most' if is_dynamic else 'tree of'} 64 nodes, 8 deep"
    assert f"(2 passes, {words})" in closing_lines(stats(shape), planned(), 1 << 20)
    assert choice_lines(TreeChoice(shape, "as named")).startswith(f"{words}: as named")
    runs: list[Any] = [SimpleNamespace(stats=stats(one)) for one in (chain(0), shape)]
    row = comparison_lines(DemoResult(*runs, num_exact=1, num_near=0, num_same=None)).splitlines()[2]
    assert row.strip().startswith("dynamic tree 64x8 " if is_dynamic else "tree 64x8 ")
    assert candidate_rows([predicted(label)])[0].strip().startswith(f"{label}: ")
    assert stats(shape).as_dict()["tree"] == {"num_nodes": 64, "depth": 8, "is_dynamic": is_dynamic}


def test_a_proof_is_one_plain_sentence() -> None:
    found: Any = DemoResult(SimpleNamespace(), SimpleNamespace(), num_exact=111, num_near=1, num_same=16)  # type: ignore[arg-type]
    assert proof_line(found).endswith("writes the same text: all 112 tokens compared")
    assert "float32" not in proof_line(found) and "bf16" not in proof_line(found)
    details = proof_details(found).splitlines()
    assert details[0].startswith("111 tokens are") and "1 lie within bf16 rounding" in details[0]
    assert details[1].startswith("16 tokens that both runs have are the same, bit for bit")
    drawn = found._replace(num_exact=0, num_near=0, num_same=None)
    assert "no text is compared" in proof_line(drawn) and proof_details(drawn) == ""


def test_what_runs_is_told_in_two_lines() -> None:
    best = predicted("dynamic:64x8")
    measured = TreeChoice(best.shape, "measured", 4.0, (best,), acceptance=Provenance.MEASURED)
    named = TreeChoice(SHAPES["64x8"], "named", 3.25)
    decoder: Any = SimpleNamespace(plan=planned(), notes=[], sources="")
    for ranks, name in ((None, "Llama-70B"), ("shards", "Llama-70B on rank 0")):
        options: Any = SimpleNamespace(model="/models/Llama-70B/", ranks=ranks)
        assert Loading(options).model_name == name
    place = "Llama-70B: 1 of 4 layers in RAM (2 GB allowed), 3 GB a pass from disk"
    assumed = measured._replace(acceptance=Provenance.ASSUMED)
    for draft, choice, told in (
        ("Llama-1B", measured, "draft Llama-1B, tree dynamic:64x8, 8.00 tokens/s expected"),
        (
            "Llama-1B",
            assumed,
            "draft Llama-1B, tree dynamic:64x8, at best 8.00 tokens/s",
        ),
        ("Llama-1B", named, "draft Llama-1B, tree 64x8, 3.2 tokens a pass expected"),
        ("draft", named, "draft, tree 64x8, 3.2 tokens a pass expected"),  # a folder called draft is named once
    ):
        lines = opening_lines("Llama-70B", draft, decoder, choice, is_decimal=True).splitlines()
        assert lines == [place, told]
    alone = opening_lines("Llama-70B", None, decoder, TreeChoice(chain(0), "named"))
    assert alone == "Llama-70B: 1 of 4 layers in RAM (1.86 GiB allowed), 2.79 GiB a pass from disk"


def test_places_are_those_of_the_plan() -> None:
    whole = planned(0)
    assert place_line("m", whole) == "m: all 4 layers fit into RAM (1.86 GiB allowed), nothing is streamed"
    tier_L = (LayerTier.RESIDENT, LayerTier.PINNED, LayerTier.PINNED, LayerTier.DISK)
    card = planned(gpu_bytes=10**9, tier_L=tier_L)
    assert place_line("m", card, is_decimal=True) == "m: 1 of 4 layers on the GPU, 2 in RAM, 1 on disk; 3 GB a pass"


def test_one_is_not_many_and_no_link_is_not_slow() -> None:
    few = stats(SHAPES["64x8"])
    few.num_new_tokens, few.num_prompt_tokens = 1, 1
    assert turn_line(few, "stop").startswith("(1 token, ")
    assert turn_line(few, "stop").endswith("; 1 of the prompt's 1 token read)")
    assert closing_lines(few, planned(), 0).startswith("1 token, the first after ")
    few.num_new_tokens, few.num_sweeps, few.bytes_streamed = 2, 1, 0
    told = closing_lines(few, planned(), 0)
    assert told.startswith("2 tokens, ") and "(1 pass, " in told and "link" not in told
    few.bytes_streamed = 1
    assert "link" in closing_lines(few, planned(), 0)
    assert "expert_hits" not in Stats().as_dict(), "where they come with their layers"
    told = Stats(expert_hits=7).as_dict()
    assert (told["expert_hits"], told["expert_misses"]) == (7, 0)


def test_peak_memory_stands_beside_all_that_it_may_take() -> None:
    figures = stats(chain(0))
    figures.peak_rss_bytes = 23 * 10**8
    told = closing_lines(figures, planned(), 4 * 10**8, is_decimal=True).splitlines()[-1]
    assert told == "peak memory 2.3 GB; allowed 2.4 GB = 2 GB (--ram) + 400 MB for Python"


def test_a_text_that_was_cut_off_says_so() -> None:
    figures, plan = stats(chain(0)), planned()
    figures.num_prompt_tokens, figures.num_new_tokens = 10, 5
    assert cut_line(figures, "stop", plan) == cut_line(figures, "interrupted", plan) == ""
    for num_new, words in ((5, "after 5 tokens: -n -1 writes"), (plan.context - 10, "where the context of 64 ends")):
        figures.num_new_tokens = num_new
        assert cut_line(figures, "length", plan).startswith(f"the text is cut off {words}")
    figures.num_new_tokens = 0
    assert cut_line(figures, "length", plan) == "", "none were asked for"
    assert turn_line(figures, "length").count("cut off by its limit") == 1
    assert clipped_line(5, 5, 3, plan) == ""
    told = clipped_line(9000, 7, 3, plan)
    assert told.startswith("at most 7 new tokens and not 9000: the context of 64 has no more room")


@pytest.mark.parametrize(
    ("size", "is_ten"),
    [*dict.fromkeys(("8GB", "8g", "400 MB", "1.5T"), True).items(),
     *dict.fromkeys(("8GiB", "512mi", "4096", 4096, None), False).items()],
)  # fmt: skip
def test_sizes_are_told_in_powers_of_ten_where_they_are_given_so(size: str | int | None, is_ten: bool) -> None:
    assert is_decimal(size) == is_decimal(None, size) == is_ten
    assert format_bytes(4 * 10**9, is_decimal=True) == "4 GB" and format_bytes(4 << 30) == "4 GiB"


def test_a_line_said_in_a_phase_leaves_the_phase() -> None:
    with Console(OutputOptions()) as console:
        console.bytes_landed(1, 10, "reading layers")
        console.say("a warning")
        console.bytes_landed(2, 10)
        assert isinstance(console.progress, Phase) and console.progress.label == "reading layers"
        assert console.progress.done == 2
        console.clear()
        console.say("the end")
        assert console.progress is None


#        root
#       / | | |
#      1   2  3   4     1 is kept
#     / | |
#    5   6  7           5 is kept
PARENTS = [-1, 0, 0, 0, 0, 1, 1, 2]
WORDS = ["(", "self", " x", "*", "key", ",", "=", "\x1b[31m", "\n        "]


def a_pass(parents: list[int], accepted: list[int], root: int = 0) -> StepMetrics:
    moved: Any = None
    return StepMetrics(parents, [root, *range(1, len(parents))], accepted, 1, 0.1, 0.5, moved)


def lines(passed: StepMetrics) -> list[str]:
    return tree_lines(ShownPass(3, 9, passed, 8), lambda token: WORDS[token]).splitlines()


def test_the_path_is_whole_and_the_rest_is_counted() -> None:
    assert lines(a_pass(PARENTS, [0, 1, 5])) == [
        "pass 3 of 9, a usual one: of 7 guesses the model keeps 2 (*), and adds a token of its own (+)",
        "  (",
        "  ├─ ␣x  and 1 behind it",
        "  ├─ *",
        "  ├─ 1 more",
        "  └* self",
        "     ├─ =",
        "     └* ,",
        "        └+ ↵␣␣␣␣␣␣␣␣",
    ]


@pytest.mark.parametrize("accepted", [[0], [0, 1], [0, 2, 7], [0, 1, 6]])
def test_every_guess_is_drawn_or_counted(accepted: list[int]) -> None:
    told = lines(a_pass(PARENTS, accepted))
    body = "\n".join(told[2:])
    num_drawn = len(re.findall(r"├─ (?!\d+ more)|└\*", body))
    num_counted = sum(int(number) for number in re.findall(r"(\d+) (?:more|behind it)", body))
    assert num_drawn + num_counted == len(PARENTS) - 1
    assert body.count("└+") == 1 and "\x1b" not in body


def test_a_usual_pass_has_the_median_and_is_not_the_last() -> None:
    kept = [[0], [0, 1], [0, 1, 5], [0, 1], [0, 1, 5]]
    passes = [a_pass([-1], [0]), *(a_pass(PARENTS, one, root=index) for index, one in enumerate(kept))]
    shown = usual_pass(passes)
    assert shown is not None and shown.num_kept == 1 and shown.number in (3, 5) and shown.num_passes == 6
    assert shown.own_token == passes[shown.number].tokens[0]
    assert usual_pass([a_pass([-1], [0]), a_pass(PARENTS, [0])]) is None, "no pass but the last has guesses"
