"""Tokens per second and latencies of whole generations: prompts x temperatures x rules x trees.

For every prompt the trees take turns, the one-token sweep among them, and between any two runs a
plain reader looks at the link (on a device: copies to it): what a run used of it is a share of what
the ceiling was just before and after, or of what the run itself got where that was more: no share
is above 1. `sequoia` and `pipeinfer` are the protocols of those papers (2402.12374: 128 + 128
tokens at T = 0 and 0.6; 2407.11798: 128 + 512, greedy). `trees`, `sizes` and `rules` are what
Sequoia's figures 2 and 5 ask, on the packaged pair, resident: what a sweep yields does not depend
on streaming. `predicted_tokens_per_sweep` is the product form of its section 3.

Invariant: nothing is printed before every token of every run was proved.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean, median
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import typer

from offload.bench.harness.command import (
    MODELS,
    PLACE,
    Bench,
    Tell,
    command,
    one_of,
    say_floor,
    say_nothing,
    say_table,
)
from offload.bench.harness.gate import Written
from offload.bench.harness.metrics import Burst, acceptance_by_depth, latencies
from offload.bench.harness.picture import draw_sizes, require_pictures
from offload.bench.harness.prompts import Prompt, encoded
from offload.bench.harness.record import Guard, Row, writable
from offload.bench.harness.setting import PROMPT_TOKENS, Need, Setting, resident_pair
from offload.bench.harness.steps import record_steps
from offload.bench.harness.timeline import Event, write_trace
from offload.calibration.trial import rows_of as rows_of_kernels
from offload.engine.decoder import Decoder
from offload.engine.generation import Generation
from offload.errors import UserError
from offload.trees.spec import parse_tree, tree_to_fill
from offload.units import RULES, Sampling, drafting_of

# tokens of a question in its chat template, which is not cut
_MOST_PROMPT_TOKENS = 512
# a run whose passes wait for less than this share is not bound by the link
_STALLED_SHARE = 0.05
_TRACED_STEPS = 3


class Case(NamedTuple):
    """One way to decode."""

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
        told = f"T={self.temperature:g} {self.rule} {self.tree} {self.sources}".rstrip()
        return self.tree if self.is_plain else told


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    num_prompts: int
    # tokens of every run with a tree
    num_tokens: int
    # tokens of every run without a tree, whose passes are all alike
    num_plain: int
    temperatures: tuple[float, ...] = (0.0, 0.6)
    trees: tuple[str, ...] = ("none", "grown:128x20")  # the baseline first
    rules: tuple[str, ...] = ("match",)

    def cases(self) -> list[Case]:
        """Return all cases, the baseline once and first; a static tree where a rule needs one."""
        every = product(self.temperatures, self.rules, self.trees)
        plain, *others = dict.fromkeys(
            Case(at, rule, tree_under(rule, tree)) for at, rule, tree in every
        )
        return [plain, *(case for case in others if not case.is_plain)]


_STATIC = ("16x8", "32x12", "64x16", "128x20", "256x20", "512x24")
_CHAINS = ("chain:3", "chain:7", "chain:15", "sequences:3x5", "sequences:7x9")
FULL = Effort(8, 128, 8, trees=("none", "64x16", "128x20", "grown:128x20"))
# short runs of many prompts: which ones are taken decides more than all else
QUICK = Effort(8, 36, 3)
PRESETS = {
    "sequoia": Effort(8, 128, 8),
    "pipeinfer": Effort(4, 512, 8, temperatures=(0.0,)),
    "trees": Effort(
        8, 64, 2, (0.0,), ("none", *_CHAINS, *_STATIC, *(f"grown:{tree}" for tree in _STATIC))
    ),
    "sizes": Effort(16, 64, 2, (0.6,), ("none", *_CHAINS, *_STATIC), ("sequoia", "match")),
    "rules": Effort(16, 64, 2, (0.2, 0.6, 1.0), ("none", "64x16"), tuple(RULES)),
}

RESIDENT = ("trees", "sizes", "rules")


class Timed(NamedTuple):
    """One generation as its consumer saw it."""

    prompt: str
    case: Case
    bursts: list[Burst]
    result: Generation
    # bytes per second, before and after in the mean, or the run's own if those were lower
    ceiling: float


class Measured(NamedTuple):
    """All runs, unproved."""

    runs: list[Timed]
    written: list[Written]
    ceilings: list[float]
    # what only an open decoder knows
    settings: Row
    # events of a few steps, where a trace is wanted
    events: list[Event]


def measure(
    setting: Setting,
    decoder: Decoder,
    effort: Effort,
    found: Sequence[Prompt],
    *,
    note: Callable[[Row], Any] = bool,
    tell: Tell = say_nothing,
    trace: bool = False,
    others: Mapping[str, Decoder] = MappingProxyType({}),
) -> Measured:
    """Measure all runs, prompt by prompt.

    Args:
        note: gets every run when it is over, before its tokens are proved.
        others: decoders of the cases that name their sources.
    """
    cases = effort.cases()
    runs = list[Timed]()
    written = list[Written]()
    events = list[Event]()
    first_ids = encoded(decoder, found[0], PROMPT_TOKENS)
    # a device records the widths of each tree
    for case in cases[:1] if setting.opened is None else cases:
        timed_run(others.get(case.sources, decoder), first_ids, case, 2, seed=0)
    ceilings = [setting.ceiling(decoder.plan)]
    for seed, prompt in enumerate(found):
        ids = encoded(decoder, prompt, PROMPT_TOKENS)
        for case in cases:
            num_tokens = effort.num_plain if case.is_plain else effort.num_tokens
            bursts, result = timed_run(
                others.get(case.sources, decoder), ids, case, num_tokens, seed=seed
            )
            ceilings.append(setting.ceiling(decoder.plan))
            # A run that got more than the readings beside it shows what the link gave meanwhile.
            ceiling = max(mean(ceilings[-2:]), result.stats.link_bytes_per_s)
            runs.append(Timed(prompt.name, case, bursts, result, ceiling))
            written.append(
                Written(ids, result.token_ids, result.sampling, result.rule, result.is_invariant)
            )
            told = {
                "name": case.name,
                "prompt": prompt.name,
                "tokens_per_s": result.stats.tokens_per_s,
            }
            note({**told, "tokens_per_sweep": result.stats.tokens_per_sweep, "is_proved": False})
            tell(len(runs), len(found) * len(cases), "decoding")
    if trace:
        tree = tree_under(decoder.rule.name, cases[-1].tree)
        timeline, new_ids = record_steps(decoder, first_ids, tree, _TRACED_STEPS)
        written.append(Written(first_ids, new_ids, Sampling(), decoder.rule.name))
        events = timeline.events()
    plan = {"num_threads": decoder.num_threads, "streamed_bytes": decoder.plan.streamed_bytes}
    return Measured(
        runs, written, ceilings, {**plan, "kernels": rows_of_kernels(decoder.comparisons)}, events
    )


def open_for(setting: Setting, effort: Effort, **options: Any) -> Decoder:
    need = need_of(effort)
    return setting.open(need.tree, context=need.context, rule=need.rule, **options)


def need_of(effort: Effort) -> Need:
    """Return the largest of what is opened."""
    context = _MOST_PROMPT_TOKENS + effort.num_tokens
    return Need(_largest(effort.cases()), context, _hungriest(effort.rules))


def timed_run(
    decoder: Decoder, prompt_ids: list[int], case: Case, num_tokens: int, *, seed: int
) -> tuple[list[Burst], Generation]:
    """Run one generation; note the moments at which its bursts arrived."""
    sampling = Sampling(temperature=case.temperature, seed=seed)
    run = decoder.run(
        prompt_ids, sampling, max_new_tokens=num_tokens, tree=case.tree, rule=case.rule
    )
    times = []
    started = time.perf_counter()
    for _ in run:
        times.append(time.perf_counter() - started)
    result = run.result()
    counts = [result.stats.num_first_tokens, *result.stats.accepted_per_sweep]
    # the last piece may be text alone
    return [Burst(*pair) for pair in zip(times, counts, strict=False)], result


def rows_of(runs: Sequence[Timed]) -> list[Row]:
    """Return one row per case, in the order of the runs.

    Speed-ups are against the baseline, which comes first.
    """
    cases = dict.fromkeys(run.case for run in runs)
    plain, *rows = [_row(case, [run for run in runs if run.case == case]) for case in cases]
    for row in rows if plain["decode_tokens_per_s"] else ():
        row["speedup"] = row["decode_tokens_per_s"] / plain["decode_tokens_per_s"]
        pairs = zip(row["tokens_per_s_samples"], plain["tokens_per_s_samples"], strict=True)
        row["speedup_samples"] = [fast / slow if slow else 0.0 for fast, slow in pairs]
    return [plain, *rows]


def _row(case: Case, runs: Sequence[Timed]) -> Row:
    stats = [run.result.stats for run in runs]
    accepted = [count for one in stats for count in one.accepted_per_sweep]
    num_sweeps = len(accepted)
    nodes = stats[0].tree_num_nodes
    depth = stats[0].tree_depth
    used = [one.link_bytes_per_s / run.ceiling for one, run in zip(stats, runs, strict=True)]
    is_linked = sum(one.stall_s for one in stats) > _STALLED_SHARE * sum(
        one.sweep_s for one in stats
    )
    rates = ("tokens_per_s", "tokens_per_sweep")
    samples = {f"{name}_samples": [getattr(one, name) for one in stats] for name in rates}
    peaks = {
        name: max(getattr(one, name) for one in stats)
        for name in ("peak_rss_bytes", "peak_device_bytes")
    }
    row = {
        "name": case.name,
        **case._asdict(),
        **latencies([run.bursts for run in runs]),
        **samples,
        **peaks,
    }
    row |= {
        "num_prompts": len(runs),
        "num_tokens": sum(one.num_new_tokens for one in stats),
        "num_sweeps": num_sweeps,
    }
    times = ("draft_s", "stall_s", "sweep_s")
    is_dynamic = stats[0].is_tree_dynamic  # such a tree may be smaller than its bounds
    return {
        **row,
        **{name: sum(getattr(s, name) for s in stats) / max(1, num_sweeps) for name in times},
        "num_nodes": nodes,
        "tokens_per_sweep": sum(accepted) / max(1, num_sweeps),
        "predicted_tokens_per_sweep": runs[0].result.tree_choice.tokens_per_sweep,
        "num_draft_tokens": None if is_dynamic else (nodes - 1) * num_sweeps,
        "num_accepted_tokens": sum(accepted) - num_sweeps,
        "accepted_per_pos": acceptance_by_depth(accepted, depth),
        "link_utilisation": median(used),
        "link_utilisation_samples": used,
        "limit": "link" if is_linked else "compute",
        "runs": [{"prompt": run.prompt, "bursts": run.bursts} for run in runs],
    }


def guards_of(rows: Sequence[Row], names: list[str]) -> dict[str, Guard]:
    """Return ratios, prompt by prompt: absolute speed depends on the disk."""
    guards = {}
    for row in rows:
        if "speedup" in row:
            guards[f"speed-up, {row['name']}"] = Guard(row["speedup_samples"], "higher", names)
            guards[f"tokens per sweep, {row['name']}"] = Guard(
                row["tokens_per_sweep_samples"], "higher", names
            )
        if row["limit"] == "link":
            guards[f"link utilisation, {row['name']}"] = Guard(
                row["link_utilisation_samples"], "higher", names
            )
    return guards


HEAD = [
    "case",
    "tokens/s",
    "x none",
    "tokens/sweep",
    "ttft s",
    "tpot s",
    "sweep s",
    "itl p99 s",
    "draft s",
    "link used",
]


def cells(row: Row) -> list[str]:
    names = ("mean_ttft_s", "mean_tpot_s", "median_sweep_s", "p99_itl_s", "draft_s")
    used = f"{row['link_utilisation']:.3f}" + ("" if row["limit"] == "link" else " (compute)")
    speedup = f"{row['speedup']:.2f}" if "speedup" in row else "-"
    times = [f"{row[name]:.3f}" for name in names]
    return [
        row["name"],
        f"{row['decode_tokens_per_s']:.2f}",
        speedup,
        f"{row['tokens_per_sweep']:.2f}",
        *times,
        used,
    ]


def _hungriest(rules: Sequence[str]) -> str:
    return next((rule for rule in rules if drafting_of(rule).keeps_distributions), rules[0])


def tree_under(rule: str, tree: str) -> str:
    """Return the tree for a rule; one that keeps distributions gets the static one."""
    return tree.removeprefix("grown:") if drafting_of(rule).keeps_distributions else tree


def _largest(cases: Sequence[Case]) -> str:
    """Return the tree to plan memory for; `auto` finds its own size, and others must fit too."""
    trees = [tree_under(_hungriest([case.rule for case in cases]), case.tree) for case in cases]
    return "auto" if "auto" in trees else max(trees, key=lambda tree: parse_tree(tree).num_nodes)


Temps = Annotated[
    list[float] | None, typer.Option(metavar="T", help="temperature, several; default: 0 and 0.6")
]
Trees = Annotated[
    list[str] | None, typer.Option(metavar="TREE", help="several; `none` is always among them")
]
Rules = Annotated[
    list[str] | None, typer.Option(metavar="RULE", help="of acceptance, several; default: match")
]
Num = Annotated[int | None, typer.Option(metavar="N", min=1, help="of every set")]
MaxTokens = Annotated[
    int | None, typer.Option("-n", "--max-tokens", metavar="N", min=2, help="new ones per prompt")
]
Preset = Annotated[
    str | None, typer.Option(metavar="NAME", help=f"a protocol: {', '.join(PRESETS)}")
]
Trace = Annotated[
    Path | None, typer.Option(metavar="FILE", help="steps for ui.perfetto.dev", callback=writable)
]

Picture = Annotated[
    Path | None, typer.Option(metavar="FILE", help="tokens per sweep by size", callback=writable)
]


_EXAMPLES = (
    "offload bench decode -m big -d small --ram 16GiB --preset sequoia --prompts mt_bench.jsonl",
)


@command("decode", MODELS, PLACE, "ranks source quick compare", examples=_EXAMPLES)
def main(
    bench: Bench,
    temp: Temps = None,
    tree: Trees = None,
    rule: Rules = None,
    num_prompts: Num = None,
    max_tokens: MaxTokens = None,
    preset: Preset = None,
    trace: Trace = None,
    picture: Picture = None,
) -> None:
    """How many tokens per second, how smoothly, and what of the link is used?"""
    _check_flags(bench, preset, trace, picture)
    effort = PRESETS[preset] if preset else QUICK if bench.quick else FULL
    effort = Effort(
        num_prompts=num_prompts or effort.num_prompts,
        num_tokens=max_tokens or effort.num_tokens,
        num_plain=min(effort.num_plain, max_tokens or effort.num_plain),
        temperatures=tuple(temp or effort.temperatures),
        trees=tuple(dict.fromkeys(["none", *(tree or effort.trees)])),
        rules=tuple(rule or effort.rules),
    )
    _check(effort, tree or ())
    setting = (
        resident_pair(None)
        if preset in RESIDENT
        else bench.setting(needs_draft=effort.trees != ("none",), need=need_of(effort))
    )
    found, names = bench.prompts(effort.num_prompts)
    settings = {
        **setting.as_dict(),
        "prompts": names,
        "num_new_tokens": effort.num_tokens,
        "preset": preset,
    }
    bench.check_same(setting, prompts=names, num_new_tokens=effort.num_tokens)
    measured = run(bench, setting, effort, found, trace is not None)
    proof = bench.prove(setting, measured.written)
    rows = [bench.row(row) for row in rows_of(measured.runs)]
    say_table(HEAD, map(cells, rows))
    if trace is not None:
        write_trace(measured.events, trace)
    if picture is not None:
        draw_sizes(rows, settings, picture)
    bench.finish(
        rows,
        settings={**settings, "num_prompt_tokens": PROMPT_TOKENS, **measured.settings},
        ceiling={"bytes_per_s": median(measured.ceilings), "samples": measured.ceilings},
        guards=guards_of(rows, names),
        proof=proof,
    )


def run(
    bench: Bench, setting: Setting, effort: Effort, found: Sequence[Prompt], trace: bool
) -> Measured:
    """Print the ceiling, then measure all runs; unproved."""
    say_floor(setting)
    with bench.screen as screen, open_for(setting, effort) as decoder:
        say_floor(setting, decoder.plan)
        return measure(
            setting, decoder, effort, found, note=bench.row, tell=screen.count, trace=trace
        )


def _check_flags(
    bench: Bench, preset: str | None, trace: Path | None, picture: Path | None
) -> None:
    one_of([preset] if preset else [], PRESETS, "--preset")
    if preset is not None and bench.quick:
        raise UserError(
            "--preset and --quick exclude each other: shorten a preset with --num-prompts and -n"
        )
    if trace is not None and trace == bench.json_file:
        raise UserError(
            f"--trace {trace} would be written over by --json {bench.json_file}: name another file"
        )
    if picture is not None:
        require_pictures()


def _check(effort: Effort, asked_trees: Sequence[str]) -> None:
    """Refuse cases that cannot run before anything is made or measured. Raises `UserError`."""
    for rule, tree in (
        *product(effort.rules, asked_trees),
        *((case.rule, case.tree) for case in effort.cases()),
    ):
        tree_to_fill(tree, rule, has_draft=True)
    for temperature in effort.temperatures:
        Sampling(temperature=temperature)
