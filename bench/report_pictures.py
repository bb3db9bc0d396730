"""The pictures of a report, each from one stored result."""

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from offload.bench.picture import (
    COLOURS,
    FAINT,
    Line,
    draw_line,
    draw_reference,
    label_ends,
    new_figure,
    powers_of_two,
)
from offload.bench.record import Result


def link(result: Result) -> Figure:
    """A bar for every way of reading, the ceiling as a level."""
    names = [row["name"] for row in result.rows]
    figure = _bars(
        names,
        [row["bytes_per_s"] / 1e9 for row in result.rows],
        [index for index, name in enumerate(names) if name.startswith("layer stream")],
        ("GB/s; dotted: the ceiling, a plain reader", "How fast bytes arrive"),
    )
    figure.axes[0].axvline(result.ceiling["bytes_per_s"] / 1e9, color="black", linestyle=":", linewidth=1.4)
    return figure


def speed_bars(result: Result) -> Figure:
    """Tokens per second of every case with a tree against none, or of ours against other programs."""
    rows = [row for row in result.rows if "reason" not in row]
    names = [row.get("name") or row["title"] for row in rows]
    rates = [row.get("decode_tokens_per_s") or row.get("tokens_per_s") or 0.0 for row in rows]
    ours = [index for index, row in enumerate(rows) if row.get("tree", "none") != "none" or row.get("peer") == "ours"]
    return _bars(names, rates, ours, ("tokens/s, prompt time left out", "Tokens per second"))


def sweep(result: Result) -> Figure:
    """Seconds of a sweep against its nodes, over what the link and computing need by themselves."""
    rows, floor_s = result.rows, result.ceiling["sweep_s"]
    sizes, none = [row["num_nodes"] for row in rows], [0.0] * len(rows)
    figure, (panel,) = new_figure(width=8.5)
    roof = [max(floor_s, row["compute_s"]) for row in rows]
    panel.fill_between(sizes, roof, color=FAINT, alpha=0.18, linewidth=0)
    lines = [
        Line("step", sizes, [row["step_s"] for row in rows], none, 0),
        Line("sweep", sizes, [row["sweep_s"] for row in rows], none, 1),
        Line("computing", sizes, [row["compute_s"] for row in rows], none, 2),
        Line("drafting", sizes, [row["draft_s"] for row in rows], none, 3),
    ]
    for line in lines:
        draw_line(panel, line)
    panel.axhline(floor_s, color="black", linestyle=":", linewidth=1.4)
    powers_of_two(panel, sizes)
    panel.set_xlabel("nodes of the tree")
    panel.set_ylabel("seconds")
    panel.set_ylim(bottom=0)
    panel.set_title("A sweep and its roofline\nshaded: the slower of link and computing; dotted: a plain reader")
    label_ends(panel, lines)
    return figure


def tokens_per_sweep(result: Result) -> Figure:
    """What a sweep yields against the nodes of its tree, chains apart from trees."""
    kinds: dict[str, list[dict]] = {}
    for row in result.rows:
        kind = row["tree"].partition(":")[0] if ":" in row["tree"] else "fixed tree"
        kinds.setdefault(kind, []).append(row)
    figure, (panel,) = new_figure(width=8.5)
    lines = []
    for style, (kind, rows) in enumerate(kinds.items()):
        rows.sort(key=lambda row: row["num_nodes"])
        sizes = [row["num_nodes"] for row in rows]
        lines.append(Line(kind, sizes, [row["tokens_per_sweep"] for row in rows], [0.0] * len(rows), style))
        draw_line(panel, lines[-1])
    powers_of_two(panel, sorted({row["num_nodes"] for row in result.rows}))
    panel.set_xlabel("nodes of the tree")
    panel.set_ylabel("tokens per sweep")
    panel.set_ylim(bottom=0)
    draw_reference(panel, 1.0, "no tree", min(row["num_nodes"] for row in result.rows))
    panel.set_title("What one sweep yields")
    label_ends(panel, lines)
    return figure


def acceptance(result: Result) -> Figure:
    """Share of sweeps whose accepted path reached each depth."""
    figure, (panel,) = new_figure(width=8.5)
    rows = [row for row in result.rows if row.get("accepted_per_pos")]
    for style, row in enumerate(rows):
        shares = row["accepted_per_pos"]
        label = row.get("name") or row["tree"]
        line = Line(label, range(1, len(shares) + 1), shares, [0.0] * len(shares), style)
        draw_line(panel, line, dashes="-" if style < len(COLOURS) else "--")  # where colours begin again
    if rows:
        panel.legend(frameon=False, fontsize=9)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_ylim(0, 1.03)
    panel.set_xlabel("depth")
    panel.set_ylabel("share of sweeps that got there")
    panel.set_title("How deep the draft's guesses hold")
    return figure


def _bars(names: list[str], values: list[float], ours: list[int], words: tuple[str, str]) -> Figure:
    """One bar each, ours in colour; `words` are the label of the axis and the title."""
    figure, (panel,) = new_figure(width=9)
    panel.barh(range(len(names)), values, color=[COLOURS[0] if index in ours else FAINT for index in range(len(names))])
    panel.grid(False, axis="y")
    panel.margins(x=0.08)
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    for row, value in enumerate(values):
        panel.annotate(f"{value:.2f}", (value, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    panel.set_xlabel(words[0])
    panel.set_title(words[1])
    return figure
