"""Pictures from plain values: lines that name themselves at their ends, levels, bars; one look for all.

A picture is a list of panels side by side, each a dictionary that JSON can hold: `lines` (label, x, y, error,
`dashed`), `levels` (y, text), `bars` (label, y, error) over `names`, `title`, `xlabel`, `ylabel`, `ticks` of a
doubling x axis, `log_y`. Drawn through `Figure` alone: no window system, no global state.
"""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#0b62a4", "#d1495b", "#2e8b57", "#8e5ea2", "#c77f14", "#4d4d4d", "#17a2b8", "#7a9a01")
MARKERS = "os^Dv<>P"
FAINT = "#888888"
_GAP = 0.052  # between names at the ends of lines, as a share of the y axis
Panel = dict[str, Any]


def line(label: str, x: Sequence[float], y: Sequence[float], error: Sequence[float] = (), **more: Any) -> Panel:
    """One curve; `dashed` ones have no points and no name, in the colour of the line before them."""
    return {"label": label, "x": list(x), "y": list(y), "error": list(error), **more}


def new_figure(num_panels: int = 1, *, width: float = 7.5) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, 4.8), dpi=120, layout="constrained")
    panels = figure.subplots(1, num_panels, sharey=True, squeeze=False)[0]
    for panel in panels:
        panel.set_axisbelow(True)
        panel.grid(True, color="#e4e4e4", linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, list(panels)


def draw(panels: Sequence[Panel]) -> Figure:
    figure, places = new_figure(len(panels), width=4.5 + 3.7 * len(panels))
    for place, panel in zip(places, panels, strict=True):
        _draw_bars(place, panel) if "bars" in panel else _draw_lines(place, panel)
        for y, text in panel.get("levels", ()):
            place.axhline(y, color=FAINT, linestyle=":", linewidth=1.2)
            place.annotate(text, (0.02, y), xycoords=("axes fraction", "data"), xytext=(2, 3),
                           textcoords="offset points", color=FAINT, fontsize=8)  # fmt: skip
        place.set_title(panel.get("title", ""), fontsize=10, loc="left")
        place.set(**{name: panel[name] for name in ("xlabel", "ylabel") if name in panel})
    if not panels[0].get("log_y"):
        places[0].set_ylim(bottom=0)
    for place, panel in zip(places, panels, strict=True):
        _name_ends(place, [one for one in panel.get("lines", ()) if not one.get("dashed")])
    return figure


def bars(names: Sequence[str], values: Sequence[float], ours: Sequence[int], xlabel: str, title: str) -> Figure:
    figure, (panel,) = new_figure(width=9)
    panel.barh(range(len(names)), values, color=[COLOURS[0] if at in ours else FAINT for at in range(len(names))])
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    for row, value in enumerate(values):
        panel.annotate(f"{value:.2f}", (value, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    panel.set(xlabel=xlabel, title=title)
    return figure


def _draw_lines(place: Axes, panel: Panel) -> None:
    if panel.get("log_y"):
        place.set_yscale("log")
    style = -1
    for one in panel["lines"]:
        style += not one.get("dashed")
        colour, marker = COLOURS[style % len(COLOURS)], MARKERS[style % len(MARKERS)]
        if one.get("dashed"):
            place.plot(one["x"], one["y"], color=colour, linestyle=(0, (4, 2)), linewidth=1.1, alpha=0.8)
        else:
            how: Panel = {"marker": marker, "markersize": 4.5, "linewidth": 1.6, "capsize": 2}
            place.errorbar(one["x"], one["y"], one["error"] or None, color=colour, **how)
    if ticks := panel.get("ticks"):
        place.set_xscale("log", base=2)
        place.set_xticks(ticks, [str(tick) for tick in ticks])
        place.minorticks_off()


def _draw_bars(place: Axes, panel: Panel) -> None:
    for index, one in enumerate(panel["bars"]):
        at = [x + (index - (len(panel["bars"]) - 1) / 2) * 0.26 for x in range(len(one["y"]))]
        drawn = place.bar(at, one["y"], 0.24, yerr=one["error"], capsize=2, color=COLOURS[index], label=one["label"])
        place.bar_label(drawn, [f"{height:.2f}" for height in one["y"]], fontsize=8, padding=2)
    place.set_xticks(range(len(panel["names"])), panel["names"])
    place.legend(frameon=False, fontsize=9, loc="upper left")


def _name_ends(place: Axes, lines: Sequence[Panel]) -> None:
    """Every line's name beside its last point, pushed up where two would overlap; for axes that stay as they are."""
    to_axes = place.transData + place.transAxes.inverted()
    ends = [(*to_axes.transform((one["x"][-1], one["y"][-1])), style) for style, one in enumerate(lines) if one["x"]]
    floor = float("-inf")
    for x, y, style in sorted(ends, key=lambda end: end[1]):
        y = max(y, floor)
        floor = y + _GAP
        how: Panel = {"va": "center", "fontsize": 9, "color": COLOURS[style % len(COLOURS)], "annotation_clip": False}
        where: Panel = {"xycoords": "axes fraction", "xytext": (8, 0), "textcoords": "offset points"}
        place.annotate(lines[style]["label"], (x, y), **where, **how)
