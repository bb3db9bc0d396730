"""What a run takes of memory beside its plan: the peak of fresh processes, phase by phase.

Each configuration gets the least budget that its plan does not refuse, so that every byte of the
plan is needed. What libraries take when they are imported is no part of `--ram`. Growth is what is
held behind the last tenth of the texts over what was held behind those of the fifth that comes
after the first; texts differ in length. Where a peak lies above `--ram`, or a process grows by more
than noise, the command ends with 1.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer

from offload.bench.harness.command import Bench, command, one_of, say_table
from offload.bench.harness.memory_child import POSTS, Order, run_child
from offload.bench.harness.mixture import untrained_mixture
from offload.bench.harness.quantised import FORMATS, PACKED, quantised
from offload.bench.harness.record import Row
from offload.checkpoint.hub import open_headers
from offload.cli.demo import PAIR, inflated_target
from offload.memory.planner import ModelFiles, least_budget, plan_memory
from offload.trees.spec import parse_tree
from offload.units import parse_size

DENSE = "bf16"
MIXTURE = "mixture"
CONTEXT = 1024
GROWTH_BYTES = 1 << 20  # held: allocations of the interpreter come and go by as much
_MIB = 1 << 20
_QUICK = ("dense-128", "many-8x16", "layers-64")


class Case(NamedTuple):
    """One configuration."""

    kind: str
    tree: str
    parallel: int = 1
    temperature: float = 0.0
    prompt_tokens: int = 128
    # further fields of `LoadOptions`
    more: Mapping[str, Any] = {}


CASES = {
    "dense-none": Case(DENSE, "none"),
    "dense-64": Case(DENSE, "dynamic:64x16"),
    "dense-128": Case(DENSE, "dynamic:128x20"),
    "dense-512": Case(DENSE, "dynamic:512x24"),
    "dense-512-plain": Case(DENSE, "dynamic:512x24", more={"invariant": False}),
    "dense-128-long": Case(DENSE, "dynamic:128x20", prompt_tokens=900),
    "dense-128-sampled": Case(DENSE, "dynamic:128x20", temperature=0.8),
    "dense-sequoia": Case(DENSE, "128x20", temperature=0.8, more={"rule": "sequoia"}),
    "dense-float32": Case(DENSE, "dynamic:128x20", more={"dtype": "float32"}),
    "many-8x1": Case(DENSE, "none", parallel=8),
    "many-8x16": Case(DENSE, "dynamic:16x8", parallel=8),
    "many-8x16-sampled": Case(
        DENSE, "dynamic:16x8", parallel=8, temperature=0.8, prompt_tokens=600
    ),
    "int4-128": Case("int4", "dynamic:128x20"),
    "fp8-64": Case("fp8", "dynamic:64x16", temperature=0.8),
    "packed-128": Case(PACKED, "dynamic:128x20"),
    "layers-none": Case(MIXTURE, "none", more={"experts": "layers"}),
    "layers-64": Case(MIXTURE, "dynamic:64x16", more={"experts": "layers"}),
    "layers-256-plain": Case(
        MIXTURE, "dynamic:256x20", more={"experts": "layers", "invariant": False}
    ),
    "demand-64": Case(MIXTURE, "dynamic:64x16", more={"experts": "demand"}),
    "demand-256-sampled": Case(
        MIXTURE, "dynamic:256x20", temperature=0.8, more={"experts": "demand"}
    ),
}


def target_of(kind: str, size_bytes: int) -> Path:
    """Return the target of one kind; made once, then reused."""
    if kind == MIXTURE:
        return untrained_mixture(2 * size_bytes)
    dense = inflated_target(size_bytes, lambda done, total: None)
    return quantised(dense, kind) if kind in (*FORMATS, PACKED) else dense


def measure(case: Case, target: Path, num_texts: int, ram: str | None) -> Row:
    """Measure one configuration in a process of its own. Raises `UserError`."""
    options = {"tree": case.tree, "parallel": case.parallel, "context": CONTEXT, **case.more}
    spec = parse_tree(case.tree)
    files = ModelFiles(open_headers(target), open_headers(PAIR / "draft"))
    names = {name: case.more[name] for name in ("rule", "experts") if name in case.more}
    plan = partial(
        plan_memory,
        files,
        dtype=case.more.get("dtype", "auto"),
        context=CONTEXT,
        parallel=case.parallel,
        num_nodes=spec.num_nodes * case.parallel,
        **names,
    )
    ram_bytes = (
        least_budget(lambda size: plan(ram=size)) if ram is None else parse_size(ram, "--ram")
    )
    order = Order(
        str(target),
        str(PAIR / "draft"),
        {**options, "ram": ram_bytes},
        num_texts,
        prompt_tokens=case.prompt_tokens,
        temperature=case.temperature,
    )
    return judged(run_child(order))


def judged(found: Row) -> Row:
    """Return the row with its peak beyond the libraries, its growth, and both verdicts."""
    peak_bytes = max(phase["peak_bytes"] for phase in found["phases"])
    texts = [phase["held_bytes"] for phase in found["phases"] if phase["phase"].startswith("text")]
    grown_bytes = growth(texts)
    is_kept = peak_bytes <= found["ram_bytes"]
    has_grown = grown_bytes is not None and grown_bytes > GROWTH_BYTES
    return {
        **found,
        "peak_bytes": peak_bytes,
        "grown_bytes": grown_bytes,
        "is_kept": is_kept,
        "has_grown": has_grown,
    }


def growth(held_bytes: Sequence[int]) -> int | None:
    """Return by how much held memory grew between early and last texts; None of too few."""
    if len(held_bytes) < 10:
        return None
    few = max(3, len(held_bytes) // 10)
    fifth = len(held_bytes) // 5
    return int(median(held_bytes[-few:]) - median(held_bytes[fifth : 2 * fifth]))


def say_bill(row: Row) -> None:
    """Print where the memory of one configuration goes."""
    say_table(
        ["planned", "MiB"],
        [[name, _mib(row["posts"][name])] for name in POSTS if row["posts"][name]],
    )
    lines = [
        [one["phase"], *(_mib(one[name]) for name in ("peak_bytes", "end_bytes", "held_bytes"))]
        for one in row["phases"]
    ]
    say_table(["measured", "peak", "end", "held"], lines)


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / _MIB:.1f}"


@command("memory", "quick", examples=["offload bench memory --case dense-128 --size 2GB --bill"])
def main(
    bench: Bench,
    case: Annotated[
        list[str] | None, typer.Option(metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    ] = None,
    size: Annotated[
        str, typer.Option(metavar="SIZE", help="of the target, twice that of a mixture")
    ] = "300MB",
    ram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="default: the least that is not refused")
    ] = None,
    texts: Annotated[
        int, typer.Option(metavar="N", help="of 10 and more growth is told", min=1)
    ] = 3,
    bill: Annotated[bool, typer.Option("--bill", help="post by post and phase by phase")] = False,
) -> None:
    """Peak memory of fresh processes beside `--ram`, and growth over texts; ends with 1 where
    either is broken.
    """
    one_of(case or (), CASES, "--case")
    rows = list[Row]()
    for name in case or (_QUICK if bench.quick else CASES):
        row = measure(
            CASES[name], target_of(CASES[name].kind, parse_size(size, "--size")), texts, ram
        )
        rows.append(bench.row({"case": name, **row}))
        if bill:
            say_bill(row)
        grown = "" if row["grown_bytes"] is None else f", grown by {_mib(row['grown_bytes'])}"
        verdict = "ABOVE" if not row["is_kept"] else "GROWS" if row["has_grown"] else "kept"
        figures = f"peak {_mib(row['peak_bytes'])} of {_mib(row['ram_bytes'])} MiB{grown}"
        print(
            f"{name:<20} {figures}; libraries {_mib(row['imported_bytes'])}; {verdict}", flush=True
        )
    bench.finish(rows, settings={"size": size, "texts": texts, "ram": ram}, ceiling={})
    if not all(row["is_kept"] and not row["has_grown"] for row in rows):
        raise typer.Exit(1)
