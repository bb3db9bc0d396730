"""Rejection rate against the number of children, for every rule (Sequoia, figure 3).

For nodes along texts that the target writes: the chance that none of k children is accepted. At k = 1 no rule can do
better than the distance of both distributions, |P - Q| / 2, which stands beside the curves.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from offload.bench.acceptance import Measured, chances, over_prompts, total_variation
from offload.bench.pair_text import Pair, Rows, logged_rows
from offload.bench.picture import Line, draw_line, draw_reference, label_ends, new_figure, powers_of_two
from offload.bench.scale import Scale
from offload.config import RULES, Sampling

TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
LEAST_RATE = 0.005  # a logarithmic axis has no room for zero: what is smaller is drawn here
Figures = dict[str, Any]


def measure(pair: Pair, scale: Scale) -> Figures:
    """Curves for every temperature and rule."""
    panels = []
    bar = tqdm(total=len(scale.temperatures) * len(RULES), desc="rejection", unit="curve")
    for temperature in scale.temperatures:
        sampling = Sampling(temperature=temperature, seed=2)
        rows = logged_rows(pair, sampling, scale.num_calibration, scale.num_calibration_tokens)
        curves = {}
        for rule in RULES:
            rate = rejection(rule, rows, sampling, scale.num_children)
            curves[rule] = {"rejection": rate.mean.tolist(), "standard_error": rate.error.tolist()}
            bar.update()
        distance = total_variation(rows, sampling).mean[0]
        panels.append({"temperature": temperature, "total_variation": float(distance), "curves": curves})
    bar.close()
    return {"num_children": list(scale.num_children), "panels": panels}


def rejection(rule: str, rows: Rows, sampling: Sampling, num_children: tuple[int, ...]) -> Measured:
    """One entry for each number of children; SpecTr's chances depend on that number, the others' do not."""
    if rule == "spectr":
        accepted_RC = np.stack([chances(rule, rows, sampling, k).sum(1) for k in num_children], axis=1)
    else:
        sum_RK = chances(rule, rows, sampling, max(num_children)).cumsum(1)
        accepted_RC = sum_RK[:, [k - 1 for k in num_children]]
    return over_prompts(np.clip(1 - accepted_RC, 0, 1), rows.num_prompts)


def table(figures: Figures) -> Iterator[list[str]]:
    yield ["T", "rule", *(f"k = {k}" for k in figures["num_children"]), "+- (last)"]
    for panel in figures["panels"]:
        for rule, curve in panel["curves"].items():
            rates = [f"{rate:.4f}" for rate in curve["rejection"]]
            yield [f"{panel['temperature']}", rule, *rates, f"{curve['standard_error'][-1]:.4f}"]
        yield [f"{panel['temperature']}", "|P - Q| / 2", f"{panel['total_variation']:.4f}"]


def draw(figures: Figures) -> Figure:
    figure, panels = new_figure(len(figures["panels"]), width=4.2 * len(figures["panels"]) + 1)
    num_children, all_lines = figures["num_children"], []
    panels[0].set_yscale("log")  # Sequoia's theorem 3.6 asks for a power of k, which is a straight line here
    for panel, part in zip(panels, figures["panels"], strict=True):
        lines = [
            Line(
                rule, num_children, np.maximum(curve["rejection"], LEAST_RATE).tolist(), curve["standard_error"], style
            )
            for style, (rule, curve) in enumerate(part["curves"].items())
        ]
        for line in lines:
            draw_line(panel, line)
        powers_of_two(panel, [k for k in num_children if k & (k - 1) == 0])
        draw_reference(panel, part["total_variation"], "|P - Q| / 2", num_children[-1] / 3)
        panel.set_title(f"T = {part['temperature']}", fontsize=10, loc="left")
        panel.set_xlabel("children of a node")
        all_lines.append(lines)
    panels[0].set_ylabel("chance that all children are rejected")
    panels[0].set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    panels[0].minorticks_off()
    lowest = min(rate for part in figures["panels"] for curve in part["curves"].values() for rate in curve["rejection"])
    panels[0].set_ylim(max(lowest, LEAST_RATE) / 1.5, 1)
    for panel, lines in zip(panels, all_lines, strict=True):
        label_ends(panel, lines)
    return figure
