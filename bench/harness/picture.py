"""A picture of bars beside their ceiling.

Invariant: a picture that has left its folder still says what it shows in words
of its own, and which models, which machine and which day it is of.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple

from offload.bench.harness.record import this_machine
from offload.bench.harness.tables import Row
from offload.errors import UserError, require
from offload.trees.spec import parse_tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_TITLE_WIDTH = 100  # characters that fit above the axes
_WIDTH = 8.5  # inches
_DPI = 110
_BAR = "#0b7a5b"
_CEILING = "#ddd8ce"
_INK = "#1d1c1a"
_SOFT = "#66625b"


class Bar(NamedTuple):
    label: str
    value: float
    most: float


def require_pictures(path: Path) -> None:
    """Raise `UserError` where such a picture cannot be drawn; call it before measuring."""
    if find_spec("matplotlib") is None:
        requirement = "--picture needs matplotlib, which is not installed"
        raise UserError(f"{requirement}: pip install 'offload[bench]'")
    from matplotlib.figure import Figure

    kinds = sorted(Figure().canvas.get_supported_filetypes())
    requirement = f"--picture must end in one of {', '.join(kinds)}"
    is_known = path.suffix.removeprefix(".").lower() in ("", *kinds)
    require(is_known, requirement, str(path), "name it .png")


def draw_decoding(
    rows: Sequence[Row], least_pass_s: float | None, settings: Row, path: Path
) -> None:
    """Draw rows of `decode` as bars; `least_pass_s` is None where nothing is streamed."""
    words = [case_words(row["tree"], row["rule"], row["temperature"]) for row in rows]
    yields = [row["tokens_per_sweep"] for row in rows]
    if least_pass_s is None:
        unit = "tokens per pass over the weights"
        most = "what a tree of that depth could bring"
        ceilings = [1.0 + len(row["accepted_per_pos"]) for row in rows]
        values = yields
    else:
        unit = "tokens per second"
        most = "what the link allows at so many tokens per pass"
        ceilings = [text_yield / least_pass_s for text_yield in yields]
        values = [row["decode_tokens_per_s"] for row in rows]
    bars = list(map(Bar, words, values, ceilings))
    figure_of(bars, f"How many {unit}?", unit, most, settings).savefig(path)


def case_words(tree: str, rule: str, temperature: float) -> str:
    """Return a way to decode, in words of a reader who has not seen the documents."""
    spec = parse_tree(tree)
    if spec.kind == "none":
        return "no guesses"
    size = {
        "auto": "the tree that is chosen",
        "best": f"tree of {spec.count} guesses, {spec.depth} deep",
        "dynamic": f"dynamic tree of {spec.count} guesses, {spec.depth} deep",
        "chain": f"chain of {spec.depth} guesses",
        "sequences": f"{spec.count} chains of {spec.depth} guesses",
    }.get(spec.kind, tree)
    drawn = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return f"{size}, {drawn}" + ("" if rule == "match" else f", rule {rule}")


def figure_of(bars: Sequence[Bar], question: str, unit: str, most: str, settings: Row) -> "Figure":
    """Return the figure: a bar for each row, before the bar of its ceiling, which is `most`."""
    figure = _figure(question, settings, 1.5 + 0.36 * len(bars))
    place = figure.subplots()
    places = range(len(bars))
    ceilings = [bar.most for bar in bars]
    values = [bar.value for bar in bars]
    place.barh(places, ceilings, height=0.72, color=_CEILING, label=f"ceiling: {most}")
    place.barh(places, values, height=0.44, color=_BAR, label="measured")
    widest = max([*ceilings, *values])
    for index, bar in enumerate(bars):
        form = ".2f" if bar.value < 10 else ".1f"
        label = f"{bar.value:{form}} of {bar.most:{form}}"
        end = max(bar.value, bar.most) + 0.01 * widest
        place.text(end, index, label, va="center", fontsize=8, color=_INK)
    place.set_yticks(places, ["\n".join(wrap(bar.label, 48)) for bar in bars], fontsize=8)
    place.invert_yaxis()
    place.set_xlim(0, 1.16 * widest)
    place.set_xlabel(unit, fontsize=8, color=_SOFT)
    place.tick_params(axis="x", labelsize=8, colors=_SOFT)
    place.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower right", ncols=2, frameon=False, fontsize=8)
    _bare(place)
    return figure


def _figure(question: str, settings: Row, height: float) -> "Figure":
    from matplotlib.figure import Figure  # alone: no window system, no global state

    machine = this_machine()
    models = ", guesses by ".join(settings[key] for key in ("target", "draft") if settings.get(key))
    place = f"{machine['cpu']}, {machine['num_cores']} cores, {settings['device']}"
    place = f"{place}, {datetime.now(UTC):%Y-%m-%d}"
    lines = [question, *wrap(models, _TITLE_WIDTH), *wrap(place, _TITLE_WIDTH)]
    figure = Figure(figsize=(_WIDTH, height + 0.18 * len(lines)), dpi=_DPI, layout="constrained")
    figure.suptitle("\n".join(lines), fontsize=9, color=_INK, x=0.02, ha="left")
    return figure


def _bare(place: "Axes") -> None:
    for side in ("top", "right", "left"):
        place.spines[side].set_visible(False)
    place.spines["bottom"].set_color(_CEILING)
