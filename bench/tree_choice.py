"""Two promises about trees, measured: that traces tell what decoding yields, and that the chosen tree is the best one.

model = measurement: a profile from the first half of every held-out file (traces, tree) predicts the tokens per sweep
on text that begins in the second half; Sequoia's product form, from the same profile's acceptance vector, stands beside
it with its own error. What the traces and the vector of the very text that is decoded would have said is printed too:
it leaves out how far one text carries to another. hardware-aware: the tree that `--tree auto` takes, after one tune,
against a grid of measured sizes and depths, on the disk as it is and with the link slowed down to a fifth. Trees take
turns, so that a disk that drifts slows all of them; a tree's tokens per sweep are counted on more tokens than are
streamed while timing.

No figure is printed for tokens that the original model, run resident in float32, would not have drawn.

    offload bench tree-choice              about half an hour on two cores
    offload bench tree-choice --quick      about ten minutes
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from offload.bench import setting as common
from offload.bench.gate import draws_hold
from offload.bench.plain_reader import shards_of
from offload.bench.record import new_result
from offload.bench.train_pair import corpus_files, read_source
from offload.cli.console import candidate_rows
from offload.cli.demo import PAIR, inflated_target
from offload.config import Sampling, parse_size
from offload.engine.decoder import Decoder
from offload.engine.load import load
from offload.engine.request import Request
from offload.errors import UserError
from offload.planning.options import LoadOptions
from offload.planning.profile import Profile
from offload.planning.traces import acceptance, bursts
from offload.planning.tree_policy import TreeChoice, TreeSelector
from offload.tree.spec import TreeSpec
from offload.tree.topology import DynamicShape, Shape, Topology, chain, expected_tokens, isotonic
from offload.tuning.audit import draw_gaps
from offload.tuning.trace_acceptance import dynamic_again, ranks_of, write, written_trace
from offload.tuning.tune import DEPTH, NUM_NEW, NUM_PROMPT, Tuned, cut_windows, tune

Row = dict[str, Any]
Prompts = Sequence[tuple[int, ...]]
Size = tuple[int, int]  # nodes, depth
Cells = dict[Size, Shape]
MODEL_TREES = ((64, 16), (256, 16))
LEAST_RAM_BYTES = 300_000_000  # room for the largest trees of the grid
_AHEAD = 32  # tokens written beyond a window, so that its last sweep counts as a whole


class Effort(NamedTuple):
    """How much is measured."""

    num_tokens: int  # traced, and as many decoded again
    sizes: tuple[int, ...]
    depths: tuple[int, ...]
    rounds: tuple[int, int]  # over the grid: as it is, and slowed down
    num_sweeps: int  # of every tree in every round
    largest: str | None = None  # tree to time; None is what memory has room for


FULL = Effort(8192, (16, 32, 64, 128, 256, 512), (4, 8, 12, 16, 24), (4, 1), 8)
QUICK = Effort(2048, (16, 64, 256), (6, 14), (2, 1), 5)


@cache
def held_out_halves() -> tuple[list[str], list[str]]:
    """The first and the second half of every file on which the pair was not trained."""
    texts = [read_source(path) for path in corpus_files(held_out=True)]
    return [text[: len(text) // 2] for text in texts], [text[len(text) // 2 :] for text in texts]


def tuned_on_first_halves(
    target: Path, sampling: Sampling, num_tokens: int, folder: Path, *, ram: str | int, tree: str | None = None
) -> Tuned:
    """The outcome of `offload tune`; its profile is moved into `folder`, out of the user's cache."""
    texts, _ = held_out_halves()
    paths = [folder / f"{index}.txt" for index in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text or " x", encoding="utf-8")
    options = LoadOptions(tree=tree or "auto", device="cpu", ram=ram)
    tuned = tune(str(target), str(PAIR / "draft"), paths, sampling, options, num_tokens=num_tokens)
    return tuned._replace(path=tuned.path.rename(folder / tuned.path.name))


def tree_for(profile: Profile, size: Size) -> TreeChoice:
    """What `--tree NxD` means with this profile."""
    return TreeSelector(profile.identity.rule, profile).choose(TreeSpec("best", *size))


def other_prompts(decoder: Decoder, num_tokens: int) -> Prompts:
    """Prompts from the second halves, for as many tokens."""
    return cut_windows([decoder.encode(text, raw=True) for text in held_out_halves()[1] if text], num_tokens, False)


def model_is_measurement(temperature: float, effort: Effort) -> Row:
    """Tokens per sweep as predicted from one half of every file, and as measured on the other."""
    sampling = Sampling(temperature=temperature)
    with tempfile.TemporaryDirectory() as name:
        tuned = tuned_on_first_halves(PAIR / "target", sampling, effort.num_tokens, Path(name), ram="2GiB")
        options: dict[str, Any] = {"device": "cpu", "request": Request(sampling=sampling), "profile": tuned.path}
        with load(PAIR / "target", PAIR / "draft", "2GiB", "256x16", context=512, **options) as decoder:
            prompts = other_prompts(decoder, effort.num_tokens)
            same = [
                written_trace(decoder, prompt, replace(sampling, seed=seed), NUM_NEW + _AHEAD, "64x16")
                for seed, prompt in enumerate(prompts)
            ]
            rows = {f"{n}x{d}": _compared(decoder, tuned.profile, (n, d), prompts, same) for n, d in MODEL_TREES}
    return {
        "row": f"model = measurement, T = {temperature:g}: trace-based G / measured tokens per sweep - 1",
        "value": {name: row["traces_error"] for name, row in rows.items()},
        "wanted": "within 0.10",
        "num_tokens": tuned.profile.num_tokens,
        "acceptance": tuned.profile.acceptance[:5],
        **rows,
    }


def _compared(
    decoder: Decoder, profile: Profile, size: tuple[int, int], prompts: Prompts, same: Sequence[Sequence[int]]
) -> Row:
    """One tree: what it yields on the prompts, and what was predicted for it."""
    choice, temperature, measured = tree_for(profile, size), profile.identity.temperature, []
    tree = choice.shape
    assert isinstance(tree, Topology), "a static tree was named"
    settings: dict[str, Any] = {"tree": "{}x{}".format(*size), "max_new_tokens": NUM_NEW + _AHEAD}
    for seed, prompt in enumerate(prompts):
        result = decoder.generate(prompt, temperature=temperature, seed=seed, **settings)
        assert result.tree_choice.shape == tree, "the decoder builds another tree from the profile"
        _prove(prompt, result.token_ids, result.sampling)
        measured.append(_whole([result.stats.num_first_tokens, *result.stats.accepted_per_sweep]))
    got, error = _mean(measured)
    predicted, product = choice.tokens_per_sweep, expected_tokens(tree, isotonic(profile.acceptance))
    same_text, _ = _mean([_whole(bursts(tree, trace)) for trace in same])
    same_product = expected_tokens(tree, isotonic(acceptance(same)[0]))
    return {
        "measured": got,
        "standard_error": error,
        "num_measured_tokens": sum(map(sum, measured)),
        "traces": predicted,
        "traces_error": predicted / got - 1,
        "traces_standard_error": 2**0.5 * error / got,  # of the ratio: the text of the profile is about as long
        "product_form": product,
        "product_form_error": product / got - 1,
        "same_text": {"traces_error": same_text / got - 1, "product_form_error": same_product / got - 1},
    }


def hardware_aware(size: str, effort: Effort) -> list[Row]:
    """Seconds per token of the chosen tree and of a grid, on the disk as it is and at a fifth of its speed."""
    target, sampling = inflated_target(parse_size(size, "--size"), lambda done, total: None), Sampling()
    with tempfile.TemporaryDirectory() as name:
        ram = max(LEAST_RAM_BYTES, parse_size(size, "--size") // 4)
        tuned = tuned_on_first_halves(
            target, sampling, min(2048, effort.num_tokens), Path(name), ram=ram, tree=effort.largest
        )
        fifth = int(tuned.profile.costs.link_bytes_per_s / 5)
        setting = Setting(target, ram, tuned, effort)
        return [_against_grid(setting, limit, effort.rounds[index]) for index, limit in enumerate((None, fifth))]


class Setting(NamedTuple):
    """What both rows of `hardware_aware` share."""

    target: Path
    ram: int
    tuned: Tuned
    effort: Effort


def _against_grid(setting: Setting, limit: int | None, num_rounds: int) -> Row:
    effort = setting.effort
    options = {"device": "cpu", "context": 512, "profile": setting.tuned.path, "link_limit": limit}
    with load(setting.target, PAIR / "draft", setting.ram, **options) as decoder:  # type: ignore[arg-type]
        choice = decoder.run([0], Sampling(), max_new_tokens=1).tree_choice
    best = choice.candidates[0]
    print("\n".join(candidate_rows(choice.candidates)), flush=True)
    chosen = (best.shape.num_nodes, best.shape.depth)
    cells: Cells = {(1, 0): chain(0), chosen: best.shape}
    largest = setting.tuned.profile.costs.compute_s.sizes[-1]
    for n, d in ((n, d) for n in effort.sizes if n <= largest for d in effort.depths):
        fixed = tree_for(setting.tuned.profile, (n, d)).shape
        tree = DynamicShape(n, min(d, n - 1)) if choice.is_dynamic else fixed  # the choice is among trees of one kind
        cells.setdefault((tree.num_nodes, tree.depth), tree)
    with load(setting.target, PAIR / "draft", setting.ram, f"{largest}x{DEPTH}", **options) as decoder:  # type: ignore[arg-type]
        prompts = other_prompts(decoder, effort.num_tokens)
        steps = _step_times(decoder, cells, prompts, num_rounds, effort.num_sweeps)
    yields = _yields(cells, prompts)
    seconds = {shape: median(steps[shape]) / yields[shape] for shape in cells}
    winner = min(seconds, key=lambda shape: seconds[shape])
    link = "as it is" if limit is None else f"at {limit / 1e9:.2f} GB/s"
    return {
        "row": f"hardware-aware, link {link}: s/token of the chosen tree / best of the grid",
        "link": link,
        "value": seconds[chosen] / seconds[winner],
        "wanted": "<= 1.07",
        "chosen": "{}x{}".format(*chosen),
        "best": "{}x{}".format(*winner),
        "predicted": {"tokens_per_sweep": best.tokens_per_sweep, "step_s": best.step_s, "limit": best.limit},
        "measured": {"tokens_per_sweep": yields[chosen], "step_s": median(steps[chosen])},
        "s_per_token": {"{}x{}".format(*shape): seconds[shape] for shape in sorted(cells)},
        "step_s": {"{}x{}".format(*shape): median(steps[shape]) for shape in sorted(cells)},
    }


def _step_times(
    decoder: Decoder, cells: Cells, prompts: Prompts, num_rounds: int, num_sweeps: int
) -> dict[Size, list[float]]:
    """Wall time of steps with every tree, a few at a time and in turn; every token that was written is proved."""
    seconds: dict[Size, list[float]] = {shape: [] for shape in cells}
    for index in range(num_rounds):
        prompt = prompts[index % len(prompts)][:NUM_PROMPT]
        for shape, tree in cells.items():
            sequence = decoder.begin(prompt, Sampling(), shape=tree)
            for step in range(num_sweeps + 2):
                started = time.perf_counter()
                decoder.step(sequence)
                if step > 1:  # the first takes the prompt in, the second finds slots that were filled meanwhile
                    seconds[shape].append(time.perf_counter() - started)
            _prove(prompt, sequence.new_ids, Sampling())
    return seconds


def _yields(cells: Cells, prompts: Prompts) -> dict[Size, float]:
    """Tokens per sweep of every tree on the text that the target writes behind the prompts."""
    largest, sampling = f"{max(tree.num_nodes for tree in cells.values())}x{DEPTH}", Sampling()
    how: dict[str, Any] = {"device": "cpu", "context": 512, "profile": "none"}
    with load(PAIR / "target", PAIR / "draft", "2GiB", largest, **how) as decoder:
        texts = [(prompt, write(decoder, prompt, sampling, NUM_NEW + _AHEAD, largest)) for prompt in prompts]
        traces = [ranks_of(decoder, *text, sampling) for text in texts]

        def sweeps(tree: Shape) -> list[list[int]]:
            if isinstance(tree, DynamicShape):
                return [dynamic_again(decoder, *text, sampling, tree) for text in texts]
            return [bursts(tree, trace) for trace in traces]

        return {size: _mean([_whole(one) for one in sweeps(tree)])[0] for size, tree in cells.items()}


def _whole(sweeps: Sequence[int]) -> list[int]:
    """The sweeps that begin within the first `NUM_NEW` tokens: each counts as a whole, which biases nothing (Wald)."""
    return [count for count, end in zip(sweeps, accumulate(sweeps), strict=True) if end - count < NUM_NEW]


def _mean(sweeps: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Tokens per sweep over all windows, and its standard error from the spread between windows."""
    tokens_W, sweeps_W = np.array([sum(s) for s in sweeps]), np.array([len(s) for s in sweeps])
    mean = tokens_W.sum() / sweeps_W.sum()
    return float(mean), float(np.sqrt(((tokens_W - mean * sweeps_W) ** 2).sum()) / sweeps_W.sum())


def _prove(prompt_ids: Sequence[int], new_ids: Sequence[int], sampling: Sampling) -> None:
    """The gate: a token that misses the original model's float32 draw by more than rounding ends the bench."""
    draws_hold(draw_gaps(PAIR / "target", prompt_ids, new_ids, sampling), sampling)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="about ten minutes on two cores, larger errors")] = False,
    size: common.Size = "1GB",
    row: Annotated[list[str] | None, typer.Option(metavar="ROW", help="model or hardware; default: both")] = None,
    json_file: common.Json = None,
) -> None:
    """Do traces tell what decoding yields, and is the chosen tree the best one?"""
    effort, results, ceiling = QUICK if quick else FULL, list[Row](), {}
    rows: dict[str, Callable[[], list[Row]]] = {
        "model": lambda: [model_is_measurement(temperature, effort) for temperature in (0.0, 0.6)],
        "hardware": lambda: hardware_aware(size, effort),
    }
    if unknown := [name for name in row or () if name not in rows]:
        raise UserError(f"--row must be one of {', '.join(rows)}, got {unknown[0]!r}: leave it out for both")
    if "hardware" in (row or rows):
        target = inflated_target(parse_size(size, "--size"), lambda done, total: None)
        ceiling["bytes_per_s"] = common.say_link(shards_of(target))
    for name in row or rows:
        for result in rows[name]():
            results.append(result)
            print(*(f"{key}: {value}" for key, value in result.items()), sep="\n   ", end="\n\n", flush=True)
    settings = {"quick": quick, "size": size, "rows": list(row or rows)}
    result = new_result("tree-choice", settings=settings, ceiling=ceiling, rows=results, guards={})
    common.finish(result, json_file, None)


if __name__ == "__main__":
    from offload.bench.suite import run_alone

    run_alone("tree-choice")
