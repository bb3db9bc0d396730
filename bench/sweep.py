"""Seconds of a sweep against the size of its tree, and what of the link it uses.

Trees of all sizes take turns on one text, round after round, with a plain reader of as many bytes in between: the time
that it takes is the floor under every sweep. A sweep costs the same up to the size at which computing becomes the
slower side; from there it climbs with the slope of computing.
"""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import typer

from offload.bench import setting as common
from offload.bench.gate import Written
from offload.bench.plain_reader import plain_read_s
from offload.bench.prompts import encoded, prompts
from offload.bench.record import Guard, Row, new_result
from offload.bench.setting import PROMPT_TOKENS, Setting
from offload.bench.text_table import aligned
from offload.cli.console import Console
from offload.config import Sampling
from offload.engine.decoder import Decoder
from offload.memory.plan import MemoryPlan
from offload.stats import Stats
from offload.tree.topology import DEFAULT_ACCEPTANCE, Topology, best_first, chain

_DEPTH = 16
_STALLED_SHARE = 0.05  # of a sweep that waits for less than this the link is not the slower side


class Effort(NamedTuple):
    """How much is measured."""

    sizes: tuple[int, ...]
    rounds: int
    steps: int  # of every size in a round


FULL = Effort((1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512), 6, 3)
QUICK = Effort((1, 16, 64, 128, 256), 3, 2)


class Step(NamedTuple):
    """One step with a tree of some size."""

    num_nodes: int
    step_s: float
    stats: Stats


class Measured(NamedTuple):
    """All rounds."""

    steps: list[Step]
    read_s: list[float]  # a plain reader of a sweep's bytes, before every round and after the last
    written: list[Written]
    plan: MemoryPlan
    num_threads: int


def measure(setting: Setting, effort: Effort, screen: Console) -> Measured:
    """Steps of all sizes in turn; without a draft there is one size."""
    sizes = effort.sizes if setting.draft is not None else (1,)
    trees = [chain(0) if size == 1 else best_first(DEFAULT_ACCEPTANCE, size, _DEPTH) for size in sizes]
    texts = prompts(["code"], effort.rounds)
    with setting.open(f"{max(sizes)}x{_DEPTH}" if max(sizes) > 1 else "none", context=1024) as decoder:
        num_bytes = decoder.plan.streamed_bytes
        steps, written, read_s = [], [], [plain_read_s(setting.shards, max(num_bytes, 1))]
        for index in range(effort.rounds):
            ids = encoded(decoder, texts[index % len(texts)], PROMPT_TOKENS)
            done = _round(decoder, ids, trees, effort.steps)
            steps += done[0]
            written.append(Written(ids, done[1], Sampling(), decoder.rule.name))
            read_s.append(plain_read_s(setting.shards, max(num_bytes, 1)))
            screen.count(index + 1, effort.rounds, "timing trees")
        return Measured(steps, read_s, written, decoder.plan, decoder.num_threads)


def _round(
    decoder: Decoder, prompt_ids: list[int], trees: Sequence[Topology], num_steps: int
) -> tuple[list[Step], list[int]]:
    """A few steps with every tree on one text, after one that takes the prompt in and one that finds full slots."""
    sequence, steps = decoder.begin(prompt_ids, Sampling()), []
    for index, tree in enumerate([chain(0), chain(0), *(tree for tree in trees for _ in range(num_steps))]):
        stats, started = sequence.set_shape(tree), time.perf_counter()
        decoder.step(sequence)
        if index > 1:
            steps.append(Step(tree.num_nodes, time.perf_counter() - started, stats))
    return steps, sequence.new_ids


def rows_of(measured: Measured) -> list[Row]:
    """Medians for every size."""
    streamed_bytes, floor_s = measured.plan.streamed_bytes, median(measured.read_s)
    rows = []
    for size in sorted({step.num_nodes for step in measured.steps}):
        of_size = [step for step in measured.steps if step.num_nodes == size]
        step_s, sweep_s = median(s.step_s for s in of_size), median(s.stats.sweep_s for s in of_size)
        stall_s = median(s.stats.stall_s for s in of_size)
        rows.append(
            {
                "num_nodes": size,
                "step_s": step_s,
                "sweep_s": sweep_s,
                "stall_s": stall_s,
                "compute_s": sweep_s - stall_s,
                "draft_s": median(s.stats.draft_s for s in of_size),
                "verify_s": median(s.stats.verify_s for s in of_size),
                "link_utilisation": floor_s / step_s if streamed_bytes else None,
                "limit": "link" if streamed_bytes and stall_s > _STALLED_SHARE * sweep_s else "compute",
                "step_s_samples": [s.step_s for s in of_size],
            }
        )
    return rows


def _cells(row: Row) -> list[str]:
    seconds = [f"{row[name]:.3f}" for name in ("step_s", "sweep_s", "stall_s", "compute_s", "draft_s")]
    used = "-" if row["link_utilisation"] is None else f"{row['link_utilisation']:.3f}"
    return [str(row["num_nodes"]), *seconds, used, row["limit"]]


app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(
    epilog="Examples:\n\n    offload bench sweep --quick\n\n    offload bench sweep --size 8GB --json sweep.json"
)
def main(
    model: common.Model = None,
    draft: common.Draft = None,
    size: common.Size = "2GB",
    ram: common.Ram = None,
    quick: common.Quick = False,
    json_file: common.Json = None,
    compare: common.Compare = None,
) -> None:
    """How long does a sweep take for trees of many sizes, and is the link busy?"""
    effort, old = QUICK if quick else FULL, common.earlier("sweep", compare)
    with Console(is_quiet=False) as screen:
        setting = common.find_setting(model, draft, size, ram, screen)
        common.check_same(old, setting)
        common.say_link(setting.shards)
        measured = measure(setting, effort, screen)
    proof, rows = setting.prove(measured.written), rows_of(measured)
    head = ["nodes", "step s", "sweep s", "stall s", "compute s", "draft s", "link used", "slower side"]
    print(aligned([head, *map(_cells, rows)]))
    floor_s, num_bytes = median(measured.read_s), measured.plan.streamed_bytes
    print(f"a plain reader takes {floor_s:.3f} s for the {num_bytes / 1e9:.3f} GB of a sweep")
    print(common.proof_line(proof))
    result = new_result(
        "sweep",
        settings={**setting.as_dict(), **effort._asdict(), "quick": quick, "num_threads": measured.num_threads},
        ceiling={"bytes_per_s": num_bytes / floor_s, "sweep_s": floor_s, "samples": measured.read_s},
        rows=rows,
        guards=_guards(rows, floor_s),
    )
    common.finish(result, json_file, old)


def _guards(rows: Sequence[Row], floor_s: float) -> dict[str, Any]:
    """Against the floor, so that a slower disk is no regression of ours."""
    return {
        f"step of {row['num_nodes']} nodes / plain reader": Guard([s / floor_s for s in row["step_s_samples"]], "lower")
        for row in rows
    }


if __name__ == "__main__":
    from offload.bench.suite import run_alone

    run_alone("sweep")
