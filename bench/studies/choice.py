"""Is the chosen tree the best one? `--tree auto`, after one tune, against sizes and depths.

Measured on the disk as it is, and with the link slowed down to a fifth (Sequoia, 2402.12374: figure
5c and table 3). Trees take turns; a tree's tokens per pass are counted on more tokens than are
streamed while timing. Prompts are the second halves of files that the pair was not trained on, of
whose first halves the profile is made. All tokens are proved.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from offload.bench.harness.command import Bench, command, say_link, say_table
from offload.bench.harness.prompts import held_out_files, read_source
from offload.bench.harness.record import Guard, Row
from offload.bench.harness.setting import Setting, find_setting, resident_pair
from offload.bench.harness.steps import step_times
from offload.planning.acceptance import bursts
from offload.planning.load_options import LoadOptions
from offload.planning.selector import TreeChoice, TreeSelector
from offload.reports.trace_acceptance import dynamic_again, ranks_of, write
from offload.reports.tune import DEPTH, TuneResult, tune
from offload.reports.windows import NUM_NEW, NUM_PROMPT, cut_windows
from offload.sampling_options import Sampling
from offload.trees.spec import TreeSpec
from offload.trees.topology import DynamicShape, Shape, chain
from offload.units import parse_size

LEAST_RAM_BYTES = 300_000_000  # room for the largest trees of the grid
# the most that seconds per token of the chosen tree / of the best should be
WANTED = 1.07
_AHEAD = 32  # tokens written beyond a window, so that its last sweep counts as a whole
Size = tuple[int, int]  # nodes, depth


class Effort(NamedTuple):
    """How much is measured."""

    num_tokens: int  # traced, and as many decoded again
    sizes: tuple[int, ...]
    depths: tuple[int, ...]
    rounds: tuple[int, int]  # over the grid: as it is, and slowed down
    # passes of every tree in every round
    num_sweeps: int
    largest: str | None = None  # tree to time; None is what memory has room for


FULL = Effort(2048, (16, 32, 64, 128, 256, 512), (4, 8, 12, 16, 24), (4, 1), 8)
QUICK = Effort(1024, (16, 64, 256), (6, 14), (1, 1), 3)


@contextmanager
def tuned_on_first_halves(setting: Setting, effort: Effort) -> Iterator[TuneResult]:
    """Return the outcome of `offload tune`, with its profile in a folder of its own."""
    with tempfile.TemporaryDirectory() as name:
        paths = [Path(name) / f"{path.parent.name}-{path.name}" for path in held_out_files()]
        for path, (first, _) in zip(paths, _halves(), strict=True):
            path.write_text(first or " x", encoding="utf-8")
        options = LoadOptions(tree=effort.largest or "auto", device="cpu", ram=setting.ram_bytes)
        models = str(setting.target), str(setting.draft)
        tuned = tune(*models, paths, Sampling(), options, num_tokens=effort.num_tokens)
        yield tuned._replace(path=tuned.path.rename(Path(name) / tuned.path.name))


def tree_for(tuned: TuneResult, size: Size) -> TreeChoice:
    """Return what `--tree NxD` means with this profile."""
    selector = TreeSelector(TreeSpec("best", *size), lambda *_: (tuned.profile, ""))
    return selector.for_run(Sampling(), tuned.profile.identity.rule)


def _halves() -> list[tuple[str, str]]:
    texts = [read_source(path) for path in held_out_files()]
    return [(text[: len(text) // 2], text[len(text) // 2 :]) for text in texts]


def against_grid(
    setting: Setting, tuned: TuneResult, effort: Effort, limit: int | None, num_rounds: int
) -> list[Row]:
    """Return seconds per token of every tree, with that link; the chosen one first."""
    options: dict[str, Any] = {"context": 512, "profile": tuned.path, "link_limit": limit}
    with setting.open("auto", **options) as decoder:
        choice = decoder.tree_choice(Sampling())
    grid = _grid(tuned, effort, choice)
    written = []
    steps: dict[Size, list[float]] = {size: [] for size in grid}
    largest = max(tree.num_nodes for tree in grid.values())
    with setting.open(f"{largest}x{DEPTH}", **options) as decoder:
        texts = [decoder.encode(text, raw=True) for _, text in _halves() if text]
        prompts = cut_windows(texts, effort.num_tokens, False)
        for index in range(num_rounds):
            for size, tree in grid.items():
                prompt = prompts[index % len(prompts)][:NUM_PROMPT]
                seconds, done = step_times(decoder, prompt, tree, effort.num_sweeps)
                steps[size] += seconds
                written.append(done)
    setting.prove(written)
    yields = _yields(grid, prompts)
    link = "as it is" if limit is None else f"at {limit / 1e9:.2f} GB/s"
    s_per_token = {size: median(steps[size]) / yields[size] for size in grid}
    return [_row(link, size, s_per_token, yields[size]) for size in grid]


def _row(link: str, size: Size, s_per_token: dict[Size, float], tokens_per_sweep: float) -> Row:
    chosen = next(iter(s_per_token))
    row = {
        "link": link,
        "tree": "{}x{}".format(*size),
        "s_per_token": s_per_token[size],
        "is_chosen": size == chosen,
    }
    return {
        **row,
        "tokens_per_sweep": tokens_per_sweep,
        "over_chosen": s_per_token[size] / s_per_token[chosen],
    }


def _grid(tuned: TuneResult, effort: Effort, choice: TreeChoice) -> dict[Size, Shape]:
    """Return the tree that was chosen, none, and others of its kind."""
    grid: dict[Size, Shape] = {
        (choice.shape.num_nodes, choice.shape.depth): choice.shape,
        (1, 0): chain(0),
    }
    for n, d in (
        (n, d)
        for n in effort.sizes
        if n <= tuned.profile.costs.compute_s.sizes[-1]
        for d in effort.depths
    ):
        tree = (
            DynamicShape(n, min(d, n - 1)) if choice.is_dynamic else tree_for(tuned, (n, d)).shape
        )
        grid.setdefault((tree.num_nodes, tree.depth), tree)
    return grid


def _yields(grid: dict[Size, Shape], prompts: Sequence[tuple[int, ...]]) -> dict[Size, float]:
    """Return tokens per pass of every tree on the text that the target writes."""
    largest = f"{max(tree.num_nodes for tree in grid.values())}x{DEPTH}"
    sampling = Sampling()
    with resident_pair(None).open(largest, context=512) as decoder:
        texts = [
            (prompt, write(decoder, prompt, sampling, NUM_NEW + _AHEAD, largest))
            for prompt in prompts
        ]
        traces = [ranks_of(decoder, *text, sampling) for text in texts]

        def sweeps(tree: Shape) -> list[list[int]]:
            if isinstance(tree, DynamicShape):
                return [dynamic_again(decoder, *text, sampling, tree) for text in texts]
            return [bursts(tree, trace) for trace in traces]

        return {
            size: mean(count for one in sweeps(tree) for count in _whole(one))
            for size, tree in grid.items()
        }


def _whole(sweeps: Sequence[int]) -> list[int]:
    """Return the passes that begin within the first `NUM_NEW` tokens.

    Each counts as a whole, which biases nothing (Wald).
    """
    return [
        count
        for count, end in zip(sweeps, accumulate(sweeps), strict=True)
        if end - count < NUM_NEW
    ]


@command("choice", "size quick compare")
def main(bench: Bench) -> None:
    """Is the tree of `--tree auto` the best one? Half an hour on two cores, six minutes with
    --quick.
    """
    size = bench.given("size")
    effort = QUICK if bench.quick else FULL
    ram = max(LEAST_RAM_BYTES, parse_size(size, "--size") // 4)
    setting = find_setting(None, None, size, str(ram), bench.screen)
    bench.check_same(setting)
    ceiling = say_link(setting)
    rows = list[Row]()
    guards = dict[str, Guard]()
    with tuned_on_first_halves(setting, effort) as tuned:
        fifth = int(tuned.profile.costs.link_bytes_per_s / 5)
        for limit, num_rounds in zip((None, fifth), effort.rounds, strict=True):
            found = against_grid(setting, tuned, effort, limit, num_rounds)
            best = min(row["over_chosen"] for row in found)
            print(
                f"link {found[0]['link']}: chosen / best {1 / best:.3f}, wanted <= {WANTED}",
                flush=True,
            )
            guards[f"chosen / best, link {len(guards)}"] = Guard([1 / best], "lower")
            rows += map(bench.row, found)
    figures = ("s_per_token", "tokens_per_sweep", "over_chosen")
    cells = (
        [f"{row['link']}, {row['tree']}", *(f"{row[name]:.4f}" for name in figures)] for row in rows
    )
    say_table(["link, tree", "s/token", "tokens/sweep", "against the chosen"], cells)
    bench.finish(rows, settings=setting.as_dict(), ceiling={"bytes_per_s": ceiling}, guards=guards)
