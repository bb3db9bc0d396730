"""Do recurrent layers cost acceptance? Tokens a pass of a hybrid beside its full-attention twin.

Both are of one size and loss, and the packaged draft, which knows neither of them, fills the trees.
Prompts are held-out code. An exact tree changes nothing, so the share of both should be one.
"""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from offload.bench.harness.command import Bench, Findings, command
from offload.bench.harness.gate import Written
from offload.bench.harness.prompts import Prompt, encoded
from offload.bench.harness.record import Row
from offload.bench.harness.setting import PROMPT_TOKENS, Setting
from offload.bench.harness.tables import Column
from offload.bench.hybrid_pair.make import FIGURES, HYBRID, TWIN, hybrid_pair
from offload.checkpoint.packaged import PAIR
from offload.units import parse_size

TREE = "dynamic:64x16"
TEMPERATURES = (0.0, 0.8)
LIMIT = 0.05
_RAM = "2GiB"
_CONTEXT = 512


def setting_of(folder: Path) -> Setting:
    """Return one of both with the packaged draft, in memory."""
    return Setting(folder, PAIR / "draft", folder, parse_size(_RAM, "--ram"))


def texts_of(
    setting: Setting, prompts: Sequence[Prompt], temperature: float, num_new: int
) -> tuple[list[float], list[Written]]:
    """Return tokens a pass by prompt, and the texts; each prompt has a seed of its own."""
    yields = list[float]()
    written = list[Written]()
    with setting.open(TREE, context=_CONTEXT, dtype="float32") as decoder:
        for seed, prompt in enumerate(prompts):
            ids = encoded(decoder, prompt, PROMPT_TOKENS)
            done = decoder.generate(ids, max_new_tokens=num_new, temperature=temperature, seed=seed)
            yields.append(done.stats.tokens_per_sweep)
            written.append(Written.of(ids, done))
    return yields, written


def row_of(temperature: float, hybrid: Sequence[float], twin: Sequence[float]) -> Row:
    """Return means over prompts with their standard errors, and the ratio of both with its own.

    Prompts are the same, but what the two write is not, so the ratio's error is that of means.
    """
    found: Row = {"row": f"T = {temperature}", "num_texts": len(hybrid)}
    shares = list[float]()
    for name, values in ((HYBRID, hybrid), (TWIN, twin)):
        found[name] = statistics.fmean(values)
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        found[f"{name}_error"] = error
        shares.append(error / found[name])
    found["ratio"] = found[HYBRID] / found[TWIN]
    found["ratio_error"] = found["ratio"] * math.hypot(*shares)
    return found


@command("hybrid-pair", "quick")
def main(bench: Bench) -> Findings:
    """Tokens a pass of a hybrid beside a twin with full attention, of equal loss.

    Both are trained when they are not in the cache, which takes some five minutes on a core.
    """
    with bench.screen:
        pair = hybrid_pair(bench.screen)
    num_prompts, num_new = bench.effort((48, 96), (4, 32))
    prompts, _ = bench.prompts(num_prompts)
    settings = {name: setting_of(pair / name) for name in (HYBRID, TWIN)}
    rows = []
    written: dict[str, list[Written]] = {name: [] for name in settings}
    for temperature in TEMPERATURES:
        yields = {}
        for name, setting in settings.items():
            bench.screen.wait(f"the {name} at T = {temperature}")
            yields[name], texts = texts_of(setting, prompts, temperature, num_new)
            written[name] += texts
        rows.append(row_of(temperature, yields[HYBRID], yields[TWIN]))
    for name, setting in settings.items():
        setting.prove(written[name])
    losses = json.loads((pair / FIGURES).read_text())
    told = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
    return Findings(
        rows=rows,
        columns=[
            Column("tokens a pass", "row"),
            Column("texts", "num_texts"),
            Column("hybrid", HYBRID, ".3f"),
            Column("+-", f"{HYBRID}_error", ".3f"),
            Column("twin", TWIN, ".3f"),
            Column("+-", f"{TWIN}_error", ".3f"),
            Column("hybrid / twin", "ratio", ".3f"),
            Column("+-", "ratio_error", ".3f"),
        ],
        notes=[f"{TREE}; held-out loss in nats: {told}; the ratio should be within {LIMIT:.0%}"],
        settings={"tree": TREE, "losses": losses, "num_new": num_new},
    )
