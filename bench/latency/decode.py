"""Tokens per second and latencies of whole generations: prompts x temperatures x rules x trees.

Without `--tree` it is `auto`, chosen without a profile, beside one token per pass. For every prompt
the trees take turns, and between any two runs a plain reader looks at the link (on a device: copies
to it): what a run used of it is a share of the ceiling just before and after, or of what the run
itself got where that was more, so no share is above 1. `sequoia` and `pipeinfer` are the protocols
of those papers (2402.12374: 128 + 128 tokens at T = 0 and 0.6; 2407.11798: 128 + 512, greedy).
`trees`, `sizes` and `rules` are what Sequoia's figures 2 and 5 ask, on the packaged pair, resident:
what a sweep yields does not depend on streaming. `predicted_tokens_per_sweep` is the product form
of its section 3.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import mean, median
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from offload.bench.harness.command import (
    Bench,
    Effort,
    Findings,
    command,
    flag,
    link_ceiling,
    one_of,
)
from offload.bench.harness.gate import Written
from offload.bench.harness.metrics import Burst, acceptance_by_depth, followed, latencies
from offload.bench.harness.models import resident_pair
from offload.bench.harness.picture import draw_decoding
from offload.bench.harness.prompts import Prompt, encoded
from offload.bench.harness.setting import PROMPT_TOKENS, Need, Setting
from offload.bench.harness.steps import kernel_rows
from offload.bench.harness.tables import Column, Guard, Row
from offload.engine.decoder import Decoder
from offload.engine.generation import Generation
from offload.errors import UserError
from offload.rules import RULES, drafting_of
from offload.sampling_options import Sampling
from offload.trees.spec import label_of, parse_tree, tree_to_fill

# tokens of a question in its chat template, which is not cut
_MOST_PROMPT_TOKENS = 512
# a run whose passes wait for less than this share is not bound by the link
_STALLED_SHARE = 0.05


class Case(NamedTuple):
    temperature: float
    rule: str
    tree: str
    sources: str = ""  # what guesses, where that is compared

    @property
    def is_plain(self) -> bool:
        """Whether it is one token per pass, for which temperature and rule do not matter."""
        return self.tree == "none"

    @property
    def name(self) -> str:
        words = f"T={self.temperature:g} {self.rule} {self.tree} {self.sources}".rstrip()
        return self.tree if self.is_plain else words


@dataclass(frozen=True, slots=True)
class Runs(Effort):
    """The runs that are measured, of all these with each other."""

    trees: tuple[str, ...] = ("none", "auto")  # the baseline first
    temperatures: tuple[float, ...] = (0.0, 0.6)
    rules: tuple[str, ...] = ("match",)
    sources: tuple[str, ...] = ("",)

    def cases(self) -> list[Case]:
        """Return all cases, the baseline once and first; a static tree where a rule needs one."""
        every = product(self.temperatures, self.rules, self.trees, self.sources)
        cases = [
            Case(at, rule, tree_under(rule, tree), sources) for at, rule, tree, sources in every
        ]
        plain = next(case for case in cases if case.is_plain)
        others = dict.fromkeys(case for case in cases if not case.is_plain)
        return [plain._replace(sources=""), *others]

    def need(self) -> Need:
        """Return the largest of what is opened; beside `auto`, which finds its own, is none."""
        # one that keeps distributions takes the most memory
        rule = min(self.rules, key=lambda rule: not drafting_of(rule).keeps_distributions)
        trees = [tree_under(rule, tree) for tree in self.trees]
        largest = max(trees, key=lambda tree: parse_tree(tree).num_nodes)
        return Need(largest, _MOST_PROMPT_TOKENS + self.num_tokens, rule)

    def open(self, setting: Setting) -> Decoder:
        need = self.need()
        return setting.open(need.tree, context=need.context, rule=need.rule)


_STATIC = ("16x8", "32x12", "64x16", "128x20", "256x20", "512x24")
_CHAINS = ("chain:3", "chain:7", "chain:15", "sequences:3x5", "sequences:7x9")
_SIZES = ("none", *_CHAINS, *_STATIC)
_TREES = (*_SIZES, *(f"grown:{tree}" for tree in _STATIC))
_WARM = (0.2, 0.6, 1.0)
FULL = Runs(8, 128, 8)
# short runs of many prompts: which ones are taken decides more than all else
QUICK = Runs(5, 32, 3)
PRESETS = {
    "sequoia": Runs(8, 128, 8),
    "pipeinfer": Runs(4, 512, 8, temperatures=(0.0,)),
    "trees": Runs(8, 64, 2, trees=_TREES, temperatures=(0.0,)),
    "sizes": Runs(16, 64, 2, trees=_SIZES, temperatures=(0.6,), rules=("sequoia", "match")),
    "rules": Runs(16, 64, 2, trees=("none", "64x16"), temperatures=_WARM, rules=tuple(RULES)),
}
RESIDENT = ("trees", "sizes", "rules")


def tree_under(rule: str, tree: str) -> str:
    """Return the tree for a rule; one that keeps distributions gets the static one."""
    return tree.removeprefix("grown:") if drafting_of(rule).keeps_distributions else tree


class Timed(NamedTuple):
    prompt: str
    case: Case
    bursts: list[Burst]
    result: Generation
    # None where nothing is streamed
    link_utilisation: float | None


class Measured(NamedTuple):
    runs: list[Timed]
    written: list[Written]
    ceilings: list[float]
    # what only an open decoder knows
    settings: Row

    @property
    def ceiling(self) -> Row:
        if not self.ceilings:
            return {"bytes_per_s": None}
        return {"bytes_per_s": median(self.ceilings), "samples": self.ceilings}

    @property
    def least_pass_s(self) -> float | None:
        """Return the time of a pass's bytes at the ceiling; None where nothing is streamed."""
        rate = self.ceiling["bytes_per_s"]
        return rate and self.settings["streamed_bytes"] / rate


def measure(
    bench: Bench,
    setting: Setting,
    decoder: Decoder,
    effort: Runs,
    chosen: Sequence[Prompt],
    *,
    others: Mapping[str, Decoder] = MappingProxyType({}),
) -> Measured:
    """Measure all runs, prompt by prompt; `others` decode the cases that name their sources."""
    cases = effort.cases()
    measured = Measured([], [], [], {})
    first_ids = encoded(decoder, chosen[0], PROMPT_TOKENS)
    # a device records the widths of each tree
    for case in cases if setting.opened.has_own_memory else cases[:1]:
        timed_run(others.get(case.sources, decoder), first_ids, case, 2, seed=0)
    ceilings = measured.ceilings

    def look_at_link() -> None:
        rate = link_ceiling(setting, decoder.plan)
        ceilings.extend([] if rate is None else [rate])

    look_at_link()
    for (seed, prompt), case in bench.turns(enumerate(chosen), cases, "decoding"):
        ids = encoded(decoder, prompt, PROMPT_TOKENS)
        decoder_used = others.get(case.sources, decoder)
        bursts, result = timed_run(decoder_used, ids, case, effort.length(case.tree), seed=seed)
        look_at_link()
        # A run that got more than the readings beside it shows what the link gave meanwhile.
        rate = result.stats.link_bytes_per_s
        used = rate / max(mean(ceilings[-2:]), rate) if ceilings else None
        measured.runs.append(Timed(prompt.name, case, bursts, result, used))
        measured.written.append(Written.from_result(ids, result))
        rates = {name: getattr(result.stats, name) for name in ("tokens_per_s", "tokens_per_sweep")}
        bench.note({"name": case.name, "prompt": prompt.name, **rates})
    measured.settings.update(
        num_threads=decoder.num_threads,
        streamed_bytes=decoder.plan.streamed_bytes,
        kernels=kernel_rows(decoder),
    )
    return measured


def timed_run(
    decoder: Decoder, prompt_ids: list[int], case: Case, num_tokens: int, *, seed: int
) -> tuple[list[Burst], Generation]:
    sampling = Sampling(temperature=case.temperature, seed=seed)
    options: dict[str, Any] = {"max_new_tokens": num_tokens, "tree": case.tree, "rule": case.rule}
    return followed(decoder.run(prompt_ids, sampling, **options))


def rows_of(runs: Sequence[Timed]) -> list[Row]:
    """Return one row per case; speed-ups are against the baseline, whose runs come first."""
    cases = dict.fromkeys(run.case for run in runs)
    plain, *rows = [_row(case, [run for run in runs if run.case == case]) for case in cases]
    for row in rows if plain["decode_tokens_per_s"] else ():
        row["speedup"] = row["decode_tokens_per_s"] / plain["decode_tokens_per_s"]
        pairs = zip(row["tokens_per_s_samples"], plain["tokens_per_s_samples"], strict=True)
        row["speedup_samples"] = [fast / slow if slow else 0.0 for fast, slow in pairs]
    return [plain, *rows]


def _row(case: Case, runs: Sequence[Timed]) -> Row:
    stats = [run.result.stats for run in runs]
    accepted = [count for text in stats for count in text.accepted_per_sweep]
    num_sweeps = len(accepted)
    # a dynamic tree may be smaller than its bounds
    is_dynamic = any(text.is_tree_dynamic for text in stats)
    num_draft_tokens = sum((text.tree_num_nodes - 1) * text.num_sweeps for text in stats)
    used = [run.link_utilisation for run in runs if run.link_utilisation is not None]
    row: Row = {"name": case.name, **case._asdict(), **latencies([run.bursts for run in runs])}
    for name in ("tokens_per_s", "tokens_per_sweep"):
        row[f"{name}_samples"] = [getattr(text, name) for text in stats]
    for name in ("peak_rss_bytes", "peak_device_bytes"):
        row[name] = max(getattr(text, name) for text in stats)
    for name in ("draft_s", "stall_s", "sweep_s"):
        row[name] = sum(getattr(text, name) for text in stats) / max(1, num_sweeps)
    return row | {
        "num_prompts": len(runs),
        "num_tokens": sum(text.num_new_tokens for text in stats),
        "num_sweeps": num_sweeps,
        "num_nodes": max(text.tree_num_nodes for text in stats),
        "chosen": dict(Counter(label_of(run.result.tree_choice.shape) for run in runs)),
        "tokens_per_sweep": sum(accepted) / max(1, num_sweeps),
        "predicted_tokens_per_sweep": runs[0].result.tree_choice.tokens_per_sweep,
        "num_draft_tokens": None if is_dynamic else num_draft_tokens,
        "num_accepted_tokens": sum(accepted) - num_sweeps,
        "accepted_per_pos": acceptance_by_depth(accepted, max(text.tree_depth for text in stats)),
        "link_utilisation": median(used) if used else None,
        "link_utilisation_samples": used,
        "limit": "link" if row["stall_s"] > _STALLED_SHARE * row["sweep_s"] else "compute",
        "runs": [{"prompt": run.prompt, "bursts": run.bursts} for run in runs],
    }


def guards_of(rows: Sequence[Row], names: list[str]) -> dict[str, Guard]:
    """Return ratios, prompt by prompt: absolute speed depends on the disk."""
    guards = dict[str, Guard]()
    for row in rows:
        watched = {"link utilisation": "link_utilisation"} if row["limit"] == "link" else {}
        if "speedup" in row:
            watched |= {"speed-up": "speedup", "tokens per sweep": "tokens_per_sweep"}
        for title, name in watched.items():
            guards[f"{title}, {row['name']}"] = Guard(row[f"{name}_samples"], "higher", names)
    return guards


def _link_used(row: Row) -> str | None:
    if row["link_utilisation"] is None:
        return None
    return f"{row['link_utilisation']:.3f}" + ("" if row["limit"] == "link" else " (compute)")


COLUMNS = (
    Column("case", "name"),
    Column("tokens/s", "decode_tokens_per_s", ".2f"),
    Column("x none", "speedup", ".2f"),
    Column("tokens/sweep", "tokens_per_sweep", ".2f"),
    Column("ttft s", "mean_ttft_s", ".3f"),
    Column("tpot s", "mean_tpot_s", ".3f"),
    Column("sweep s", "median_sweep_s", ".3f"),
    Column("itl p99 s", "p99_itl_s", ".3f"),
    Column("draft s", "draft_s", ".3f"),
    Column("link used", _link_used),
)


@command(
    *("decode", "models place ranks source num_prompts max_tokens picture quick compare"),
    examples=[
        "offload bench decode -m big -d small --ram 16GiB --preset sequoia --prompts mt_bench.jsonl"
    ],
)
def main(
    bench: Bench,
    temp: Annotated[
        list[float] | None, flag("T", "temperature, several; default: 0 and 0.6")
    ] = None,
    tree: Annotated[list[str] | None, flag("TREE", "several, beside `none`; default: auto")] = None,
    rule: Annotated[
        list[str] | None, flag("RULE", "of acceptance, several; default: match")
    ] = None,
    preset: Annotated[str | None, flag("NAME", f"a protocol: {', '.join(PRESETS)}")] = None,
) -> Findings:
    """How many tokens per second, how smoothly, and what of the link is used?"""
    one_of([preset] if preset else [], PRESETS, "--preset")
    effort = bench.effort(PRESETS[preset] if preset else FULL, QUICK)
    num_tokens = bench.given.max_tokens or effort.num_tokens
    effort = replace(
        effort,
        num_tokens=num_tokens,
        num_plain=min(effort.num_plain, num_tokens),
        temperatures=tuple(temp or effort.temperatures),
        trees=tuple(dict.fromkeys(["none", *(tree or effort.trees)])),
        rules=tuple(rule or effort.rules),
    )
    _check(bench, preset, effort, tree or ())
    chosen = bench.prompts(effort.num_prompts)
    needs: Any = {"needs_draft": effort.trees != ("none",), "need": effort.need()}
    setting = resident_pair() if preset in RESIDENT else bench.setting(**needs)
    bench.begin(setting, num_new_tokens=effort.num_tokens)
    with bench.screen, effort.open(setting) as decoder:
        bench.say_link(setting, decoder.plan)
        measured = measure(bench, setting, decoder, effort, chosen)
    rows = rows_of(measured.runs)
    notes = list[str]()
    for row in rows:
        if parse_tree(row["tree"]).kind == "auto":
            trees = ", ".join(f"{tree} ({count} texts)" for tree, count in row["chosen"].items())
            notes.append(f"{row['name']} began with {trees}")
    return Findings(
        rows=rows,
        tables=[(COLUMNS, rows)],
        written=measured.written,
        settings={"preset": preset, "num_prompt_tokens": PROMPT_TOKENS, **measured.settings},
        ceiling=measured.ceiling,
        guards=guards_of(rows, [prompt.name for prompt in chosen]),
        notes=notes,
        draw=partial(draw_decoding, rows, measured.least_pass_s),
    )


def _check(bench: Bench, preset: str | None, effort: Runs, asked: Sequence[str]) -> None:
    """Refuse what cannot run before anything is made or measured. Raises `UserError`."""
    if preset is not None and bench.quick:
        rule = "--preset and --quick exclude each other"
        raise UserError(f"{rule}: shorten a preset with --num-prompts and -n")
    if "auto" in effort.trees and set(effort.trees) - {"none", "auto"}:
        rule = "--tree auto is measured by itself: memory is planned for the tree that it chooses"
        raise UserError(f"{rule}, got {', '.join(asked)}: leave it or the others out")
    usual = [(case.rule, case.tree) for case in effort.cases()]
    for rule, tree in (*product(effort.rules, asked), *usual):
        tree_to_fill(tree, rule, is_ranked=True)
    for temperature in effort.temperatures:
        Sampling(temperature=temperature)
