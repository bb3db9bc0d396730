"""Rejection rate against the number of children, for every rule (Sequoia, figure 3).

For nodes along texts that the target writes: the chance that none of k children is accepted. At k = 1 no rule can do
better than the distance of both distributions, |P - Q| / 2, which stands beside the curves.
"""

import numpy as np
from tqdm import tqdm

from offload.bench.harness.picture import line
from offload.bench.studies.acceptance import Measured, chances, over_prompts, total_variation
from offload.bench.studies.pair_text import Figures, Pair, Rows, Scale, logged_rows
from offload.config import RULES, Sampling

LEAST_RATE = 0.005  # a logarithmic axis has no room for zero: what is smaller is drawn here


def measure(pair: Pair, scale: Scale) -> Figures:
    panels, picture, children = [], [], scale.num_children
    table = [["T", "rule", *(f"k = {k}" for k in children), "+- (last)"]]
    for temperature in tqdm(scale.temperatures, desc="rejection", unit="temperature"):
        sampling = Sampling(temperature=temperature, seed=2)
        rows = logged_rows(pair, sampling, scale.num_calibration, scale.num_calibration_tokens)
        found = {rule: rejection(rule, rows, sampling, children) for rule in RULES}
        distance = float(total_variation(rows, sampling).mean[0])
        curves = {rule: {"rejection": rate.mean.tolist(), "standard_error": rate.error.tolist()} for rule,
            rate in found.items()}  # fmt: skip
        panels.append({"temperature": temperature, "total_variation": distance, "curves": curves})
        for rule, rate in found.items():
            table.append([f"{temperature}", rule, *(f"{one:.4f}" for one in rate.mean), f"{rate.error[-1]:.4f}"])
        table.append([f"{temperature}", "|P - Q| / 2", f"{distance:.4f}"])
        lines = [line(rule, children, np.maximum(rate.mean, LEAST_RATE).tolist(), rate.error.tolist()) for rule,
            rate in found.items()]  # fmt: skip
        words = {"xlabel": "children of a node", "ylabel": "chance that all children are rejected"}
        picture.append({"title": f"T = {temperature}", "lines": lines, "levels": [[distance, "|P - Q| / 2"]], **words,
                        "log_y": True, "ticks": [k for k in children if k & (k - 1) == 0]})  # fmt: skip
    return {"num_children": list(children), "panels": panels, "table": table, "picture": picture}


def rejection(rule: str, rows: Rows, sampling: Sampling, num_children: tuple[int, ...]) -> Measured:
    """One entry for each number of children; SpecTr's chances depend on that number, the others' do not."""
    if rule == "spectr":
        accepted_RC = np.stack([chances(rule, rows, sampling, k).sum(1) for k in num_children], axis=1)
    else:
        accepted_RC = chances(rule, rows, sampling, max(num_children)).cumsum(1)[:, [k - 1 for k in num_children]]
    return over_prompts(np.clip(1 - accepted_RC, 0, 1), rows.num_prompts)
