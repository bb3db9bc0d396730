"""Pictures: tokens per pass against tree size, runs of a pipeline over time, processes over hours.

Invariant: a picture that has left its folder still says which models, which machine and which day
it is of.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from offload.bench.harness.record import Row, this_machine
from offload.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_TITLE_WIDTH = 90  # characters that fit above the axes


def require_pictures() -> None:
    """Raise `UserError` where pictures cannot be drawn; call it before measuring."""
    if find_spec("matplotlib") is None:
        raise UserError(
            "--picture needs matplotlib, which is not installed: pip install 'offload[bench]'"
        )


def draw_sizes(rows: Sequence[Row], settings: Row, path: Path) -> None:
    """Draw rows of `decode`: a line per temperature, rule and kind of tree, by size."""
    figure_of(rows, settings).savefig(path)


def draw_flights(rows: Sequence[Row], settings: Row, path: Path) -> None:
    """Draw a panel for each row with `events` of one text, see `RunEvent`."""
    flights_of(rows, settings).savefig(path)


def flights_of(rows: Sequence[Row], settings: Row) -> "Figure":
    """Return the figure: a line for each run, and the moments at which tokens were emitted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 0.8 + 1.7 * len(rows)), dpi=120, layout="constrained")
    figure.suptitle(_title(settings), fontsize=9)
    places = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    for place, row in zip(places, rows, strict=True):
        _plot_flights(place, row["events"])
        place.set_ylabel(row["name"], fontsize=8)
    places[-1].set_xlabel(
        "seconds; blue: back with draws, grey: dead, red: cancelled, ticks: tokens"
    )
    return figure


def draw_hours(samples: Mapping[str, Sequence[Any]], settings: Row, path: Path) -> None:
    """Draw what processes hold over time: a column for each, a panel for each field."""
    from matplotlib.figure import Figure

    names = [name for name in next(iter(samples.values()))[0]._fields if name != "time_s"]
    figure = Figure(figsize=(9.5, 1.6 * len(names)), dpi=120, layout="constrained")
    figure.suptitle(_title(settings), fontsize=9)
    columns = figure.subplots(len(names), len(samples), sharex=True, squeeze=False).T
    for places, (process, looks) in zip(columns, samples.items(), strict=True):
        places[0].set_title(process, fontsize=8)
        places[-1].set_xlabel("minutes")
        for place, name in zip(places, names, strict=True):
            scale, unit = (
                (2**20, "rss, MiB") if name == "rss_bytes" else (1, name.removeprefix("num_"))
            )
            values = [getattr(one, name) / scale for one in looks]
            place.plot([one.time_s / 60 for one in looks], values, linewidth=0.8)
            place.set_ylim(0, 1.1 * max(values) or 1)  # a line at the very top cannot be seen
            place.set_ylabel(unit, fontsize=7)
    figure.savefig(path)


def _plot_flights(place: "Axes", events: Sequence[Sequence[Any]]) -> None:
    zero_s = min((time_s for time_s, *_ in events), default=0.0)
    issued_s = {run: time_s - zero_s for time_s, what, run, _ in events if what == "issued"}
    for time_s, what, run, _ in events:
        if what in ("drawn", "dead") and run in issued_s:
            colour = {"drawn": "tab:blue", "dead": "tab:grey"}[what]
            place.plot([issued_s[run], time_s - zero_s], [run, run], color=colour, linewidth=1.2)
        elif what == "cancelled":
            place.plot(time_s - zero_s, run, "|", color="tab:red", markersize=4)
        elif what == "emitted":
            place.axvline(time_s - zero_s, color="black", linewidth=0.3)


def figure_of(rows: Sequence[Row], settings: Row) -> "Figure":
    """Return the figure; `settings` name the models."""
    from matplotlib.figure import Figure  # alone: no window system, no global state

    has_sizes = len({row["num_nodes"] for row in rows if row["num_nodes"] > 1}) > 1
    height = 4.8 if has_sizes else 1 + 0.25 * len(rows)
    figure = Figure(figsize=(7.5, height), dpi=120, layout="constrained")
    place = figure.subplots()
    place.set_title(_title(settings), fontsize=9)
    (_plot if has_sizes else _tabulate)(place, rows)
    return figure


def _title(settings: Row) -> str:
    machine = this_machine()
    models = " with the draft ".join(
        settings[key] for key in ("target", "draft") if settings.get(key)
    )
    place = f"{machine['cpu']}, {machine['num_cores']} cores, {settings['device']}"
    return "\n".join(
        [*wrap(models, _TITLE_WIDTH), *wrap(f"{place}, {datetime.now(UTC):%Y-%m-%d}", _TITLE_WIDTH)]
    )


def _plot(place: "Axes", rows: Sequence[Row]) -> None:
    lines = dict[str, list[tuple[int, float]]]()
    for row in rows:
        kind = row["tree"].partition(":")[0] if ":" in row["tree"] else "static"
        label = f"{kind}, {row['rule']}, T = {row['temperature']:g}"
        lines.setdefault(label, []).append((row["num_nodes"], row["tokens_per_sweep"]))
    for label, points in lines.items():
        place.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    sizes = sorted({row["num_nodes"] for row in rows})
    place.set_xscale("log", base=2)
    place.set_xticks(sizes, map(str, sizes))
    place.set(xlabel="nodes", ylabel="tokens per sweep", ylim=(0, None))
    place.margins(x=0.05)
    place.legend(frameon=False, fontsize=8, ncols=1 + len(lines) // 8, loc="best")


def _tabulate(place: "Axes", rows: Sequence[Row]) -> None:
    place.set_axis_off()
    cells = [
        [
            row["tree"],
            row["rule"],
            f"{row['temperature']:g}",
            str(row["num_prompts"]),
            f"{row['tokens_per_sweep']:.2f}",
        ]
        for row in rows
    ]
    head = ["tree", "rule", "temperature", "texts", "tokens per sweep"]
    place.table(cells, colLabels=head, cellLoc="center", loc="upper center")
