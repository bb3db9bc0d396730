"""Pictures of studies: one look for all, lines that name themselves at their ends, error bars of one standard error.

Drawn through `Figure` alone: no window system, no global state.
"""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#0b62a4", "#d1495b", "#2e8b57", "#8e5ea2", "#c77f14", "#4d4d4d", "#17a2b8", "#7a9a01")
MARKERS = "os^Dv<>P"
FAINT = "#888888"


class Line(NamedTuple):
    """One curve."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float]
    style: int  # its colour and marker


def new_figure(num_panels: int = 1, *, width: float = 7.5) -> tuple[Figure, list[Axes]]:
    """Panels side by side that share their y axis."""
    figure = Figure(figsize=(width, 4.8), dpi=120, layout="constrained")
    panels = figure.subplots(1, num_panels, sharey=True, squeeze=False)[0]
    for panel in panels:
        panel.set_axisbelow(True)
        panel.grid(True, color="#e4e4e4", linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, list(panels)


def draw_line(panel: Axes, line: Line, *, dashes: str = "-") -> None:
    """Points with error bars, joined."""
    colour, marker = COLOURS[line.style % len(COLOURS)], MARKERS[line.style % len(MARKERS)]
    panel.errorbar(
        *(line.x, line.y, line.error),
        color=colour,
        marker=marker,
        markersize=4.5,
        linestyle=dashes,
        linewidth=1.6,
        capsize=2,
        label=line.label,
    )


def draw_prediction(panel: Axes, line: Line) -> None:
    """The same colour, dashed and without points."""
    colour = COLOURS[line.style % len(COLOURS)]
    panel.plot(line.x, line.y, color=colour, linestyle=(0, (4, 2)), linewidth=1.1, alpha=0.8)


def draw_reference(panel: Axes, y: float, text: str, x: float) -> None:
    """A level that others are compared with."""
    panel.axhline(y, color=FAINT, linestyle=":", linewidth=1.2)
    panel.annotate(text, (x, y), xytext=(2, 3), textcoords="offset points", color=FAINT, fontsize=8)


def label_ends(panel: Axes, lines: Sequence[Line], *, gap: float = 0.052) -> None:
    """Every line's name beside its last point, pushed up where two would overlap; `gap` is a share of the y axis.

    Call it last: names are placed by the axes as they are now, be they linear or logarithmic.
    """
    to_axes = panel.transData + panel.transAxes.inverted()
    ends = [(*to_axes.transform((line.x[-1], line.y[-1])), line) for line in lines]
    floor = float("-inf")
    for x, y, line in sorted(ends, key=lambda end: end[1]):
        y = max(y, floor)
        floor = y + gap
        panel.annotate(
            line.label,
            (x, y),
            xycoords="axes fraction",
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=COLOURS[line.style % len(COLOURS)],
            fontsize=9,
            annotation_clip=False,
        )


def powers_of_two(panel: Axes, ticks: Sequence[int]) -> None:
    """A doubling x axis with plain numbers."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(list(ticks), [str(tick) for tick in ticks])
    panel.minorticks_off()
