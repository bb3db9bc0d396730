"""Rules and baselines: tokens per step against temperature and top-p with the tree fixed, and SpecInfer's trees.

`temperature` is Sequoia's figure 5b and table 6: all rules fill the same tree. `baselines` is its tables 4 and 5:
k x L sequences, drafted and verified as SpecInfer does, against Sequoia's trees of as many nodes.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from tqdm import tqdm

from offload.bench.acceptance import acceptance_vector
from offload.bench.pair_text import Pair, logged_rows
from offload.bench.picture import COLOURS, Line, draw_line, draw_reference, label_ends, new_figure
from offload.bench.scale import Scale
from offload.bench.tree_walk import Steps, ratio_of, walk_all
from offload.config import RULES, Sampling
from offload.tree.topology import Floats, Topology, best_first, isotonic, sequences

FIXED_NODES = 64
FIXED_FOR = Sampling(temperature=0.6, seed=3)
BASELINES = ((5, 8), (8, 8), (16, 48))
BASELINE_TEMPERATURES = (0.0, 0.6)
_CONTESTANTS = ("SpecInfer", "Sequoia, sequoia", "Sequoia, match")
Figures = dict[str, Any]


def smooth_vector(pair: Pair, scale: Scale, rule: str, sampling: Sampling) -> Floats:
    """The isotonic fit of the acceptance vector that the rule has on the calibration files."""
    rows = logged_rows(pair, sampling, scale.num_calibration, scale.num_calibration_tokens)
    return isotonic(acceptance_vector(rule, rows, sampling, scale.num_ranks).mean)


def measure_temperature(pair: Pair, scale: Scale) -> Figures:
    """Every rule on one tree, over temperatures without top-p and over top-p at T = 1.

    SpecTr tries all children of a node with one and the same chance, so it gains least from a tree whose first children
    carry most of what lies below.
    """
    tree = best_first(smooth_vector(pair, scale, "sequoia", FIXED_FOR), FIXED_NODES, scale.max_depth)
    settings = [Sampling(temperature=t, seed=4) for t in scale.temperatures]
    settings += [Sampling(temperature=1.0, top_p=top_p, seed=4) for top_p in scale.top_ps if top_p < 1]
    if 1.0 in scale.top_ps and 1.0 not in scale.temperatures:
        settings.append(Sampling(temperature=1.0, seed=4))
    prompts = pair.prompts("measure", scale.num_prompts)
    points = []
    for sampling, rule in tqdm([(s, rule) for s in settings for rule in RULES], desc="temperature", unit="run"):
        steps = walk_all(pair, prompts, tree, rule, sampling).run(scale.num_tokens)
        names = {"rule": rule, "temperature": sampling.temperature, "top_p": sampling.top_p}
        points.append({**names, **steps.as_dict()})
    shape = {"num_nodes": tree.num_nodes, "depth": tree.depth, "chosen_for": "rule sequoia at T = 0.6"}
    return {"tree": shape, "points": points}


def table_temperature(figures: Figures) -> Iterator[list[str]]:
    yield ["T", "top-p", *RULES, "+- (largest)"]
    for temperature, top_p in dict.fromkeys((p["temperature"], p["top_p"]) for p in figures["points"]):
        found = [p for p in figures["points"] if (p["temperature"], p["top_p"]) == (temperature, top_p)]
        values = [f"{point['tokens_per_step']:.2f}" for point in found]
        yield [f"{temperature}", f"{top_p}", *values, f"{max(point['standard_error'] for point in found):.2f}"]


def draw_temperature(figures: Figures) -> Figure:
    figure, panels = new_figure(2, width=9.5)
    at_top_p = {"temperature": [p for p in figures["points"] if p["top_p"] == 1]}
    at_top_p["top_p"] = [p for p in figures["points"] if p["temperature"] == 1]
    names = {"temperature": "temperature (top-p 1)", "top_p": "top-p (temperature 1)"}
    all_lines = []
    for panel, (key, points) in zip(panels, at_top_p.items(), strict=True):
        lines = list(_rule_lines(points, key))
        for line in lines:
            draw_line(panel, line)
        panel.set_xlabel(names[key])
        panel.set_xticks(sorted({point[key] for point in points}))
        all_lines.append(lines)
    panels[0].set_ylabel("tokens per step")
    panels[0].set_ylim(bottom=1)
    for panel, lines in zip(panels, all_lines, strict=True):
        label_ends(panel, lines)
    shape = figures["tree"]
    panels[0].set_title(f"one tree: {shape['num_nodes']} nodes, depth {shape['depth']}", fontsize=10, loc="left")
    return figure


def _rule_lines(points: list[Figures], key: str) -> Iterator[Line]:
    for style, rule in enumerate(RULES):
        of_rule = sorted((p for p in points if p["rule"] == rule), key=lambda point: point[key])
        if of_rule:
            columns = ([p[name] for p in of_rule] for name in (key, "tokens_per_step", "standard_error"))
            yield Line(rule, *columns, style)


class Contest(NamedTuple):
    """One baseline and its rivals of the same size."""

    name: str
    sampling: Sampling
    contestants: dict[str, tuple[Topology, str]]  # label -> tree, rule


def measure_baselines(pair: Pair, scale: Scale) -> Figures:
    """SpecInfer's sequences against Sequoia's trees, with the rules `sequoia` and `match`."""
    prompts, results = pair.prompts("measure", scale.num_prompts), []
    contests = list(_contests(pair, scale))
    bar = tqdm(total=sum(len(contest.contestants) for contest in contests), desc="baselines", unit="tree")
    for contest in contests:
        steps = {}
        for label, (topology, rule) in contest.contestants.items():
            steps[label] = walk_all(pair, prompts, topology, rule, contest.sampling).run(scale.num_tokens)
            bar.update()
        results.append(_result(contest, steps))
    bar.close()
    return {
        "note": "at T = 0 draws with replacement are all the same token, so SpecInfer's sequences begin with the "
        "draft's likeliest tokens there and are verified by `match`",
        "contests": results,
    }


def _contests(pair: Pair, scale: Scale) -> Iterator[Contest]:
    for temperature in BASELINE_TEMPERATURES:
        sampling = Sampling(temperature=temperature, seed=5)
        # Greedy, both rules accept the argmax and nothing else: one of them is enough.
        rules = ("match",) if sampling.is_greedy else ("sequoia", "match")
        vectors = {rule: smooth_vector(pair, scale, rule, sampling) for rule in rules}
        for count, length in BASELINES:
            trees = {
                f"Sequoia, {rule}": (best_first(p, 1 + count * length, scale.max_depth), rule)
                for rule, p in vectors.items()
            }
            specinfer = sequences(count, length), "match" if sampling.is_greedy else "specinfer"
            yield Contest(f"{count}x{length}", sampling, {"SpecInfer": specinfer, **trees})


def _result(contest: Contest, steps: dict[str, Steps]) -> Figures:
    rows = []
    for label, (topology, rule) in contest.contestants.items():
        ratio, error = ratio_of(steps[label], steps["SpecInfer"])
        shape = {"num_nodes": topology.num_nodes, "depth": topology.depth, "rule": rule}
        rows.append({"label": label, **shape, **steps[label].as_dict(), "ratio": ratio, "ratio_standard_error": error})
    return {"baseline": contest.name, "temperature": contest.sampling.temperature, "rows": rows}


def table_baselines(figures: Figures) -> Iterator[list[str]]:
    yield ["T", "baseline", "tree", "nodes", "depth", "tokens/step", "+-", "ratio", "+-"]
    for contest in figures["contests"]:
        for row in contest["rows"]:
            shape = [str(row["num_nodes"]), str(row["depth"])]
            keys = ("tokens_per_step", "standard_error", "ratio", "ratio_standard_error")
            values = [f"{row[key]:.2f}" for key in keys]
            yield [f"{contest['temperature']}", contest["baseline"], row["label"], *shape, *values]


def draw_baselines(figures: Figures) -> Figure:
    figure, panels = new_figure(len(BASELINE_TEMPERATURES), width=9.5)
    for panel, temperature in zip(panels, BASELINE_TEMPERATURES, strict=True):
        contests = [contest for contest in figures["contests"] if contest["temperature"] == temperature]
        labels = [row["label"] for row in contests[0]["rows"]]
        for index, label in enumerate(labels):
            rows = [contest["rows"][index] for contest in contests]
            x = [place + (index - (len(labels) - 1) / 2) * 0.26 for place in range(len(rows))]
            heights, errors = ([row[key] for row in rows] for key in ("tokens_per_step", "standard_error"))
            bars = panel.bar(
                x, heights, 0.24, yerr=errors, capsize=2, color=COLOURS[_CONTESTANTS.index(label)], label=label
            )
            panel.bar_label(bars, [f"{height:.2f}" for height in heights], fontsize=8, padding=2)
        panel.set_xticks(range(len(contests)), [f"{contest['baseline']}" for contest in contests])
        panel.set_xlabel("SpecInfer's sequences; Sequoia has as many nodes")
        panel.set_title(f"T = {temperature}", fontsize=10, loc="left")
        panel.set_xlim(-0.5, len(contests))
        draw_reference(panel, 1, "no tree", len(contests) - 0.45)
        panel.legend(frameon=False, fontsize=9, loc="upper left")
    panels[0].set_ylabel("tokens per step")
    panels[0].margins(y=0.18)
    return figure
