"""A report from stored results: one Markdown file, a table and pictures for every question that they answer.

It takes what the commands of `offload bench` store with `--json`, the studies' own files included. Nothing is measured.
Invariant: every figure in the report stands in one of the files it names.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure

from offload.bench.harness import picture
from offload.bench.harness.record import Result, Row, read
from offload.bench.harness.timeline import draw, last_step, read_trace
from offload.bench.harness.whole_file import whole
from offload.errors import UserError

Columns = dict[str, tuple[str, int]]  # heading -> name in a row, digits
COLUMNS: dict[str, tuple[str, str, Columns]] = {  # bench: title, what names a row, columns
    "link": ("The link", "name", {"GB/s": ("gb_per_s", 3), "of the ceiling": ("share_of_ceiling", 3)}),
    "passes": ("Forwards of target and draft against their rows", "name",
               {"sweep s": ("sweep_s", 3), "stall s": ("stall_s", 3), "compute s": ("compute_s", 3),
                "draft s": ("draft_step_s", 4), "link used": ("link_utilisation", 3)}),
    "decode": ("Decoding", "name",
               {"tokens/s": ("decode_tokens_per_s", 2), "x none": ("speedup", 2),
                "tokens/sweep": ("tokens_per_sweep", 2), "mean ttft s": ("mean_ttft_s", 3),
                "mean tpot s": ("mean_tpot_s", 3), "p99 itl s": ("p99_itl_s", 3),
                "median sweep s": ("median_sweep_s", 3), "link used": ("link_utilisation", 3)}),
    "peers": ("Other programs", "title",
              {"tokens/s": ("tokens_per_s", 2), "s/token": ("s_per_token", 3), "tokens a pass": ("tokens_per_pass", 1),
               "ours / it": ("ratio", 2), "wanted >=": ("wanted", 1)}),
    "prediction": ("Predicted and measured: this machine, and the paper's L40", "row",
                   {"tokens/step": ("tokens_per_step", 2), "measured s/token": ("measured_s", 3),
                    "predicted s/token": ("predicted_s", 3), "predicted / measured": ("ratio", 3)}),
}  # fmt: skip


def write_report(results: Sequence[Result], traces: Sequence[Path], out: Path) -> Path:
    """Write `report.md` and its pictures into `out`. Raises `UserError`."""
    parts, report = ["# What was measured"], out / "report.md"
    try:
        for index, result in enumerate(results):
            parts += _section(result)
            for name, figure in _pictures(result):
                parts.append(_picture(out / f"{name}-{index}.png", figure))
        for index, path in enumerate(traces):
            parts.append(_picture(out / f"timeline-{index}.svg", draw(last_step(read_trace(path)))))
        with whole(report) as place:
            place.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {error.filename} ({error.strerror}): name another folder with --out") from None
    return report


def _picture(path: Path, figure: Figure) -> str:
    with whole(path) as place:
        figure.savefig(place)
    return f"![{path.stem}]({path.name})"


def _section(result: Result) -> list[str]:
    if result.bench == "study":
        head, *rows = result.settings["table"]
        return [f"## Study: {result.settings['study']}", _markdown([head, *(row for row in rows if len(row) > 1)])]
    title, label, columns = COLUMNS.get(result.bench) or (result.bench, *_any_columns(result.rows))
    rows = [_completed(row) for row in result.rows]
    body = [
        [str(row.get(label, "-")), *(_cell(row.get(name), digits) for name, digits in columns.values())] for row in rows
    ]
    head = [label, *columns]
    if result.bench == "peers":  # a program without figures says why
        head.append("remark")
        body = [[*cells, row.get("reason", "")] for cells, row in zip(body, rows, strict=True)]
    return [f"## {title}", *_origin(result), _markdown([head, *body])]


def _completed(row: Row) -> Row:
    """With what older files call otherwise, or only imply; the paper's rows were predicted as its system runs."""
    measured = row.get("measured_s_per_token", row.get("paper_s"))
    predicted = row.get("predicted_s_per_token", row.get("in_turn"))
    more: Row = {"measured_s": measured, "predicted_s": predicted, "gb_per_s": row.get("bytes_per_s", 0) / 1e9}
    if measured and predicted:
        more["ratio"] = row.get("predicted_over_measured") or predicted / measured
    return {**row, **more}


def _any_columns(rows: Sequence[Row]) -> tuple[str, Columns]:
    first = rows[0] if rows else {"nothing": ""}
    label = next((name for name, value in first.items() if isinstance(value, str)), next(iter(first)))
    return label, {n: (n, 3) for n, value in first.items() if n != label and isinstance(value, int | float)}


def _cell(value: object, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) else "-"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|" + "|".join(["---", *["--:"] * (len(rows[0]) - 1)]) + "|", *body])


def _origin(result: Result) -> Iterator[str]:
    machine, told = result.machine, result.settings
    if machine:
        size = f"{machine['num_cores']} cores, {machine['memory_bytes'] / 1e9:.0f} GB"
        commit = f", commit {result.commit}" if result.commit else ""
        yield f"{result.created}{commit}; {machine['cpu']}, {size}, torch {machine['torch']}."
    if rate := result.ceiling.get("bytes_per_s"):
        yield f"Ceiling: {rate / 1e9:.3f} GB/s."
    if "target_bytes" in told:
        names = {"num_prompt_tokens": "prompt", "num_new_tokens": "new"}
        parts = [f"target `{told['target']}`, {told['target_bytes'] / 1e9:.3f} GB", f"draft `{told.get('draft')}`"]
        parts += [f"memory budget {told['ram_bytes'] / 1e9:.2f} GB"]
        parts += [f"{told[name]} {word} tokens" for name, word in names.items() if name in told]
        yield f"Conditions: {'; '.join(parts)}."


def _pictures(result: Result) -> Iterator[tuple[str, Figure]]:
    rows = [row for row in result.rows if "reason" not in row]
    if result.bench == "study" and "picture" in result.settings:
        yield f"study-{result.settings['study']}", picture.draw(result.settings["picture"])
    if result.bench == "link":
        ours = [at for at, row in enumerate(rows) if row["name"].startswith("layer stream")]
        rates = [row["bytes_per_s"] / 1e9 for row in rows]
        yield "link", picture.bars([row["name"] for row in rows], rates, ours, "GB/s", "How fast bytes arrive")
    if result.bench in ("decode", "peers"):
        names, rates = ([row.get("name") or row["title"] for row in rows],
            [row.get("decode_tokens_per_s") or row["tokens_per_s"] for row in rows])  # fmt: skip
        ours = [at for at, row in enumerate(rows) if row.get("tree", "none") != "none" or row.get("peer") == "ours"]
        yield "tokens-per-s", picture.bars(names, rates, ours, "tokens/s, prompt time left out", "Tokens per second")
    if result.bench == "passes":
        sized = [row for row in rows if "limit" in row]
        sizes = [row["num_nodes"] for row in sized]
        lines = [picture.line(name, sizes, [row[key] for row in sized]) for name, key in (("sweep", "sweep_s"),
            ("computing", "compute_s"))]  # fmt: skip
        levels = [[result.ceiling["sweep_s"], "the link's ceiling"]]
        yield ("roofline", picture.draw([{"lines": lines, "ticks": sizes, "levels": levels, "xlabel": "rows",
            "ylabel": "seconds"}]))  # fmt: skip
    if result.bench == "decode":
        reached = [(row["name"], row["accepted_per_pos"]) for row in rows if row["accepted_per_pos"]]
        lines = [picture.line(name, range(1, len(shares) + 1), shares) for name, shares in reached]
        yield ("acceptance", picture.draw([{"lines": lines, "xlabel": "depth",
            "ylabel": "share of sweeps that got there"}]))  # fmt: skip


def read_any(path: Path) -> Result:
    """A stored result; that of a study or of other programs comes without machine and guards. Raises `UserError`."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return read(path)  # which says what is wrong
    blank: dict[str, Any] = {"ceiling": {}, "guards": {}, "machine": {}, "created": "", "commit": None}
    if isinstance(stored, dict) and "table" in stored:
        return Result(bench="study", settings=stored, rows=[], **blank)
    if isinstance(stored, dict) and "schema" not in stored and isinstance(stored.get("rows"), list):
        return Result(bench=str(stored.get("bench")), settings={}, rows=stored["rows"], **blank)
    return read(path)


def main(
    files: Annotated[list[Path], typer.Argument(help="stored with --json, of any benches")],
    trace: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="of bench decode --trace")] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="where report.md and the pictures go")] = Path("report"),
) -> None:
    print(write_report([read_any(path) for path in files], trace or [], out))
