"""Two promises about trees: that traces tell what decoding yields, and that the chosen tree is the best one.

`traces`: a profile from the first half of every held-out file predicts the tokens per sweep on text that begins in the
second half; Sequoia's product form, from the same profile, stands beside it. `choice`: the tree that `--tree auto`
takes, after one tune, against a grid of sizes and depths, on the disk as it is and with the link slowed down to a fifth
(Sequoia, figure 5c and table 3). Trees take turns; a tree's tokens per sweep are counted on more tokens than are
streamed while timing. Every token that is written is proved.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from offload.bench.harness.gate import Written
from offload.bench.harness.picture import line
from offload.bench.harness.setting import Setting, find_setting, resident_pair
from offload.bench.harness.steps import step_times
from offload.bench.studies.pair_text import FULL, QUICK, Figures, Pair, Scale
from offload.bench.train_pair import corpus_files, read_source
from offload.cli.console import Console
from offload.config import Sampling, parse_size
from offload.engine.decoder import Decoder
from offload.engine.request import Request
from offload.planning.options import LoadOptions
from offload.planning.profile import Profile
from offload.planning.traces import bursts
from offload.planning.tree_policy import TreeChoice, TreeSelector
from offload.tree.spec import TreeSpec
from offload.tree.topology import DynamicShape, Shape, Topology, chain, expected_tokens, isotonic
from offload.tuning.trace_acceptance import dynamic_again, ranks_of, write
from offload.tuning.tune import DEPTH, NUM_NEW, NUM_PROMPT, Tuned, cut_windows, tune

MODEL_TREES = ((64, 16), (256, 16))
LEAST_RAM_BYTES = 300_000_000  # room for the largest trees of the grid
_AHEAD = 32  # tokens written beyond a window, so that its last sweep counts as a whole
Prompts = Sequence[tuple[int, ...]]
Size = tuple[int, int]  # nodes, depth


class Effort(NamedTuple):
    """How much is measured."""

    size: str  # of the target
    num_tokens: int  # traced, and as many decoded again
    sizes: tuple[int, ...]
    depths: tuple[int, ...]
    rounds: tuple[int, int]  # over the grid: as it is, and slowed down
    num_sweeps: int  # of every tree in every round
    largest: str | None = None  # tree to time; None is what memory has room for


EFFORTS = {
    FULL: Effort("1GB", 8192, (16, 32, 64, 128, 256, 512), (4, 8, 12, 16, 24), (4, 1), 8),
    QUICK: Effort("1GB", 1024, (16, 64, 256), (6, 14), (1, 1), 3),
}
TINY_EFFORT = Effort("60MB", 32, (8, 16), (3,), (1, 1), 1, "16x4")


@contextmanager
def tuned_on_first_halves(setting: Setting, sampling: Sampling, num_tokens: int, tree: str | None) -> Iterator[Tuned]:
    """The outcome of `offload tune`; its profile lies in a folder of its own, out of the user's cache."""
    with tempfile.TemporaryDirectory() as name:
        paths = [Path(name) / f"{path.parent.name}-{path.name}" for path in corpus_files(held_out=True)]
        for path, (first, _) in zip(paths, _halves(), strict=True):
            path.write_text(first or " x", encoding="utf-8")
        options = LoadOptions(tree=tree or "auto", device="cpu", ram=setting.ram_bytes)
        tuned = tune(str(setting.target), str(setting.draft), paths, sampling, options, num_tokens=num_tokens)
        yield tuned._replace(path=tuned.path.rename(Path(name) / tuned.path.name))


def tree_for(profile: Profile, size: Size) -> TreeChoice:
    """What `--tree NxD` means with this profile."""
    return TreeSelector(profile.identity.rule, profile).choose(TreeSpec("best", *size))


def _halves() -> list[tuple[str, str]]:
    texts = [read_source(path) for path in corpus_files(held_out=True)]
    return [(text[: len(text) // 2], text[len(text) // 2 :]) for text in texts]


def _other_prompts(decoder: Decoder, num_tokens: int) -> Prompts:
    return cut_windows([decoder.encode(text, raw=True) for _, text in _halves() if text], num_tokens, False)


def measure_traces(pair: Pair, scale: Scale) -> Figures:
    """Tokens per sweep as predicted from one half of every file, and as measured on the other; wanted within 10 %."""
    effort, setting, rows = EFFORTS.get(scale, TINY_EFFORT), resident_pair(None), []
    for temperature in (0.0, 0.6) if scale in EFFORTS else (0.0,):
        sampling = Sampling(temperature=temperature)
        with tuned_on_first_halves(setting, sampling, effort.num_tokens, effort.largest) as tuned:
            how: dict[str, Any] = {"context": 512, "request": Request(sampling=sampling), "profile": tuned.path}
            with setting.open("256x16", **how) as decoder:
                prompts = _other_prompts(decoder, effort.num_tokens)
                rows += [_compared(setting, decoder, tuned, size, prompts) for size in MODEL_TREES]
    table = [["T", "tree", "measured", "+-", "traces", "error", "product form", "error"]]
    for row in rows:
        figures = [f"{row[name]:.2f}" for name in ("measured", "standard_error", "traces")]
        errors = [f"{row['traces_error']:+.1%}", f"{row['product_form']:.2f}", f"{row['product_form_error']:+.1%}"]
        table.append([f"{row['temperature']}", row["tree"], *figures, *errors])
    return {"rows": rows, "wanted": "traces within 0.10", "table": table}


def _compared(setting: Setting, decoder: Decoder, tuned: Tuned, size: Size, prompts: Prompts) -> Figures:
    profile, name, measured, written = tuned.profile, "{}x{}".format(*size), [], []
    choice = tree_for(profile, size)
    assert isinstance(choice.shape, Topology), "a static tree was named"
    for seed, prompt in enumerate(prompts):
        sampling = Sampling(temperature=profile.identity.temperature, seed=seed)
        run = decoder.run(prompt, sampling, max_new_tokens=NUM_NEW + _AHEAD, tree=name)
        list(run)
        result = run.result()
        written.append(Written(list(prompt), result.token_ids, sampling, result.rule))
        measured.append(_whole([result.stats.num_first_tokens, *result.stats.accepted_per_sweep]))
    setting.prove(written)
    got, error = _mean(measured)
    predicted, product = choice.tokens_per_sweep, expected_tokens(choice.shape, isotonic(profile.acceptance))
    figures = {"measured": got, "standard_error": error, "traces": predicted, "traces_error": predicted / got - 1}
    names = {"temperature": profile.identity.temperature, "tree": name, "num_measured_tokens": sum(map(sum, measured))}
    return {**names, **figures, "product_form": product, "product_form_error": product / got - 1}


def measure(pair: Pair, scale: Scale) -> Figures:
    """Seconds per token over a grid of sizes and depths, with the tree that the optimiser takes in its midst."""
    effort, table = EFFORTS.get(scale, TINY_EFFORT), [["link", "tree", "s/token", "against the chosen one"]]
    ram = max(LEAST_RAM_BYTES, parse_size(effort.size, "--size") // 4)
    setting = find_setting(None, None, effort.size, str(ram), Console(is_quiet=True))
    with tuned_on_first_halves(setting, Sampling(), min(2048, effort.num_tokens), effort.largest) as tuned:
        fifth = int(tuned.profile.costs.link_bytes_per_s / 5)
        links = [_against_grid(setting, tuned, effort, *how) for how in zip((None, fifth), effort.rounds, strict=True)]
    for link in links:
        chosen_s, best = link["s_per_token"][link["chosen"]], best_of_size(link)
        table.append([link["link"], f"{link['chosen']}, chosen", f"{chosen_s:.4f}", "1.00"])
        for size, seconds in best.items():
            table.append([link["link"], f"{size}, best depth", f"{seconds:.4f}", f"{seconds / chosen_s:.2f}"])
    return {"links": links, "table": table, "picture": [_panel(link) for link in links]}


def best_of_size(link: Figures) -> dict[int, float]:
    """Seconds per token of every size in the grid, with the depth that suits it best."""
    best: dict[int, float] = {}
    for shape, seconds in link["s_per_token"].items():
        size = int(shape.split("x")[0])
        best[size] = min(seconds, best.get(size, seconds))
    return dict(sorted(best.items()))


def _panel(link: Figures) -> Figures:
    seconds, best = link["s_per_token"], best_of_size(link)
    sizes, one_s = [size for size in best if size > 1], seconds["1x0"]
    chosen = line(f"chosen: {link['chosen']}", [int(link["chosen"].split("x")[0])], [one_s / seconds[link["chosen"]]])
    words = {"title": f"link {link['link']}", "xlabel": "tree size (nodes)", "ylabel": "times the speed without a tree"}
    lines = [line("best depth", sizes, [one_s / best[size] for size in sizes]), chosen]
    return {"lines": lines, "ticks": sizes, "levels": [[1, "no tree"]], **words}


def _against_grid(setting: Setting, tuned: Tuned, effort: Effort, limit: int | None, num_rounds: int) -> Figures:
    options: dict[str, Any] = {"context": 512, "profile": tuned.path, "link_limit": limit}
    with setting.open("auto", **options) as decoder:
        choice = decoder.run([0], Sampling(), max_new_tokens=1).tree_choice
    best = choice.candidates[0]
    chosen, largest = (best.shape.num_nodes, best.shape.depth), tuned.profile.costs.compute_s.sizes[-1]
    grid: dict[Size, Shape] = {(1, 0): chain(0), chosen: best.shape}
    for n, d in ((n, d) for n in effort.sizes if n <= largest for d in effort.depths):
        static = tree_for(tuned.profile, (n, d)).shape
        tree = DynamicShape(n, min(d, n - 1)) if choice.is_dynamic else static  # the choice is among trees of one kind
        grid.setdefault((tree.num_nodes, tree.depth), tree)
    steps: dict[Size, list[float]] = {size: [] for size in grid}
    with setting.open(f"{largest}x{DEPTH}", **options) as decoder:
        prompts, written = _other_prompts(decoder, effort.num_tokens), []
        for index in range(num_rounds):
            for size, tree in grid.items():
                prompt = prompts[index % len(prompts)][:NUM_PROMPT]
                seconds, done = step_times(decoder, prompt, tree, effort.num_sweeps)
                steps[size] += seconds
                written.append(done)
    setting.prove(written)
    yields = _yields(grid, prompts)
    step_s = {size: median(steps[size]) for size in sorted(grid)}
    s_per_token = {"{}x{}".format(*size): step_s[size] / yields[size] for size in step_s}
    winner, name = min(s_per_token, key=lambda one: s_per_token[one]), "{}x{}".format(*chosen)
    return {
        "link": "as it is" if limit is None else f"at {limit / 1e9:.2f} GB/s",
        "value": s_per_token[name] / s_per_token[winner],
        "wanted": "<= 1.07",
        "chosen": name,
        "best": winner,
        "predicted": {"tokens_per_sweep": best.tokens_per_sweep, "step_s": best.step_s, "limit": best.limit},
        "measured": {"tokens_per_sweep": yields[chosen], "step_s": step_s[chosen]},
        "s_per_token": s_per_token,
        "step_s": {"{}x{}".format(*size): seconds for size, seconds in step_s.items()},
    }


def _yields(grid: dict[Size, Shape], prompts: Prompts) -> dict[Size, float]:
    """Tokens per sweep of every tree on the text that the target writes behind the prompts."""
    largest, sampling = f"{max(tree.num_nodes for tree in grid.values())}x{DEPTH}", Sampling()
    with resident_pair(None).open(largest, context=512) as decoder:
        texts = [(prompt, write(decoder, prompt, sampling, NUM_NEW + _AHEAD, largest)) for prompt in prompts]
        traces = [ranks_of(decoder, *text, sampling) for text in texts]

        def sweeps(tree: Shape) -> list[list[int]]:
            if isinstance(tree, DynamicShape):
                return [dynamic_again(decoder, *text, sampling, tree) for text in texts]
            return [bursts(tree, trace) for trace in traces]

        return {size: _mean([_whole(one) for one in sweeps(tree)])[0] for size, tree in grid.items()}


def _whole(sweeps: Sequence[int]) -> list[int]:
    """The sweeps that begin within the first `NUM_NEW` tokens: each counts as a whole, which biases nothing (Wald)."""
    return [count for count, end in zip(sweeps, accumulate(sweeps), strict=True) if end - count < NUM_NEW]


def _mean(sweeps: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Tokens per sweep over all windows, and its standard error from the spread between windows."""
    tokens_W, sweeps_W = np.array([sum(s) for s in sweeps]), np.array([len(s) for s in sweeps])
    mean = tokens_W.sum() / sweeps_W.sum()
    return float(mean), float(np.sqrt(((tokens_W - mean * sweeps_W) ** 2).sum()) / sweeps_W.sum())
