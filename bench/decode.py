"""Tokens per second and latencies of whole generations: prompts x temperatures x rules x trees.

For every prompt the trees take turns, the one-token sweep among them, and between any two runs a plain reader looks at
the link: what a run used of it is a share of what the reader got just before and just after. On a GPU copies to it are
measured instead, and the disk behind it where layers live there. `sequoia` and `pipeinfer`
are the protocols of those papers (2402.12374: 128 + 128 tokens at T = 0 and 0.6; 2407.11798: 128 + 512, greedy).

Invariant: nothing is printed before every token of every run was proved.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Annotated, NamedTuple

import typer

from offload.bench import setting as common
from offload.bench.gate import Proof, Written
from offload.bench.metrics import Burst, acceptance_by_depth, latencies
from offload.bench.prompts import Prompt, encoded, prompts
from offload.bench.record import Guard, Row, new_result, writable
from offload.bench.setting import PROMPT_TOKENS, Setting
from offload.bench.text_table import aligned
from offload.bench.timeline import record_steps, require_pictures, trace_files, write_trace
from offload.calibration.kernel_comparison import rows_of as rows_of_comparisons
from offload.cli import flags
from offload.cli.console import Console
from offload.config import Sampling, drafting_of
from offload.engine.decoder import Decoder
from offload.engine.generation import Generation
from offload.errors import UserError
from offload.tree.spec import parse_tree, tree_to_fill

_MOST_PROMPT_TOKENS = 512  # of a question in its chat template, which is not cut
_STALLED_SHARE = 0.05  # of its sweeps: a run that waits for less is not bound by the link
_TRACED_STEPS = 3


class Case(NamedTuple):
    """One way to decode."""

    temperature: float
    rule: str
    tree: str

    @property
    def name(self) -> str:
        """In tables and guards."""
        return self.tree if self.is_plain else f"T={self.temperature:g} {self.rule} {self.tree}"

    @property
    def is_plain(self) -> bool:
        """Whether it is one token per sweep, to which temperature and rule are all one."""
        return self.tree == "none"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    num_prompts: int
    num_tokens: int  # of every run with a tree
    num_plain: int  # of every run without one, whose sweeps are all alike
    temperatures: tuple[float, ...] = (0.0, 0.6)
    trees: tuple[str, ...] = ("none", "grown:128x20")  # the baseline first
    rules: tuple[str, ...] = ("match",)

    def cases(self) -> list[Case]:
        """All of them, the baseline once and first; rules with distributions take static trees."""
        every = product(self.temperatures, self.rules, self.trees)
        plain, *others = dict.fromkeys(Case(at, rule, tree_under(rule, tree)) for at, rule, tree in every)
        return [plain, *(case for case in others if not case.is_plain)]


FULL = Effort(8, 128, 8, trees=("none", "64x16", "128x20", "grown:128x20"))
QUICK = Effort(8, 36, 3)  # short runs of many prompts: which ones are taken decides more than all else
PRESETS = {"sequoia": Effort(8, 128, 8), "pipeinfer": Effort(4, 512, 8, temperatures=(0.0,))}


class Timed(NamedTuple):
    """One generation as its consumer saw it."""

    prompt: str
    case: Case
    bursts: list[Burst]
    result: Generation
    ceiling: float  # bytes per second of a plain reader, before and after in the mean


class Measured(NamedTuple):
    """Everything, unproved."""

    runs: list[Timed]
    written: list[Written]
    ceilings: list[float]
    num_threads: int
    streamed_bytes: int
    kernels: list[Row]  # how each did on this GPU; none on a CPU


def measure(
    setting: Setting, effort: Effort, found: Sequence[Prompt], screen: Console, trace: Path | None = None
) -> tuple[Measured, list]:
    """All runs, prompt by prompt; and the events of a few steps where a trace is wanted."""
    cases, runs, written, events = effort.cases(), list[Timed](), list[Written](), []
    options = {"context": _MOST_PROMPT_TOKENS + effort.num_tokens, "rule": _hungriest(effort.rules)}
    with setting.open(_largest(cases), **options) as decoder:
        timed_run(decoder, encoded(decoder, found[0], PROMPT_TOKENS), cases[0], 2, seed=0)  # warms everything up
        ceilings = [setting.ceiling(decoder)]
        if setting.device != "cpu":
            common.say_ceiling(f"layers to {setting.device}", ceilings[0])
        for seed, prompt in enumerate(found):
            ids = encoded(decoder, prompt, PROMPT_TOKENS)
            for case in cases:
                num_tokens = effort.num_plain if case.is_plain else effort.num_tokens
                bursts, result = timed_run(decoder, ids, case, num_tokens, seed=seed)
                ceilings.append(setting.ceiling(decoder))
                runs.append(Timed(prompt.name, case, bursts, result, mean(ceilings[-2:])))
                written.append(Written(ids, result.token_ids, result.sampling, result.rule))
                screen.count(len(runs), len(found) * len(cases), "decoding")
        if trace is not None:
            ids = encoded(decoder, found[0], PROMPT_TOKENS)
            timeline, new_ids = record_steps(decoder, ids, tree_under(decoder.rule.name, cases[-1].tree), _TRACED_STEPS)
            written.append(Written(ids, new_ids, Sampling(), decoder.rule.name))
            events = timeline.events()
        kernels, streamed_bytes = rows_of_comparisons(decoder.comparisons), decoder.plan.streamed_bytes
        return Measured(runs, written, ceilings, decoder.num_threads, streamed_bytes, kernels), events


def timed_run(
    decoder: Decoder, prompt_ids: list[int], case: Case, num_tokens: int, *, seed: int
) -> tuple[list[Burst], Generation]:
    """One generation with the moments at which its bursts arrived."""
    sampling = Sampling(temperature=case.temperature, seed=seed)
    run = decoder.run(prompt_ids, sampling, max_new_tokens=num_tokens, tree=case.tree, rule=case.rule)
    times, started = [], time.perf_counter()
    for _ in run:
        times.append(time.perf_counter() - started)
    result = run.result()
    counts = [result.stats.num_first_tokens, *result.stats.accepted_per_sweep]
    return [Burst(*pair) for pair in zip(times, counts, strict=False)], result  # the last piece may be text alone


def rows_of(runs: Sequence[Timed]) -> list[Row]:
    """One row per case, in the order of the runs; speed-ups are against the baseline, which comes first."""
    plain, *rows = [
        _row(case, [run for run in runs if run.case == case]) for case in dict.fromkeys(run.case for run in runs)
    ]
    for row in rows if plain["decode_tokens_per_s"] else ():
        row["speedup"] = row["decode_tokens_per_s"] / plain["decode_tokens_per_s"]
        pairs = zip(row["tokens_per_s_samples"], plain["tokens_per_s_samples"], strict=True)
        row["speedup_samples"] = [fast / slow if slow else 0.0 for fast, slow in pairs]
    return [plain, *rows]


def _row(case: Case, runs: Sequence[Timed]) -> Row:
    stats = [run.result.stats for run in runs]
    accepted = [count for one in stats for count in one.accepted_per_sweep]
    num_sweeps, nodes, depth = len(accepted), stats[0].tree_num_nodes, stats[0].tree_depth
    used = [one.link_bytes_per_s / run.ceiling for one, run in zip(stats, runs, strict=True)]
    is_linked = sum(one.stall_s for one in stats) > _STALLED_SHARE * sum(one.sweep_s for one in stats)
    return {
        "name": case.name,
        **case._asdict(),
        **latencies([run.bursts for run in runs]).as_dict(),
        "num_prompts": len(runs),
        "num_tokens": sum(one.num_new_tokens for one in stats),
        "num_sweeps": num_sweeps,
        "tokens_per_sweep": sum(accepted) / max(1, num_sweeps),
        "num_draft_tokens": None
        if stats[0].is_tree_dynamic
        else (nodes - 1) * num_sweeps,  # a dynamic one may be smaller
        "num_accepted_tokens": sum(accepted) - num_sweeps,
        "accepted_per_pos": acceptance_by_depth(accepted, depth),
        "draft_s": sum(one.draft_s for one in stats) / max(1, num_sweeps),
        "stall_s": sum(one.stall_s for one in stats) / max(1, num_sweeps),
        "link_utilisation": median(used),
        "link_utilisation_samples": used,
        "limit": "link" if is_linked else "compute",
        "tokens_per_s_samples": [one.tokens_per_s for one in stats],
        "peak_rss_bytes": max(one.peak_rss_bytes for one in stats),
        "peak_device_bytes": max(one.peak_device_bytes for one in stats),
        "runs": [{"prompt": run.prompt, "bursts": run.bursts} for run in runs],
    }


def guards_of(rows: Sequence[Row], names: list[str]) -> dict[str, Guard]:
    """Ratios, prompt by prompt: absolute speed is the disk's affair."""
    guards = {}
    for row in rows:
        if "speedup" in row:
            guards[f"speed-up, {row['name']}"] = Guard(row["speedup_samples"], "higher", names)
        if row["limit"] == "link":
            guards[f"link utilisation, {row['name']}"] = Guard(row["link_utilisation_samples"], "higher", names)
    return guards


def table(rows: Sequence[Row]) -> str:
    """For a person."""
    head = ["case", "tokens/s", "x none", "tokens/sweep", "ttft s", "tpot s", "sweep s", "itl p99 s", "link used"]
    return aligned([head, *map(_cells, rows)])


def _cells(row: Row) -> list[str]:
    names = ("mean_ttft_s", "mean_tpot_s", "median_sweep_s", "p99_itl_s")
    used = f"{row['link_utilisation']:.3f}" + ("" if row["limit"] == "link" else " (compute)")
    speedup = f"{row['speedup']:.2f}" if "speedup" in row else "-"
    times = [f"{row[name]:.3f}" for name in names]
    return [row["name"], f"{row['decode_tokens_per_s']:.2f}", speedup, f"{row['tokens_per_sweep']:.2f}", *times, used]


def _hungriest(rules: Sequence[str]) -> str:
    """The rule that memory must be planned for."""
    return next((rule for rule in rules if drafting_of(rule).keeps_distributions), rules[0])


def tree_under(rule: str, tree: str) -> str:
    """Dynamic trees are not for rules that keep distributions: the static one within the same bounds then."""
    return tree.removeprefix("grown:") if drafting_of(rule).keeps_distributions else tree


def _largest(cases: Sequence[Case]) -> str:
    """The tree that memory must be planned for; `auto` finds its own size, and the others must fit beside it."""
    trees = [tree_under(_hungriest([case.rule for case in cases]), case.tree) for case in cases]
    return "auto" if "auto" in trees else max(trees, key=lambda tree: parse_tree(tree).num_nodes)


Temps = Annotated[list[float] | None, typer.Option(metavar="T", help="temperature, several; default: 0 and 0.6")]
Trees = Annotated[list[str] | None, typer.Option(metavar="TREE", help="several; `none` is always among them")]
Rules = Annotated[list[str] | None, typer.Option(metavar="RULE", help="of acceptance, several; default: match")]
NumPrompts = Annotated[int | None, typer.Option(metavar="N", min=1, help="of every set")]
MaxTokens = Annotated[
    int | None, typer.Option("-n", "--max-tokens", metavar="N", min=2, help="new ones after each prompt")
]
Preset = Annotated[str | None, typer.Option(metavar="NAME", help=f"a paper's protocol: {', '.join(PRESETS)}")]
Trace = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="a few steps as FILE.json for ui.perfetto.dev, FILE.svg", callback=writable),
]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(
    epilog="""Examples:

    offload bench decode --quick

    offload bench decode -m big -d small --ram 16GiB --preset sequoia --prompts mt_bench.jsonl --json now.json

    offload bench decode --quick --trace sweep.json --compare before.json"""
)
def main(
    model: common.Model = None,
    draft: common.Draft = None,
    size: common.Size = "2GB",
    device: flags.Device = "auto",
    gpu_mem: flags.GpuMem = None,
    ram: common.Ram = None,
    source: common.Prompts = None,
    temp: Temps = None,
    tree: Trees = None,
    rule: Rules = None,
    num_prompts: NumPrompts = None,
    max_tokens: MaxTokens = None,
    preset: Preset = None,
    quick: common.Quick = False,
    trace: Trace = None,
    json_file: common.Json = None,
    compare: common.Compare = None,
) -> None:
    """How many tokens per second, how smoothly, and what of the link is used?"""
    _check_flags(preset, trace, json_file, is_quick=quick)
    old = common.earlier("decode", compare)
    effort = PRESETS[preset] if preset else QUICK if quick else FULL
    effort = Effort(
        num_prompts=num_prompts or effort.num_prompts,
        num_tokens=max_tokens or effort.num_tokens,
        num_plain=min(effort.num_plain, max_tokens or effort.num_plain),
        temperatures=tuple(temp or effort.temperatures),
        trees=tuple(dict.fromkeys(["none", *(tree or effort.trees)])),
        rules=tuple(rule or effort.rules),
    )
    _check(effort, tree or ())
    place = common.place_of(device, gpu_mem)
    with Console(is_quiet=False) as screen:
        setting = common.find_setting(model, draft, size, ram, screen)._replace(**place)
        if setting.draft is None and effort.trees != ("none",):
            raise UserError("bench decode compares trees, which a draft fills: give --draft")
        found = prompts(source or ["code"], effort.num_prompts)
        names = [prompt.name for prompt in found]
        common.check_same(old, setting, prompts=names, num_new_tokens=effort.num_tokens)
        if setting.device == "cpu":
            common.say_link(setting.shards)
        measured, events = measure(setting, effort, found, screen, trace)
    proof = setting.prove(measured.written)
    rows = rows_of(measured.runs)
    print(table(rows))
    print(common.proof_line(proof))
    if trace is not None:
        write_trace(events, trace)
    result = new_result(
        "decode",
        settings=_settings(setting, effort, measured, proof) | {"quick": quick, "preset": preset, "prompts": names},
        ceiling={"bytes_per_s": median(measured.ceilings), "samples": measured.ceilings},
        rows=rows,
        guards=guards_of(rows, names),
    )
    common.finish(result, json_file, old)


def _check_flags(preset: str | None, trace: Path | None, json_file: Path | None, *, is_quick: bool) -> None:
    """Refuse flags that do not go together. Raises `UserError`."""
    if preset is not None and preset not in PRESETS:
        raise UserError(f"--preset must be one of {', '.join(PRESETS)}, got {preset!r}: leave it out for our own")
    if preset is not None and is_quick:
        raise UserError("--preset and --quick exclude each other: shorten a preset with --num-prompts and -n")
    if trace is not None:
        require_pictures()
        if json_file in trace_files(trace):
            raise UserError(f"--trace {trace} would be written over by --json {json_file}: name another file")


def _check(effort: Effort, asked_trees: Sequence[str]) -> None:
    """Refuse cases that cannot run before anything is made or measured. Raises `UserError`."""
    asked = [*product(effort.rules, asked_trees), *((case.rule, case.tree) for case in effort.cases())]
    for rule, tree in asked:
        tree_to_fill(tree, rule, has_draft=True)
    for temperature in effort.temperatures:
        Sampling(temperature=temperature)


def _settings(setting: Setting, effort: Effort, measured: Measured, proof: Proof) -> Row:
    return {
        **setting.as_dict(),
        "num_prompt_tokens": PROMPT_TOKENS,
        "num_new_tokens": effort.num_tokens,
        "num_threads": measured.num_threads,
        "streamed_bytes": measured.streamed_bytes,
        "kernels": measured.kernels,
        "proof": proof._asdict(),
    }


if __name__ == "__main__":
    from offload.bench.suite import run_alone

    run_alone("decode")
