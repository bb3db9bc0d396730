"""What a run takes of memory beside its plan: the peak of fresh processes, phase by phase.

Each configuration gets the least budget that its plan does not refuse, so that every byte of the
plan is needed. What libraries take when they are imported is no part of `--ram`. Growth is what is
held behind the last tenth of the texts over what was held behind the second fifth.
"""

from collections.abc import Mapping
from statistics import median
from typing import Annotated, Any, NamedTuple

from offload.bench.harness.command import Bench, Findings, command, flag, one_of
from offload.bench.harness.memory_child import Order
from offload.bench.harness.setting import least_ram
from offload.bench.harness.tables import Column, Row, say_table
from offload.bench.latency.quantised import BESIDE, PACKED, PLAIN, quantised
from offload.bench.pairs.moe_pair import untrained_mixture
from offload.checkpoint.packaged import PAIR, inflated_target
from offload.model.headers import describe
from offload.planning.draft_kinds import files_of
from offload.trees.spec import parse_tree
from offload.units import parse_size

MIXTURE = "mixture"
CONTEXT = 1024
_MIB = 1 << 20
GROWTH_BYTES = _MIB  # held: allocations of the interpreter come and go by as much
_SMALL = str(PAIR / "draft")
_QUICK = ("dense-128", "many-8x16", "layers-64", "beside-64")
_ANY_BITS = {"invariant": False}
_LAYERS = {"experts": "layers"}
_DEMAND = {"experts": "demand"}
_BUDGETED = ("rule", "experts", "dtype")  # options that a memory budget has, too


class Case(NamedTuple):
    kind: str
    tree: str
    parallel: int = 1
    temperature: float = 0.0
    prompt_tokens: int = 128
    draft: str = _SMALL
    # further fields of `LoadOptions`
    options: Mapping[str, Any] = {}


CASES = {
    "dense-none": Case(PLAIN, "none"),
    "dense-64": Case(PLAIN, "dynamic:64x16"),
    "dense-128": Case(PLAIN, "dynamic:128x20"),
    "dense-512": Case(PLAIN, "dynamic:512x24"),
    "dense-512-plain": Case(PLAIN, "dynamic:512x24", options=_ANY_BITS),
    "dense-128-long": Case(PLAIN, "dynamic:128x20", prompt_tokens=900),
    "dense-128-sampled": Case(PLAIN, "dynamic:128x20", temperature=0.8),
    "dense-sequoia": Case(PLAIN, "128x20", temperature=0.8, options={"rule": "sequoia"}),
    "dense-float32": Case(PLAIN, "dynamic:128x20", options={"dtype": "float32"}),
    "many-8x1": Case(PLAIN, "none", 8),
    "many-8x16": Case(PLAIN, "dynamic:16x8", 8),
    "many-8x16-sampled": Case(PLAIN, "dynamic:16x8", 8, 0.8, 600),
    "int4-128": Case("int4", "dynamic:128x20"),
    "fp8-64": Case("fp8", "dynamic:64x16", temperature=0.8),
    "packed-128": Case(PACKED, "dynamic:128x20"),
    "copy-64": Case(PLAIN, "dynamic:64x63", draft="self:int4"),
    "beside-64": Case(BESIDE, "dynamic:64x63", temperature=0.8, draft="self:int4"),
    "beside-64-scout": Case(BESIDE, "dynamic:64x63", draft=f"self:int4+{_SMALL}"),
    "layers-none": Case(MIXTURE, "none", options=_LAYERS),
    "layers-64": Case(MIXTURE, "dynamic:64x16", options=_LAYERS),
    "layers-256-plain": Case(MIXTURE, "dynamic:256x20", options=_LAYERS | _ANY_BITS),
    "demand-64": Case(MIXTURE, "dynamic:64x16", options=_DEMAND),
    "demand-256-sampled": Case(MIXTURE, "dynamic:256x20", temperature=0.8, options=_DEMAND),
}


def measure(case: Case, size_bytes: int, num_texts: int, ram: str | None) -> Row:
    """Return the memory of one configuration, its growth, and both verdicts. Raises `UserError`."""
    if case.kind == MIXTURE:
        target = untrained_mixture(2 * size_bytes)
    else:
        target = quantised(inflated_target(size_bytes, lambda done, total: None), case.kind)
    shared: dict[str, Any] = {"context": CONTEXT, "parallel": case.parallel}
    if ram is None:
        files = files_of([describe(target), describe(_SMALL)], case.draft, None)
        num_nodes = parse_tree(case.tree).num_nodes * case.parallel
        budget = {name: case.options[name] for name in _BUDGETED if name in case.options}
        ram_bytes = least_ram(files, num_nodes, **shared, **budget)
    else:
        ram_bytes = parse_size(ram, "--ram")
    options = {"tree": case.tree, **shared, **case.options, "ram": ram_bytes}
    asked: dict[str, Any] = {"prompt_tokens": case.prompt_tokens, "temperature": case.temperature}
    measured = Order(str(target), case.draft, options, num_texts, **asked).in_fresh_process()
    held = [
        phase["held_bytes"] for phase in measured["phases"] if phase["phase"].startswith("text")
    ]
    grown_bytes = None
    if len(held) >= 10:
        last = held[-max(3, len(held) // 10) :]
        early = held[len(held) // 5 : 2 * (len(held) // 5)]
        grown_bytes = int(median(last) - median(early))
    return {
        **measured,
        "grown_bytes": grown_bytes,
        "is_kept": measured["peak_bytes"] <= measured["ram_bytes"],
        "has_grown": grown_bytes is not None and grown_bytes > GROWTH_BYTES,
    }


def _verdict(row: Row) -> str:
    return "ABOVE" if not row["is_kept"] else "GROWS" if row["has_grown"] else "kept"


COLUMNS = (
    Column("case", "case"),
    Column("peak MiB", "peak_bytes", ".1f", _MIB),
    Column("of", "ram_bytes", ".1f", _MIB),
    Column("grown by", "grown_bytes", ".1f", _MIB),
    Column("libraries", "imported_bytes", ".1f", _MIB),
    Column("", _verdict),
)
PLANNED = (Column("planned", "post"), Column("MiB", "bytes", ".1f", _MIB))
PHASES = (
    Column("measured", "phase"),
    Column("peak", "peak_bytes", ".1f", _MIB),
    Column("end", "end_bytes", ".1f", _MIB),
    Column("held", "held_bytes", ".1f", _MIB),
)


@command("memory", "quick", examples=["offload bench memory --case dense-128 --size 2GB --bill"])
def main(
    bench: Bench,
    case: Annotated[list[str] | None, flag("CASE", f"of {', '.join(CASES)}; default: all")] = None,
    size: Annotated[str, flag("SIZE", "of the target, twice that of a mixture")] = "300MB",
    ram: Annotated[str | None, flag("SIZE", "default: the least that is not refused")] = None,
    texts: Annotated[int, flag("N", "of 10 and more growth is told", min=1)] = 3,
    bill: Annotated[bool, flag(None, "post by post and phase by phase", "--bill")] = False,
) -> Findings:
    """Peak memory of fresh processes beside `--ram`, and growth over texts.

    Ends with 1 where either is broken.
    """
    one_of(case or (), CASES, "--case")
    rows = list[Row]()
    for name in case or bench.effort(tuple(CASES), _QUICK):
        bench.screen.wait(f"measuring {name}")
        measured = measure(CASES[name], parse_size(size, "--size"), texts, ram)
        rows.append(bench.row({"case": name, **measured}))
        if bill:  # where the memory goes
            posts = rows[-1]["posts"].items()
            say_table(PLANNED, [{"post": name, "bytes": size} for name, size in posts if size])
            say_table(PHASES, rows[-1]["phases"])
    return Findings(
        rows=rows,
        tables=[(COLUMNS, rows)],
        settings={"size": size, "texts": texts, "ram": ram},
        has_failed=any(not row["is_kept"] or row["has_grown"] for row in rows),
    )
