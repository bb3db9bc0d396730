"""A report from stored results: one Markdown file, a table and a picture for every question that they answer.

It takes what the commands of `offload bench` store with `--json`, the studies' own files included. Nothing is measured.
Invariant: every figure in the report stands in one of the files it names.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from matplotlib.figure import Figure

from offload.bench import report_pictures as pictures
from offload.bench.record import Result, read
from offload.bench.timeline import draw, last_step, read_trace
from offload.bench.whole_file import whole
from offload.errors import UserError

Cells = Sequence[Sequence[str]]
_TOKENS = {"num_prompt_tokens": "prompt", "num_new_tokens": "new"}


class Section(NamedTuple):
    """How results of one bench are told."""

    title: str
    table: Callable[[Result], Cells]
    pictures: dict[str, Callable[[Result], Figure]]  # by file name


def write_report(results: Sequence[Result], traces: Sequence[Path], out: Path) -> Path:
    """Write `report.md` and its pictures into `out`. Raises `UserError`."""
    parts = ["# What was measured", *[_section(result, index, out) for index, result in enumerate(results)]]
    for index, path in enumerate(traces):
        figure = draw(last_step(read_trace(path)))
        parts.append(_picture(f"timeline-{index}.svg", figure, out, "One step, layer by layer"))
    report = out / "report.md"
    try:
        with whole(report) as place:
            place.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {report} ({error.strerror}): name another folder with --out") from None
    return report


def markdown(rows: Cells) -> str:
    """A table: the first column to the left, figures to the right."""
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|" + "|".join(["---", *["--:"] * (len(rows[0]) - 1)]) + "|", *body])


def _section(result: Result, index: int, out: Path) -> str:
    section = _study(result) if result.bench == "study" else SECTIONS.get(result.bench)
    section = section or Section(result.bench, _any_table, {})
    lines = [f"## {section.title}", _origin(result), *_conditions(result), markdown(section.table(result))]
    for name, picture in section.pictures.items():
        lines.append(_picture(f"{name}-{index}.png", picture(result), out, name.replace("-", " ")))
    return "\n\n".join(lines)


def _picture(name: str, figure: Figure, out: Path, text: str) -> str:
    try:
        with whole(out / name) as place:
            figure.savefig(place)
    except OSError as error:
        raise UserError(f"cannot write {out / name} ({error.strerror}): name another folder with --out") from None
    return f"![{text}]({name})"


def _origin(result: Result) -> str:
    """When, where, on what, as far as the file tells."""
    machine = result.machine
    if not machine:
        return "The file does not say when and where."
    size = f"{machine['num_cores']} cores, {machine['memory_bytes'] / 1e9:.0f} GB"
    where = f"{machine['cpu']}, {size}, torch {machine['torch']}"
    commit = f", commit {result.commit}" if result.commit else ""
    rate = result.ceiling.get("bytes_per_s")
    ceiling = f" Ceiling: {rate / 1e9:.3f} GB/s." if rate else ""
    return f"{result.created}{commit}; {where}.{ceiling}"


def _conditions(result: Result) -> list[str]:
    """Models, budget and amount of text, as far as the file tells."""
    told = result.settings
    if "target_bytes" not in told:
        return []
    parts = [f"target `{told['target']}`, {told['target_bytes'] / 1e9:.3f} GB"]
    parts += [f"draft `{told['draft']}`"] if told.get("draft") else []
    parts += [f"memory budget {told['ram_bytes'] / 1e9:.2f} GB"] if result.bench != "link" else []
    parts += [f"{told[name]} {word} tokens" for name, word in _TOKENS.items() if name in told]
    return [f"Conditions: {'; '.join(parts)}."]


def _decode_table(result: Result) -> Cells:
    columns = {
        "tokens/s": ("decode_tokens_per_s", 2),
        "x none": ("speedup", 2),
        "tokens/sweep": ("tokens_per_sweep", 2),
        "mean ttft s": ("mean_ttft_s", 3),
        "mean tpot s": ("mean_tpot_s", 3),
        "median itl s": ("median_itl_s", 3),
        "p99 itl s": ("p99_itl_s", 3),
        "median sweep s": ("median_sweep_s", 3),
        "mean e2el s": ("mean_e2el_s", 2),
        "link used": ("link_utilisation", 3),
    }
    return _columns(result, "name", columns)


def _sweep_table(result: Result) -> Cells:
    names = ("step_s", "sweep_s", "stall_s", "compute_s", "draft_s")
    columns = {name.replace("_", " "): (name, 3) for name in names} | {"link used": ("link_utilisation", 3)}
    return _columns(result, "num_nodes", columns)


def _draft_table(result: Result) -> Cells:
    columns = {"draft s": ("draft_s", 4), "s a step": ("draft_step_s", 5), "tokens/sweep": ("tokens_per_sweep", 2)}
    return _columns(result, "tree", columns)


def _link_table(result: Result) -> Cells:
    columns = {"GB/s": ("gb_per_s", 3), "of the ceiling": ("share_of_ceiling", 3)}
    rows = [{**row, "gb_per_s": row["bytes_per_s"] / 1e9} for row in result.rows]
    return _columns(replace(result, rows=rows), "name", columns)


def _peers_table(result: Result) -> Cells:
    """A program without figures says why."""
    columns = {
        "tokens/s": ("tokens_per_s", 2),
        "s/token": ("s_per_token", 3),
        "tokens a pass": ("tokens_per_pass", 1),
        "ours / it": ("ratio", 2),
        "wanted >=": ("wanted", 1),
    }
    head, *body = _columns(result, "title", columns)
    remarks = [row.get("reason") or ("uncapped" if row.get("is_capped") is False else "") for row in result.rows]
    return [[*head, "remark"], *([*cells, remark] for cells, remark in zip(body, remarks, strict=True))]


def _prediction_table(result: Result) -> Cells:
    """Runs on this machine were measured by us, the others by the paper."""
    columns = {
        "tokens/step": ("tokens_per_step", 2),
        "measured s/token": ("measured_s", 3),
        "predicted s/token": ("predicted_s", 3),
        "predicted / measured": ("ratio", 3),
    }
    return _columns(replace(result, rows=[_as_measured(row) for row in result.rows]), "row", columns)


def _as_measured(row: dict[str, Any]) -> dict[str, Any]:
    measured = row.get("measured_s_per_token", row.get("paper_s"))
    predicted = row.get("predicted_s_per_token", row.get("in_turn"))  # as the paper's system, which overlaps nothing
    ratio = row.get("predicted_over_measured") or (predicted / measured if predicted and measured else None)
    return {**row, "measured_s": measured, "predicted_s": predicted, "ratio": ratio}


def _study(result: Result) -> Section:
    """A study draws and tabulates its own figures."""
    from offload.bench.studies import STUDIES

    name = result.settings["study"]
    study = STUDIES[name]

    def table(_: Result) -> Cells:
        return [row for row in study.table(result.settings) if len(row) > 1]

    return Section(f"Study: {name}", table, {f"study-{name}": lambda _: study.draw(result.settings)})


def read_any(path: Path) -> Result:
    """A stored result; that of a study or of other programs comes without machine and guards. Raises `UserError`."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return read(path)  # which says what is wrong
    blank: dict[str, Any] = {"ceiling": {}, "guards": {}, "machine": {}, "created": "", "commit": None}
    if isinstance(stored, dict) and "study" in stored:
        return Result(bench="study", settings=stored, rows=[], **blank)
    if isinstance(stored, dict) and "schema" not in stored and isinstance(stored.get("rows"), list):
        return Result(bench=str(stored.get("bench")), settings=stored, rows=stored["rows"], **blank)
    return read(path)


def _any_table(result: Result) -> Cells:
    """A bench that is not known here: its plain numbers."""
    if not result.rows:
        return [["nothing"]]
    label = next((name for name, value in result.rows[0].items() if isinstance(value, str)), next(iter(result.rows[0])))
    numbers = [name for name, value in result.rows[0].items() if name != label and isinstance(value, int | float)]
    return _columns(result, label, {name: (name, 3) for name in numbers})


def _columns(result: Result, label: str, columns: dict[str, tuple[str, int]]) -> Cells:
    def cell(row: dict[str, Any], name: str, digits: int) -> str:
        value = row.get(name)
        return f"{value:.{digits}f}" if isinstance(value, int | float) else "-"

    body = [[str(row.get(label, "-")), *(cell(row, *how) for how in columns.values())] for row in result.rows]
    return [[label.removeprefix("num_"), *columns], *body]


SECTIONS = {
    "link": Section("The link", _link_table, {"link": pictures.link}),
    "sweep": Section("A sweep against the size of its tree", _sweep_table, {"sweep-roofline": pictures.sweep}),
    "prediction": Section("Predicted and measured: this machine, and the paper's L40", _prediction_table, {}),
    "peers": Section("Other programs", _peers_table, {"peers": pictures.speed_bars}),
    "draft": Section(
        "Drafting", _draft_table, {"tokens-per-sweep": pictures.tokens_per_sweep, "acceptance": pictures.acceptance}
    ),
    "decode": Section(
        "Decoding", _decode_table, {"tokens-per-s": pictures.speed_bars, "acceptance-by-depth": pictures.acceptance}
    ),
}

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(
    epilog="Example:\n\n    offload bench report decode.json sweep.json --trace sweep-trace.json --out build/report"
)
def main(
    files: Annotated[list[Path], typer.Argument(help="stored with --json, of any benches")],
    trace: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="of bench decode --trace")] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="where report.md and the pictures go")] = Path("report"),
) -> None:
    """Markdown and pictures from stored results."""
    print(write_report([read_any(path) for path in files], trace or [], out))


if __name__ == "__main__":
    from offload.bench.suite import run_alone

    run_alone("report")
