"""The tree chosen for the machine against trees of a fixed size (Sequoia, figure 5c and table 3).

The pair's target is inflated and really streamed: once with the disk as it is, once with the link slowed down to a
fifth, as if the GPU were five times faster than its wire. One tune serves both.
"""

from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

from offload.bench import tree_choice
from offload.bench.pair_text import Pair
from offload.bench.picture import COLOURS, Line, draw_line, draw_reference, label_ends, new_figure, powers_of_two
from offload.bench.scale import FULL, QUICK, Scale
from offload.bench.tree_choice import Effort

QUICK_EFFORT = Effort(1024, (16, 64, 256), (6, 14), (1, 1), 3)
TINY_EFFORT = Effort(32, (8, 16), (3,), (1, 1), 1, "16x4")
Figures = dict[str, Any]


def measure(pair: Pair, scale: Scale) -> Figures:
    """Seconds per token over a grid of sizes and depths, with the tree that the optimiser takes in its midst."""
    effort = {FULL: tree_choice.FULL, QUICK: QUICK_EFFORT}.get(scale, TINY_EFFORT)
    return {"links": tree_choice.hardware_aware("1GB" if scale in (FULL, QUICK) else "60MB", effort)}


def best_of_size(link: Figures) -> dict[int, float]:
    """Seconds per token of every size in the grid, with the depth that suits it best."""
    best: dict[int, float] = {}
    for shape, seconds in link["s_per_token"].items():
        size = int(shape.split("x")[0])
        best[size] = min(seconds, best.get(size, seconds))
    return dict(sorted(best.items()))


def table(figures: Figures) -> Iterator[list[str]]:
    yield ["link", "tree", "s/token", "against the chosen one"]
    for link in figures["links"]:
        chosen_s = link["s_per_token"][link["chosen"]]
        yield [link["link"], f"{link['chosen']}, chosen", f"{chosen_s:.4f}", "1.00"]
        for size, seconds in best_of_size(link).items():
            yield [link["link"], f"{size}, best depth", f"{seconds:.4f}", f"{seconds / chosen_s:.2f}"]


def draw(figures: Figures) -> Figure:
    figure, panels = new_figure(len(figures["links"]), width=9.5)
    for panel, link in zip(panels, figures["links"], strict=True):
        seconds, best = link["s_per_token"], best_of_size(link)
        one_s = seconds["1x0"]
        sizes = [size for size in best if size > 1]
        line = Line("best depth", sizes, [one_s / best[size] for size in sizes], [0.0] * len(sizes), 0)
        draw_line(panel, line)
        size, at = int(link["chosen"].split("x")[0]), one_s / seconds[link["chosen"]]
        panel.plot([size], [at], marker="*", markersize=16, color=COLOURS[1], linestyle="none")
        panel.annotate(f"chosen: {link['chosen']}", (size, at), xytext=(0, 12), textcoords="offset points", ha="center")
        powers_of_two(panel, sizes)
        draw_reference(panel, 1, "no tree", sizes[0])
        label_ends(panel, [line])
        panel.set_xlabel("tree size (nodes)")
        panel.set_title(f"link {link['link']}", fontsize=10, loc="left")
    panels[0].set_ylabel("times the speed without a tree")
    panels[0].set_ylim(bottom=0)
    return figure
