"""One picture: what a sweep yields against the size of the tree."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from offload.bench.harness.record import Row
from offload.errors import UserError


def require_pictures() -> None:
    """Raises `UserError` where pictures cannot be drawn; ask before measuring."""
    if find_spec("matplotlib") is None:
        raise UserError("--picture needs matplotlib, which is not installed: pip install 'offload[bench]'")


def draw_sizes(rows: Sequence[Row], path: Path) -> None:
    """Rows of `decode`: a line per temperature, rule and kind of tree, in the order of their sizes."""
    from matplotlib.figure import Figure  # alone: no window system, no global state

    figure, lines = Figure(figsize=(7.5, 4.8), dpi=120, layout="constrained"), dict[str, list[tuple[int, float]]]()
    for row in rows:
        kind = row["tree"].partition(":")[0] if ":" in row["tree"] else "static"
        label = f"{kind}, {row['rule']}, T = {row['temperature']:g}"
        lines.setdefault(label, []).append((row["num_nodes"], row["tokens_per_sweep"]))
    place = figure.subplots()
    for label, points in lines.items():
        place.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    place.set_xscale("log", base=2)
    place.set(xlabel="nodes", ylabel="tokens per sweep", ylim=(0, None))
    place.legend(frameon=False)
    figure.savefig(path)
