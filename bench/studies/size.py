"""Tokens per step against tree size (Sequoia, figures 2 and 5a), measured and predicted, and the row `scalable`.

Every structure is measured with the rule `sequoia`; Sequoia's own trees with `match` too. The prediction is the paper's
product form, F(T) = sum over nodes of the product of p along the path, with p measured on other files.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tqdm import tqdm

from offload.bench.harness.picture import line
from offload.bench.studies.acceptance import Measured, acceptance_vector
from offload.bench.studies.pair_text import Figures, Pair, Scale, logged_rows
from offload.bench.studies.tree_walk import Steps, ratio_of, walk_all
from offload.config import Sampling
from offload.tree.topology import Topology, best_first, chain, expected_tokens, isotonic, k_ary, sequences

SAMPLING = Sampling(temperature=0.6, seed=1)
RULES = ("sequoia", "match")
SEQUENCE_COUNTS = (4, 8, 16)
WANTED_RATIO = 1.25


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
    points = [_point(job, measured[job.topology, job.rule], vectors[job.rule]) for job in jobs]
    steps = {(job.structure, job.rule, job.size): measured[job.topology, job.rule] for job in jobs}
    p = {rule: {"p": one.mean.tolist(), "standard_error": one.error.tolist()} for rule, one in vectors.items()}
    scalable = [_scalable(steps, rule, _largest(scale)) for rule in RULES]
    return {
        "temperature": SAMPLING.temperature,
        "acceptance": p,
        "trees": "Sequoia's are best-first for the isotonic fit of the measured vector; predictions use it unsmoothed",
        "points": points,
        "scalable": scalable,
        "table": list(_table(points, scalable)),
        "picture": [_panel(points, p["sequoia"]["p"][0], scale)],
    }


def _jobs(vectors: dict[str, Measured], scale: Scale) -> Iterator[Job]:
    for size in scale.sizes:
        for rule, p in vectors.items():
            yield Job("Sequoia", rule, size, best_first(isotonic(p.mean), size, min(scale.max_depth, size - 1)))
        yield Job("chain", "sequoia", size, chain(size - 1))
        yield Job("binary", "sequoia", size, k_ary(2, size))
        for count in (count for count in SEQUENCE_COUNTS if count < size and count <= scale.num_ranks):
            for rule in RULES if size == _largest(scale) else RULES[:1]:
                yield Job(f"{count} sequences", rule, size, sequences(count, -(-(size - 1) // count)))


def _largest(scale: Scale) -> int:
    return max(size for size in scale.sizes if size <= 512)


def _point(job: Job, steps: Steps, vector: Measured) -> Figures:
    shape = {"num_nodes": job.topology.num_nodes, "depth": job.topology.depth}
    names = {"structure": job.structure, "rule": job.rule, "size": job.size}
    return {**names, **shape, **steps.as_dict(), "predicted": expected_tokens(job.topology, vector.mean)}


def _scalable(steps: dict[tuple[str, str, int], Steps], rule: str, size: int) -> Figures:
    rivals = {name: one for (name, of, at), one in steps.items() if "sequences" in name and (of, at) == (rule, size)}
    best = max(rivals, key=lambda name: rivals[name].tokens_per_step)
    ratio, error = ratio_of(steps["Sequoia", rule, size], rivals[best])
    verdict = {"ratio": ratio, "standard_error": error, "wanted": WANTED_RATIO, "holds": ratio >= WANTED_RATIO}
    return {"rule": rule, "size": size, "best_rival": best, **verdict}


def _table(points: Sequence[Figures], scalable: Sequence[Figures]) -> Iterator[list[str]]:
    yield ["structure", "rule", "nodes", "depth", "tokens/step", "+-", "predicted"]
    for point in sorted(points, key=lambda point: (point["structure"], point["rule"], point["size"])):
        values = [f"{point[key]:.2f}" for key in ("tokens_per_step", "standard_error", "predicted")]
        yield [point["structure"], point["rule"], str(point["num_nodes"]), str(point["depth"]), *values]
    for row in scalable:
        verdict = f"{row['ratio']:.3f} +- {row['standard_error']:.3f} (wanted >= {row['wanted']})"
        yield [f"scalable: n = {row['size']}, {row['rule']}: Sequoia / {row['best_rival']} = {verdict}"]


def _panel(points: Sequence[Figures], p1: float, scale: Scale) -> Figures:
    lines = []
    drawn = [point for point in points if point["rule"] == "sequoia" or point["structure"] == "Sequoia"]
    for structure, rule in sorted({(point["structure"], point["rule"]) for point in drawn}):
        own = [point for point in drawn if (point["structure"], point["rule"]) == (structure, rule)]
        keys = ("num_nodes", "tokens_per_step", "standard_error", "predicted")
        nodes, tokens, error, predicted = ([point[key] for point in own] for key in keys)
        lines += [line(f"{structure}, {rule}", nodes, tokens, error), line("", nodes, predicted, dashed=True)]
    words = {"xlabel": "tree size (nodes)", "ylabel": "tokens per step", "title": "T = 0.6; dashed: product form"}
    return {"lines": lines, "ticks": list(scale.sizes), "levels": [[1 / (1 - p1), "limit of a chain"]], **words}
