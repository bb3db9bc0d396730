"""Tokens a pass of ways to draft for the packaged target: what the commands of trained pairs share.

Every way writes behind the same held-out prompts, with trees of one size, and each text is proved.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from offload.bench.harness.command import Bench, Findings
from offload.bench.harness.gate import Written
from offload.bench.harness.setting import PROMPT_TOKENS, Setting
from offload.bench.harness.tables import Better, Column, Row, check
from offload.bench.pairs.training import held_out_texts, library_ids
from offload.stats import Stats
from offload.units import parse_size

TREE = "dynamic:64x16"
_RAM = "2GiB"
_CONTEXT = 512


class Way(NamedTuple):
    draft: Path | None
    has_lookup: bool = False
    rule: str = "match"


class Share(NamedTuple):
    """A figure of one way over the largest of others, and what is wanted of it at temperatures."""

    title: str
    way: str
    others: Sequence[str]
    wanted: float
    better: Better
    figure: str = "tokens"  # or drafting: seconds of it a pass
    temperatures: Sequence[float] | None = None  # of those that were measured; None for all

    def value(self, row: Row) -> float:
        """Return it for a row of all ways."""
        others = [row[_key(other, self.figure)] for other in self.others]
        share: float = row[_key(self.way, self.figure)] / max(others)
        return share


def compare_ways(
    bench: Bench,
    target: Path,
    ways: Mapping[str, Way],
    temperatures: Sequence[float],
    shares: Sequence[Share],
    most_tokens: int,
) -> Findings:
    """Return a row for each temperature, with the shares; no pass can bring more than `most_tokens`."""
    num_prompts, num_new = bench.effort((24, 128), (4, 48))
    rows = list[Row]()
    with bench.screen:
        prompts = held_out_texts(library_ids(held_out=True), PROMPT_TOKENS, num_prompts)
        for temperature in temperatures:
            row = {
                "temperature": temperature,
                **figures_of(target, ways, prompts, temperature, num_new),
            }
            rows.append(bench.row({**row, **{share.title: share.value(row) for share in shares}}))
    columns = (
        Column("T", "temperature", ".1f"),
        *(Column(name, _key(name, "tokens"), ".2f") for name in ways),
        *(Column(share.title, share.title, ".2f") for share in shares),
    )
    checks = list[Row]()
    for share in shares:
        wanted_at = temperatures if share.temperatures is None else share.temperatures
        seen = [row[share.title] for row in rows if row["temperature"] in wanted_at]
        worst = min(seen) if share.better == "higher" else max(seen)
        checks.append(check(f"{TREE}: {share.title}", seen, share.wanted, share.better, worst))
    return Findings(
        rows=rows,
        tables=[(columns, rows)],
        checks=checks,
        settings={"tree": TREE, "num_new": num_new},
        ceiling={"tokens_per_sweep": most_tokens},
    )


def figures_of(
    target: Path, ways: Mapping[str, Way], prompts: Tensor, temperature: float, num_new: int
) -> Row:
    """Return each way's mean tokens a pass and seconds of drafting a pass. Raises `UserError`."""
    row: Row = {}
    for name, way in ways.items():
        setting = Setting(target, way.draft, target, parse_size(_RAM, "--ram"))
        options = {"lookup": way.has_lookup, "rule": way.rule}
        figures, written = texts_of(setting, prompts, temperature, num_new, **options)
        setting._replace(draft=None).prove(written)
        row[_key(name, "tokens")] = statistics.fmean(each.tokens_per_sweep for each in figures)
        drafting_s = statistics.fmean(each.draft_s / each.num_sweeps for each in figures)
        row[_key(name, "drafting")] = drafting_s
    return row


def texts_of(
    setting: Setting, prompts: Tensor, temperature: float, num_new: int, **options: Any
) -> tuple[list[Stats], list[Written]]:
    """Return the figures of each prompt's text, and the texts; each prompt has a seed of its own."""
    figures = list[Stats]()
    written = list[Written]()
    with setting.open(TREE, context=_CONTEXT, dtype="float32", **options) as decoder:
        for seed, ids in enumerate(prompts.tolist()):
            done = decoder.generate(ids, max_new_tokens=num_new, temperature=temperature, seed=seed)
            figures.append(done.stats)
            written.append(Written.from_result(ids, done))
    return figures, written


def _key(name: str, figure: str) -> str:
    return f"{name}_{figure}"
