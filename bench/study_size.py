"""Tokens per step against tree size (Sequoia, figures 2 and 5a), measured and predicted, and the row `scalable`.

Every structure is measured with the rule `sequoia`; Sequoia's own trees with `match` too. The prediction is the paper's
product form, F(T) = sum over nodes of the product of p along the path, with p measured on other files.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from tqdm import tqdm

from offload.bench.acceptance import Measured, acceptance_vector
from offload.bench.pair_text import Pair, logged_rows
from offload.bench.picture import (
    Line,
    draw_line,
    draw_prediction,
    draw_reference,
    label_ends,
    new_figure,
    powers_of_two,
)
from offload.bench.scale import Scale
from offload.bench.tree_walk import Steps, ratio_of, walk_all
from offload.config import Sampling
from offload.tree.topology import Topology, best_first, chain, expected_tokens, isotonic, k_ary, sequences

SAMPLING = Sampling(temperature=0.6, seed=1)
RULES = ("sequoia", "match")
SEQUENCE_COUNTS = (4, 8, 16)
WANTED_RATIO = 1.25
Figures = dict[str, Any]
Vectors = dict[str, Measured]


class Job(NamedTuple):
    """One point of the picture."""

    structure: str
    rule: str
    size: int  # as asked for; sequences are rounded up to whole ones
    topology: Topology


def measure(pair: Pair, scale: Scale) -> Figures:
    """All points, and Sequoia's lead over the best sequences at the largest size up to 512."""
    rows = logged_rows(pair, SAMPLING, scale.num_calibration, scale.num_calibration_tokens)
    vectors = {rule: acceptance_vector(rule, rows, SAMPLING, scale.num_ranks) for rule in RULES}
    jobs, prompts = list(_jobs(vectors, scale)), pair.prompts("measure", scale.num_prompts)
    measured: dict[tuple[Topology, str], Steps] = {}  # the smallest trees are the same whatever the structure
    for key in tqdm(dict.fromkeys((job.topology, job.rule) for job in jobs), desc="size", unit="tree"):
        measured[key] = walk_all(pair, prompts, *key, SAMPLING).run(scale.num_tokens)
    steps = {(job.structure, job.rule, job.size): measured[job.topology, job.rule] for job in jobs}
    return {
        "temperature": SAMPLING.temperature,
        "acceptance": {rule: {"p": p.mean.tolist(), "standard_error": p.error.tolist()} for rule, p in vectors.items()},
        "trees": "Sequoia's are best-first for the isotonic fit of the measured vector; predictions use it unsmoothed",
        "points": [_point(job, steps[job.structure, job.rule, job.size], vectors) for job in jobs],
        "scalable": [_scalable(steps, rule, _largest(scale)) for rule in RULES],
    }


def _jobs(vectors: Vectors, scale: Scale) -> Iterator[Job]:
    for size in scale.sizes:
        for rule, p in vectors.items():
            topology = best_first(isotonic(p.mean), size, min(scale.max_depth, size - 1))
            yield Job("Sequoia", rule, size, topology)
        yield Job("chain", "sequoia", size, chain(size - 1))
        yield Job("binary", "sequoia", size, k_ary(2, size))
        for count in (count for count in SEQUENCE_COUNTS if count < size and count <= scale.num_ranks):
            for rule in RULES if size == _largest(scale) else RULES[:1]:
                yield Job(f"{count} sequences", rule, size, sequences(count, -(-(size - 1) // count)))


def _largest(scale: Scale) -> int:
    """The size of the row `scalable`."""
    return max(size for size in scale.sizes if size <= 512)


def _point(job: Job, steps: Steps, vectors: Vectors) -> Figures:
    shape = {"num_nodes": job.topology.num_nodes, "depth": job.topology.depth}
    predicted = expected_tokens(job.topology, vectors[job.rule].mean)
    names = {"structure": job.structure, "rule": job.rule, "size": job.size}
    return {**names, **shape, **steps.as_dict(), "predicted": predicted}


def _scalable(steps: dict[tuple[str, str, int], Steps], rule: str, size: int) -> Figures:
    """Against the luckiest of the three, so chance works against Sequoia here."""
    rivals = {name: one for (name, of, at), one in steps.items() if "sequences" in name and (of, at) == (rule, size)}
    best = max(rivals, key=lambda name: rivals[name].tokens_per_step)
    ratio, error = ratio_of(steps["Sequoia", rule, size], rivals[best])
    return {
        "rule": rule,
        "size": size,
        "best_rival": best,
        "ratio": ratio,
        "standard_error": error,
        "wanted": WANTED_RATIO,
        "holds": ratio >= WANTED_RATIO,
    }


def table(figures: Figures) -> Iterator[list[str]]:
    yield ["structure", "rule", "nodes", "depth", "tokens/step", "+-", "predicted"]
    for point in sorted(figures["points"], key=lambda point: (point["structure"], point["rule"], point["size"])):
        counts = [str(point["num_nodes"]), str(point["depth"])]
        values = [f"{point[key]:.2f}" for key in ("tokens_per_step", "standard_error", "predicted")]
        yield [point["structure"], point["rule"], *counts, *values]
    for row in figures["scalable"]:
        verdict = f"{row['ratio']:.3f} +- {row['standard_error']:.3f} (wanted >= {row['wanted']})"
        yield [f"scalable: n = {row['size']}, {row['rule']}: Sequoia / {row['best_rival']} = {verdict}"]


def draw(figures: Figures) -> Figure:
    figure, (panel,) = new_figure(width=8.2)
    lines = []
    names = sorted({(point["structure"], point["rule"]) for point in figures["points"] if _is_drawn(point)})
    for style, (structure, rule) in enumerate(names):
        points = [p for p in figures["points"] if (p["structure"], p["rule"]) == (structure, rule)]
        size, tokens, error, predicted = (
            [point[key] for point in points] for key in ("num_nodes", "tokens_per_step", "standard_error", "predicted")
        )
        lines.append(Line(structure if rule == "sequoia" else f"{structure}, {rule}", size, tokens, error, style))
        draw_line(panel, lines[-1])
        draw_prediction(panel, Line("", size, predicted, [], style))
    powers_of_two(panel, sorted({point["size"] for point in figures["points"]}))
    p1 = figures["acceptance"]["sequoia"]["p"][0]
    draw_reference(panel, 1 / (1 - p1), "limit of a chain, 1 / (1 - p1)", 1)
    label_ends(panel, lines)
    panel.set(xlabel="tree size (nodes)", ylabel="tokens per step", ylim=(0.8, None))
    panel.set_title(f"T = {figures['temperature']}, rule sequoia; dashed: product form", fontsize=10, loc="left")
    return figure


def _is_drawn(point: Figures) -> bool:
    return point["rule"] == "sequoia" or point["structure"] == "Sequoia"
