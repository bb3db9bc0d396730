"""Which kernels a run takes: those that agree with what runs without them and are faster, by a clock of the test's."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from shell import shell
from test_device_path import BUDGETS, TIERS, base, device, pair_of, place_layers  # noqa: F401
from test_families import config_of, tiny_model
from test_tiny import prompts
from tiny import FAMILIES, save

import offload
from offload.bench.gpu import kernels as bench
from offload.calibration import device_link, startup
from offload.calibration import kernel_selection as comparisons
from offload.calibration.kernel_comparison import Comparison, Outcome, Timer, fight, rows_of, verdicts
from offload.calibration.kernel_selection import KernelChoice, Shapes, choose_kernels, device_timer, shapes_of
from offload.checkpoint.safetensors import open_checkpoint
from offload.cli.console import kernel_line
from offload.config import Sampling
from offload.drafting.model import ModelDrafter
from offload.engine import load as loading
from offload.engine.build import resident_model
from offload.kernels.jit import HAS_TRITON, is_for_kernels
from offload.kernels.kv_commit import kv_commit_reference
from offload.kernels.registry import KERNELS, REFERENCES
from offload.kernels.tree_attention import MAX_WIDTH, tree_attention_reference
from offload.memory.planner import plan_memory
from offload.model.attention import is_for_rows
from offload.model.kv_cache import KVCache
from offload.model.weights import StreamedModel
from offload.planning.cost_model import Curve, Traffic
from offload.planning.tree_policy import Trees
from offload.sampling.sampler import Sampler
from offload.tree.spec import parse_tree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []  # on a GPU they are tests of the GPU
SMALL = Shapes(
    num_heads=4,
    num_groups=2,
    width=16,
    num_layers=2,
    num_slots=100,
    num_nodes=(1, 5),
    num_scored=(5,),
    num_prefix=(8,),
    vocab_sizes=(300,),
    windows=(None, 3),
    dtype=torch.float16,
    caches=((16, torch.float16), (24, torch.float32)),
)


@pytest.fixture(autouse=True)
def few_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter code is not compiled, so lengths differ in nothing but the time they take."""
    monkeypatch.setattr(comparisons, "_PATHS", (2, 16))


def clock(*seconds: float) -> Timer:
    """Times of work in turn, over and over; nothing is run."""
    turn: Iterator[float] = iter(seconds * 1000)
    return lambda work: next(turn)


def comparison(agrees: Callable[[], bool] = lambda: True, kernel: str = "thing") -> Comparison:
    return Comparison(kernel, "N 1", lambda: None, lambda: None, agrees)


def refuses() -> bool:
    raise RuntimeError("out of shared memory\nand more")


def test_a_faster_kernel_wins_and_a_slower_one_loses() -> None:
    fast, slow = fight(comparison(), clock(1.0, 2.0)), fight(comparison(), clock(2.0, 1.0))
    assert (fast.kernel_s, fast.rival_s, fast.ratio, slow.ratio) == (1.0, 2.0, 2.0, 0.5)
    assert verdicts([fast])["thing"].beats_rival and not verdicts([slow])["thing"].beats_rival
    assert verdicts([fast, slow])["thing"] == (1.0, 0.5, False), "no faster on the whole"


def test_a_kernel_wins_by_a_clear_margin_or_not_at_all() -> None:
    """Runs that take other kernels round differently, so chance in a timing must not choose."""
    barely, clearly = fight(comparison(), clock(1.0, 1.09)), fight(comparison(), clock(1.0, 1.12))
    assert not verdicts([barely])["thing"].beats_rival and verdicts([clearly])["thing"].beats_rival


def test_no_time_is_told_of_a_wrong_kernel_or_one_that_does_not_run() -> None:
    right, wrong = fight(comparison(), clock(1.0, 9.0)), fight(comparison(lambda: False), clock(1.0, 9.0))
    broken = fight(comparison(refuses), clock(1.0, 9.0))
    assert wrong == Outcome("thing", "N 1", None, None, "its results differ")
    assert broken.reason == "RuntimeError: out of shared memory" and broken.kernel_s is None
    for bad in (wrong, broken):
        assert verdicts([right, bad])["thing"] == (0.0, 0.0, False), "wrong once is wrong"


def test_a_kernel_that_breaks_the_device_is_named() -> None:
    """What fails afterwards would otherwise be blamed for it."""

    def settle() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match=r"thing at N 1 has left the device unusable \(RuntimeError: out of shared"):
        fight(comparison(refuses), clock(1.0), settle)
    assert fight(comparison(), clock(1.0, 2.0), settle).ratio == 2, "nobody waits where nothing failed"


def test_what_was_chosen_is_told_with_both_times() -> None:
    outcomes = [
        fight(comparison(kernel="quick"), clock(1e-3, 2e-3)),
        fight(comparison(kernel="late"), clock(2e-3, 1e-3)),
        fight(comparison(refuses, kernel="broken"), clock(1.0)),
    ]
    line = kernel_line(outcomes)
    used, left_out = line.split("; left out: ")
    assert used.endswith("quick 1.000 : 2.000")
    assert left_out == "late 2.000 : 1.000, broken (RuntimeError: out of shared memory)"
    rows = json.loads(json.dumps(rows_of(outcomes)))
    assert [(row["kernel"], row["is_used"], row["ratio"]) for row in rows] == [
        ("quick", True, 2.0),
        ("late", False, 0.5),
        ("broken", False, 0.0),
    ]


class ClockDevice(FakeDevice):
    """Work on it moves its clock; writing its scratch memory takes a while, too, and is no part of any work."""

    now_s, num_fills = 0.0, 0

    def fill(self, tensor: Any, value: int, stream: Any) -> None:
        self.now_s, self.num_fills = self.now_s + 100.0, self.num_fills + 1

    def record(self, stream: Any, *, is_timed: bool = False) -> Any:
        assert is_timed and stream is self.compute, "times are those of the compute stream"
        return self.now_s

    def synchronize(self, event: Any) -> None:
        self.num_host_waits += 1

    def elapsed_s(self, before: float, after: float) -> float:
        return after - before


def test_a_timer_leaves_out_the_first_run_and_takes_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparisons, "_CACHE_BYTES", 1)
    card, taken = ClockDevice(), iter([50.0, 3.0, 1.0, 9.0, 2.0, 3.0, 8.0, 1.0])

    def work() -> None:
        card.now_s += next(taken)

    assert device_timer(card)(work) == pytest.approx(3.0)
    assert next(taken, None) is None and card.num_fills == card.num_host_waits == 7


@needs_triton
def test_kernels_are_compared_with_what_runs_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, in Triton's interpreter where there is no GPU; each side runs when it is timed."""
    monkeypatch.setattr(FakeDevice, "place", torch.device(DEVICE))
    ran: list[Any] = []

    def timer(work: Callable[[], Any]) -> float:
        ran.append(work())
        return 1.0 if len(ran) % 2 else 2.0

    chosen, outcomes = choose_kernels(SMALL, FakeDevice(), timer)
    assert chosen == KERNELS and not any(outcome.reason for outcome in outcomes), outcomes
    assert {outcome.kernel for outcome in outcomes} == set(KERNELS._fields)
    stems = {path.stem for path in (ROOT / "kernels").glob("*_*.py")}
    of_weights = {
        stem for stem in stems if stem.startswith(("expand_", "encode_", "int4_", "exponents_"))
    }  # chosen elsewhere
    assert set(KERNELS._fields) == stems - of_weights
    assert len(ran) == 2 * len(outcomes) and any("window 3" in outcome.shape for outcome in outcomes)
    slow, _ = choose_kernels(SMALL, FakeDevice(), clock(2.0, 1.0))
    assert slow == REFERENCES


@needs_triton
@pytest.mark.parametrize("name", KERNELS._fields)
def test_a_kernel_that_computes_something_else_is_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDevice, "place", torch.device(DEVICE))

    def wrong(*args: Any, **options: Any) -> Any:
        if name == "kv_commit":
            return getattr(KERNELS, name)(args[0], args[1] + 1, args[2])
        out = getattr(KERNELS, name)(*args, **options)
        return out.roll(1, 0 if out.shape[0] > 1 else -1)

    monkeypatch.setattr(comparisons, "KERNELS", KERNELS._replace(**{name: wrong}))
    chosen, outcomes = choose_kernels(SMALL, FakeDevice(), clock(1.0, 2.0))
    assert chosen == KERNELS._replace(**{name: getattr(REFERENCES, name)})
    assert {one.kernel for one in outcomes if one.reason} == {name}


def test_comparisons_leave_the_callers_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    for one in comparisons.comparisons(SMALL, "cpu"):
        one.rival()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("family", ["qwen3-sliding", "gemma2", "wide"])
def test_sizes_are_those_of_the_run(family: str, tmp_path: Path) -> None:
    config = FAMILIES["qwen3" if family == "wide" else family]()
    config.head_dim = MAX_WIDTH + 8 if family == "wide" else 16
    checkpoint = open_checkpoint(save(tiny_model(config), tmp_path / "target"))
    model = resident_model(checkpoint, "float32")
    narrow = StreamedModel(open_checkpoint(save(tiny_model(FAMILIES["llama"]()), tmp_path / "draft")), "bfloat16")
    for num_nodes in (40, 100, 1):
        plan = plan_memory(
            (checkpoint, None), num_nodes=num_nodes, dtype="float32", ram="4GiB", gpu="4GiB", context=200
        )
        shapes = shapes_of(model, plan, Sampling(temperature=0.4))
        assert (shapes.num_heads, shapes.num_groups, shapes.width, shapes.num_layers) == (4, 2, config.head_dim, 4)
        sizes = {40: (40,), 100: (64, 100), 1: (64, plan.max_prompt_rows)}
        assert shapes.num_nodes == sizes[num_nodes], "smaller trees and prompts are attended to as well"
        assert (shapes.num_prefix, shapes.temperatures, shapes.dtype) == ((100,), (0.4,), torch.float32)
        assert shapes.vocab_sizes == (model.vocab_size,) and shapes.num_scored == (plan.num_logits_rows,)
        draft = shapes_of(model, plan, Sampling(), narrow)
        assert shapes.caches == ((config.head_dim, torch.float32),)
        assert draft.caches == (*shapes.caches, (16, torch.bfloat16)), (
            "paths are committed in the draft's cache as well"
        )
        windows = {None, 24} if family == "qwen3-sliding" else set()
        assert set(shapes.windows) == windows, "a family that keeps its masks has no kernel to compare"
        fields = {one.kernel for one in comparisons.comparisons(shapes._replace(num_slots=60), "cpu")}
        assert ("tree_attention" in fields) == bool(windows)


def test_attention_of_two_widths_is_not_compared(tmp_path: Path) -> None:
    """A comparison has queries, keys and values of one width; whether the kernel wins at another nobody has seen."""
    checkpoint = open_checkpoint(save(tiny_model(config_of("deepseek_v3")), tmp_path))
    model = resident_model(checkpoint, "float32")
    plan = plan_memory((checkpoint, None), num_nodes=40, dtype="float32", ram="4GiB", gpu="4GiB", context=200)
    assert is_for_rows(model.meta_model.config) and shapes_of(model, plan, Sampling()).windows == ()


@needs_triton
@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter stands in for a card")
def test_a_run_reports_its_kernels_and_writes_the_same_tokens(
    device: FakeDevice, base: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """The kernels themselves decode, in the interpreter, or what they lose against; nobody could tell from the text."""
    target, draft, wanted = pair_of("llama", base)
    place_layers(monkeypatch, *TIERS["host"])
    monkeypatch.setattr(loading, "is_for_kernels", lambda place: True)
    for times, is_used in (((1e-4, 2e-4), True), ((2e-4, 1e-4), False)):
        monkeypatch.setattr(loading, "choose_kernels", lambda *what, times=times: choose_kernels(*what, clock(*times)))
        with offload.load(target, draft, context=128, tree="6x2", threads=1, **BUDGETS) as decoder:
            result = decoder.generate(prompts()[1], max_new_tokens=6)
            assert result.token_ids == wanted[:6]
            wanted_set = KERNELS if is_used else REFERENCES
            text = decoder.begin([5], Sampling())
            assert text.sampler.kernels == wanted_set
            assert {cache._gather for cache in text.caches} == {wanted_set.kv_commit}
            assert decoder.target._model._attend is wanted_set.tree_attention
        rows = result.as_dict()["kernels"]
        assert {row["kernel"] for row in rows} == set(KERNELS._fields)
        assert all(row["is_used"] == is_used and row["kernel_s"] == times[0] for row in rows)


def test_an_automatic_tree_goes_by_the_times_of_the_kernels_that_run(
    device: FakeDevice, base: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """They fight first, at the size of the largest tree that there is room for."""
    target, draft, wanted = pair_of("llama", base)
    place_layers(monkeypatch, *TIERS["host"])
    chosen = REFERENCES._replace(
        tree_attention=partial(tree_attention_reference), kv_commit=partial(kv_commit_reference)
    )
    order: list[str] = []

    def choose(shapes: Shapes, card: FakeDevice) -> KernelChoice:
        order.append(f"duels at {shapes.num_nodes}")
        return KernelChoice(chosen, ())

    def sweep_curve(model: StreamedModel, slab: Any, sizes: Any) -> Curve:
        order.append("sweeps with these" if model._attend is chosen.tree_attention else "sweeps with others")
        return Curve((1, 64), (1e-3, 2e-3))

    def draft_curve(drafter: ModelDrafter, sampler: Sampler, prompt: Any, cache: KVCache) -> Curve:
        is_chosen = cache._gather is chosen.kv_commit and sampler.kernels == chosen
        order.append("drafts with these" if is_chosen else "drafts with others")
        return Curve((1, 64), (1e-4, 2e-4))

    monkeypatch.setattr(loading, "is_for_kernels", lambda place: True)
    monkeypatch.setattr(loading, "choose_kernels", choose)
    monkeypatch.setattr(device_link, "_COPY_BYTES", 1 << 16)
    for one in (sweep_curve, draft_curve):
        monkeypatch.setattr(startup, one.__name__, one)
    with offload.load(target, draft, context=128, tree="auto", threads=1, profile="none", **BUDGETS) as decoder:
        assert decoder.generate(prompts()[1], max_new_tokens=6).token_ids == wanted[:6]
        assert decoder.target._model._attend is chosen.tree_attention
    assert order == ["duels at (64, 1024)", "sweeps with these", "drafts with these"]


def test_a_tree_that_is_to_be_chosen_has_as_many_nodes_as_there_is_room_for() -> None:
    def trees(wish: str, most: int) -> Trees:
        traffic_of = lambda num_nodes: Traffic(1, 1) if num_nodes <= most else None  # noqa: E731
        return Trees(parse_tree(wish), lambda *_: (None, ""), traffic_of)

    assert [trees("auto", most).most_nodes for most in (5000, 512, 200, 1)] == [2048, 512, 192, 1]
    assert [trees(wish, 5000).most_nodes for wish in ("none", "24x6", "dynamic:700x9")] == [1, 24, 700]


def test_without_a_card_nothing_is_compared(tmp_path: Path) -> None:
    target = save(tiny_model(config_of("llama")), tmp_path)
    assert not is_for_kernels("cpu")
    with offload.load(target, ram="1GiB", context=64, threads=1) as decoder:
        assert decoder.comparisons == () and "kernels" not in decoder.generate([5], max_new_tokens=1).as_dict()
        assert decoder.begin([5], Sampling()).sampler.kernels == REFERENCES


def test_the_bench_shows_both_times_or_why_there_are_none() -> None:
    outcomes = fight(comparison(), clock(1.0, 2.0)), fight(comparison(refuses, "broken"), clock(1.0))
    assert [bench.cells(one) for one in outcomes] == [
        ["thing", "N 1", "1000.0000", "2000.0000", "2.00"],
        ["broken", "N 1", "RuntimeError: out of shared memory", "", ""],
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures for minutes")
def test_the_bench_says_what_it_lacks() -> None:
    outcome = shell("bench", "kernels")
    assert outcome.code == 2 and not outcome.out
    assert outcome.err.count("\n") == 1 and "needs a CUDA device" in outcome.err
