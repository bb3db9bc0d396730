"""Rules and baselines: tokens per step against temperature and top-p with the tree fixed, and SpecInfer's trees.

`temperature` is Sequoia's figure 5b and table 6: all rules fill the same tree. `baselines` is its tables 4 and 5:
k x L sequences, drafted and verified as SpecInfer does, against Sequoia's trees of as many nodes.
"""

from collections.abc import Iterator
from typing import NamedTuple

from tqdm import tqdm

from offload.bench.harness.picture import line
from offload.bench.studies.acceptance import acceptance_vector
from offload.bench.studies.pair_text import Figures, Pair, Scale, logged_rows
from offload.bench.studies.tree_walk import ratio_of, walk_all
from offload.config import RULES, Sampling
from offload.tree.topology import Floats, Topology, best_first, isotonic, sequences

FIXED_NODES = 64
FIXED_FOR = Sampling(temperature=0.6, seed=3)
BASELINES = ((5, 8), (8, 8), (16, 48))
BASELINE_TEMPERATURES = (0.0, 0.6)


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
    settings = [(t, 1.0) for t in scale.temperatures] + [(1.0, top_p) for top_p in scale.top_ps]
    prompts, points, table = pair.prompts("measure", scale.num_prompts), [], [["T", "top-p", *RULES, "+- (largest)"]]
    for temperature, top_p in tqdm(dict.fromkeys(settings), desc="temperature", unit="setting"):
        sampling, own = Sampling(temperature=temperature, top_p=top_p, seed=4), []
        for rule in RULES:
            steps = walk_all(pair, prompts, tree, rule, sampling).run(scale.num_tokens)
            own.append({"rule": rule, "temperature": temperature, "top_p": top_p, **steps.as_dict()})
        figures = [f"{point['tokens_per_step']:.2f}" for point in own]
        table.append([f"{temperature}", f"{top_p}", *figures, f"{max(point['standard_error'] for point in own):.2f}"])
        points += own
    shape = {"num_nodes": tree.num_nodes, "depth": tree.depth, "chosen_for": "rule sequoia at T = 0.6"}
    picture = [_panel(points, key, other) for key, other in (("temperature", "top_p"), ("top_p", "temperature"))]
    return {"tree": shape, "points": points, "table": table, "picture": picture}


def _panel(points: list[Figures], key: str, other: str) -> Figures:
    lines = []
    for rule in RULES:
        own = sorted((p for p in points if p["rule"] == rule and p[other] == 1), key=lambda point: point[key])
        lines.append(line(rule, *([p[name] for p in own] for name in (key, "tokens_per_step", "standard_error"))))
    return {
        "lines": lines,
        "xlabel": f"{key} ({other} 1)",
        "ylabel": "tokens per step",
        "title": f"{FIXED_NODES} nodes",
    }


class Contest(NamedTuple):
    """One baseline and its rivals of the same size."""

    name: str
    sampling: Sampling
    contestants: dict[str, tuple[Topology, str]]  # label -> tree, rule


def measure_baselines(pair: Pair, scale: Scale) -> Figures:
    """SpecInfer's sequences against Sequoia's trees, with the rules `sequoia` and `match`."""
    prompts, results = pair.prompts("measure", scale.num_prompts), []
    table = [["T", "baseline", "tree", "nodes", "depth", "tokens/step", "+-", "ratio", "+-"]]
    for contest in tqdm(list(_contests(pair, scale)), desc="baselines", unit="contest"):
        steps, rows = {}, []
        for label, (topology, rule) in contest.contestants.items():
            steps[label] = walk_all(pair, prompts, topology, rule, contest.sampling).run(scale.num_tokens)
            ratio, error = ratio_of(steps[label], steps["SpecInfer"])
            shape = {"num_nodes": topology.num_nodes, "depth": topology.depth, "rule": rule}
            ratios = {"ratio": ratio, "ratio_standard_error": error}
            rows.append({"label": label, **shape, **steps[label].as_dict(), **ratios})
            keys = ("tokens_per_step", "standard_error", "ratio", "ratio_standard_error")
            names = [
                f"{contest.sampling.temperature}",
                contest.name,
                label,
                f"{topology.num_nodes}",
                f"{topology.depth}",
            ]
            table.append([*names, *(f"{rows[-1][key]:.2f}" for key in keys)])
        results.append({"baseline": contest.name, "temperature": contest.sampling.temperature, "rows": rows})
    note = "at T = 0 draws with replacement are all the same token, so SpecInfer's sequences begin with the draft's " \
           "likeliest tokens there and are verified by `match`"  # fmt: skip
    picture = [_bars(results, temperature) for temperature in BASELINE_TEMPERATURES]
    return {"note": note, "contests": results, "table": table, "picture": picture}


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


def _bars(results: list[Figures], temperature: float) -> Figures:
    own = [contest["rows"] for contest in results if contest["temperature"] == temperature]
    labels = [row["label"] for row in own[0]]
    heights = [
        {
            "label": label,
            "y": [rows[at]["tokens_per_step"] for rows in own],
            "error": [rows[at]["standard_error"] for rows in own],
        }
        for at, label in enumerate(labels)
    ]
    names = [f"{count}x{length}" for count, length in BASELINES]
    words = {"title": f"T = {temperature}", "xlabel": "SpecInfer's sequences; Sequoia has as many nodes"}
    return {"bars": heights, "names": names, "levels": [[1, "no tree"]], "ylabel": "tokens per step", **words}
