"""Other programs with our model, prompts and memory: how many times more tokens/s ours gives.

With `--lookup` no program has a draft: copies of the text itself, and what counts is tokens per
pass. Every program runs in a process and a memory group of its own, whose cap counts the page cache
too, greedily and on the same prompts; slow ones get fewer of them and fewer new tokens. Each may
use the better of one and two threads; ours chooses for itself, and is measured first and last,
because disks drift. Invariant: an `Outcome` without a reason holds tokens that were all found to be
the original model's own, resident in float32.
"""

import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, NamedTuple

from offload.bench.harness.command import Bench, Findings, command, flag, one_of
from offload.bench.harness.process import call, environment, last_line, new_cap
from offload.bench.harness.prompts import raw_ids
from offload.bench.harness.setting import PROMPT_TOKENS, Setting
from offload.bench.harness.tables import Column, Guard, Row
from offload.bench.latency.quantised import BESIDE, PACKED, quantised
from offload.bench.pairs.moe_pair import moe_setting
from offload.bench.peers.child import Measured, Order, rate
from offload.checkpoint.files import cache_folder, replacing
from offload.errors import RunError, UserError
from offload.reports.proof import BF16_NOISE, draw_gaps
from offload.sampling_options import Sampling
from offload.units import parse_size

_HAS_ALL = "import sys, importlib.util as i; sys.exit(not all(map(i.find_spec, sys.argv[1:])))"
# imports, reading, the copy that some programs make of the weights at their first start
_START_S = 300.0

OURS = "ours"
QUICK_LIMIT_S = 60.0
FULL_LIMIT_S = 240.0
# part of the context of 512, beside the prompt and the longest burst
_ROOM_FOR_NEW = 300
# (new tokens, prompts)
_ONE_BY_ONE = (8, 2)
_DRAFTED = (20, 6)
_COPIED = (48, 6)
# tokens that others guess, as their documentation has it
_LOOKUP_TOKENS = 10
_TUNED = {
    "num_assistant_tokens": 16,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
}


class Outcome(NamedTuple):
    reason: str = ""  # why there are no figures; empty when there are
    runs: Sequence[Measured] = ()
    num_near: int = 0  # tokens that differ from the float32 choice by less than bf16 rounding
    num_threads: int = 0  # 0: not told
    trial_tokens_per_s: dict[str, float] | None = None  # by number of threads
    is_capped: bool = False
    # peak of the group, page cache included
    peak_bytes: int | None = None
    # peak of the process
    rss_bytes: int = 0
    load_s: float = 0.0


def interpreter_with(modules: Sequence[str], pythons: Sequence[str]) -> str | None:
    """Return the first interpreter that can import all modules; None when none can."""

    def has_all(python: str) -> bool:
        return not subprocess.run(
            [python, "-c", _HAS_ALL, *modules], capture_output=True
        ).returncode

    return next(filter(has_all, pythons), None)


def run_child(python: str, order: Order) -> Outcome:
    """Run an order in a process and a memory group of its own; the tokens are not proved yet."""
    cap = new_cap(order.cap_bytes)
    limit_s = _START_S + order.limit_s * (len(order.threads) + len(order.prompts))
    try:
        order = order._replace(group=str(cap.processes) if cap else None)
        try:
            outcome = with_runs(
                call("offload.bench.peers.child", order, python=python, limit_s=limit_s)
            )
        except RunError as error:
            outcome = Outcome(reason=str(error))
        peak_bytes = cap.peak_bytes() if cap else None
        return outcome._replace(is_capped=cap is not None, peak_bytes=peak_bytes)
    finally:
        if cap:
            cap.remove()


def with_runs(figures: dict[str, Any]) -> Outcome:
    listed: Sequence[tuple[int, list[tuple[float, list[int]]]]] = figures.pop("runs")
    runs = [Measured(prompt, [(at_s, ids) for at_s, ids in bursts]) for prompt, bursts in listed]
    if not all(run.bursts and run.num_decoded for run in runs):
        return Outcome(reason="failed: no token after the first within the time limit")
    return Outcome(runs=runs, **figures)


def proved(
    outcome: Outcome, model: Path, prompts: Sequence[Sequence[int]], noise: float | None = None
) -> Outcome:
    """Return the outcome if every token is what `model` chooses in float32, else its refusal.

    Scores may differ by `noise`: by default what rounding to bf16 makes of them.
    """
    if outcome.reason:
        return outcome
    gaps = list[float]()
    for run in outcome.runs:
        gaps += draw_gaps(model, prompts[run.prompt], run.token_ids, Sampling())
    if max(gaps) > (noise or BF16_NOISE):
        complaint = f"a token misses the original model's choice by {max(gaps):.3f}"
        return Outcome(reason=f"refused: {complaint}")
    return outcome._replace(num_near=sum(gap > 0 for gap in gaps))


def gguf_file(source: Path, python: str, kind: str = "BF16") -> Path:
    """Return the GGUF of a checkpoint, its blocks of `kind`, written once by an interpreter."""
    stats = [(path.name, path.stat()) for path in source.glob("*.safetensors")]
    shards = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    suffix = "" if kind == "BF16" else f"-{kind}"
    path = cache_folder() / f"{source.name}{suffix}-{zlib.crc32(repr(shards).encode()):08x}.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            writer = [python, "-m", "offload.bench.peers.gguf_writer", str(source), str(part), kind]
            subprocess.run(writer, check=True, capture_output=True, text=True, env=environment())
    return path


class Program(NamedTuple):
    """One way to decode, and how much of it is measured in quick mode."""

    title: str
    module: str  # has `open_peer`
    options: dict[str, Any]  # see the module
    needs: tuple[str, ...]  # what the interpreter must be able to import
    num_tokens: int  # new ones per prompt; four times as many without --quick
    num_prompts: int
    # the least that our figure / theirs should be
    wanted: float | None = None
    figure: str = "tokens_per_s"
    threads: tuple[int, ...] = (1, 2)

    def of_lookup(self) -> "Program":
        options = {**self.options, "lookup": _LOOKUP_TOKENS}
        return self._replace(options=options, figure="tokens_per_pass")


def _ours(
    tree: str, size: tuple[int, int], wanted: float | None = None, **settings: str
) -> Program:
    options = {"tree": tree, **settings}
    title = " ".join(["ours,", *(f"--{name} {value}" for name, value in options.items())])
    needs = ("torch", "transformers")
    return Program(title, f"{__package__}.ours", options, needs, *size, wanted, threads=())


def _transformers(
    title: str, size: tuple[int, int], wanted: float | None, **settings: Any
) -> Program:
    options = {"weights": "disk", "assistant": None, **settings}
    needs = ("transformers", "accelerate")
    return Program(title, f"{__package__}.hugging_face", options, needs, *size, wanted)


def _llama_cpp(draft_tokens: int, size: tuple[int, int], wanted: float) -> Program:
    title = f"llama.cpp, its draft at n-max {draft_tokens}" if draft_tokens else _LLAMA_ALONE
    needs = ("llama_cpp", "gguf")
    options = {"draft_tokens": draft_tokens}
    return Program(title, f"{__package__}.llama_cpp", options, needs, *size, wanted)


_LLAMA_ALONE = "llama.cpp on the mmap"
# ours with the same numbers in other files
_FORMS = (OURS, PACKED, BESIDE)
_ON_MAP = {"weights": "mmap"}
PROGRAMS: dict[str, Program] = {
    OURS: _ours("auto", _DRAFTED),
    PACKED: _ours("auto", _DRAFTED, form=PACKED),
    BESIDE: _ours("auto", _DRAFTED, form=BESIDE, draft="self:int4"),
    "none": _ours("none", _ONE_BY_ONE, 5),
    "disk": _transformers("accelerate disk offload", _ONE_BY_ONE, 12),
    "disk-assistant": _transformers(
        "disk offload, assistant at its defaults", (12, 6), None, assistant={}
    ),
    "disk-tuned": _transformers("disk offload, assistant tuned", _DRAFTED, 3, assistant=_TUNED),
    "mmap": _transformers("transformers on the mmap", _ONE_BY_ONE, 8, **_ON_MAP),
    "mmap-tuned": _transformers(
        "the mmap, assistant tuned", _DRAFTED, 3, assistant=_TUNED, **_ON_MAP
    ),
    "llama": _llama_cpp(0, _ONE_BY_ONE, 8),
    "llama-draft": _llama_cpp(16, _DRAFTED, 2.5),
}
LOOKUPS = {
    OURS: _ours("dynamic:64x16", _COPIED).of_lookup(),
    "mmap": _transformers("transformers, prompt lookup", _COPIED, 1.3, **_ON_MAP).of_lookup(),
    "llama": _llama_cpp(0, _COPIED, 1.3)._replace(title="llama.cpp, prompt lookup").of_lookup(),
}
BLOCKS = {
    OURS: _ours("auto", _DRAFTED),
    "none": _ours("none", _ONE_BY_ONE),
    "llama": _llama_cpp(0, _ONE_BY_ONE, 3),
    "llama-draft": _llama_cpp(16, _DRAFTED, 2),
}
EXPERTS = {
    OURS: _ours("auto", _DRAFTED),
    "none": _ours("none", _DRAFTED),
    "layers": _ours("auto", _DRAFTED, 3, experts="layers"),
    "layers-64": _ours("dynamic:64x16", _DRAFTED, 3, experts="layers"),
    "llama": _llama_cpp(0, _DRAFTED, 2),
    "llama-draft": _llama_cpp(4, _DRAFTED, 2),
}
_PEERS = f"of {', '.join(PROGRAMS)}; default: all"
_LOOKUP = "without a draft: tokens per pass of copies, half the prompts"
_EXPERTS = "with a mixture of experts, trained when it is not there"
_ROUNDED_ROWS = 1.0  # what scores may differ by where llama.cpp rounds rows to 8 bits as well


class Common(NamedTuple):
    setting: Setting  # its budget is the memory of each process
    prompts: list[list[int]]
    pythons: tuple[str, ...]
    is_quick: bool = True
    # of the blocks that weights are stored in: of others all programs read the same GGUF file
    kind: str = "BF16"


def compare(
    names: Sequence[str],
    programs: Mapping[str, Program],
    common: Common,
    say: Callable[[Row], Any],
) -> list[Row]:
    """Measure ours, the named ones and ours again, each told to `say`; return rows with ratios."""
    outcomes = dict[str, list[Outcome]]()
    for name in (OURS, *(name for name in names if name != OURS), OURS):
        outcome = measure(programs[name], common)
        outcomes.setdefault(name, []).append(outcome)
        say(_row(name, programs[name], [outcome]))
    ours, *others = [_row(name, programs[name], outcome) for name, outcome in outcomes.items()]
    rates = {row["peer"]: row.get("tokens_per_s", 0.0) for row in (ours, *others)}
    fastest = max(rates[name] for name in _FORMS if name in rates)
    for row in others:
        if row["peer"] not in _FORMS and "tokens_per_s" in row:
            row["fastest_ratio"] = fastest / row["tokens_per_s"]
        if "tokens_per_s" in ours and "tokens_per_s" in row:
            program = programs[row["peer"]]
            row["ratio"] = ours[program.figure] / row[program.figure]
            if program.wanted is not None:
                row |= {"wanted": program.wanted, "is_met": row["ratio"] >= program.wanted}
    return [ours, *others]


def measure(program: Program, common: Common) -> Outcome:
    python = interpreter_with(program.needs, common.pythons)
    if python is None:
        needs = " and ".join(program.needs)
        return Outcome(reason=f"missing: no interpreter here can import {needs}")
    target = common.setting.target
    draft = common.setting.draft
    model = common.setting.origin
    assert draft is not None, "the packaged pair has one"
    noise = None
    if form := program.options.get("form"):
        target = quantised(target, form)
    try:
        if common.kind != "BF16":
            writer = interpreter_with(("gguf",), common.pythons) or python
            target = model = gguf_file(target, writer, common.kind)
            noise = _ROUNDED_ROWS if "gguf" in program.needs else None
        elif "gguf" in program.needs:
            target = gguf_file(target, python)
        if "gguf" in program.needs:
            draft = gguf_file(draft, python)
    except subprocess.CalledProcessError as error:
        return Outcome(reason=f"failed: {last_line(error.stderr)}")
    num_tokens = program.num_tokens
    if not common.is_quick:
        num_tokens = min(4 * num_tokens, _ROOM_FOR_NEW)
    order = Order(
        program.module,
        program.options,
        str(target),
        str(draft),
        common.prompts[: program.num_prompts],
        num_tokens,
        QUICK_LIMIT_S if common.is_quick else FULL_LIMIT_S,
        threads=list(program.threads),
        cap_bytes=common.setting.ram_bytes,
    )
    return proved(run_child(python, order), model, common.prompts, noise)


def _row(name: str, program: Program, outcomes: Sequence[Outcome]) -> Row:
    """Return the row of a program, which may have been measured several times."""
    row: Row = {"peer": name, "title": program.title}
    if reasons := [outcome.reason for outcome in outcomes if outcome.reason]:
        return {**row, "reason": reasons[0]}
    runs = [run for outcome in outcomes for run in outcome.runs]
    num_tokens = sum(run.num_decoded for run in runs)
    peaks = [outcome.peak_bytes for outcome in outcomes if outcome.peak_bytes is not None]
    return row | {
        "trial_tokens_per_s": outcomes[-1].trial_tokens_per_s,
        "is_capped": all(outcome.is_capped for outcome in outcomes),
        "peak_bytes": max(peaks, default=None),
        "rss_bytes": max(outcome.rss_bytes for outcome in outcomes),
        "load_s": outcomes[-1].load_s,
        "tokens_per_s": rate(runs),
        "s_per_token": 1 / rate(runs),
        "tokens_per_s_by_prompt": [rate([run]) for run in runs],
        "num_tokens": num_tokens,
        "prompts": [run.prompt for run in runs],
        "num_prompts": len({run.prompt for run in runs}),
        "threads": outcomes[-1].num_threads,
        "near_ties": sum(outcome.num_near for outcome in outcomes),
        "tokens_per_pass": num_tokens / sum(len(run.bursts) - 1 for run in runs),
        "first_token_s": mean(run.bursts[0][0] for run in runs),
    }


def _wanted(row: Row) -> str:
    if "wanted" not in row:
        return ""
    return f">= {row['wanted']:g} {'met' if row['is_met'] else 'MISSED'}"


def _held(row: Row) -> str:
    is_known = row["is_capped"] and row["peak_bytes"]
    return f"{row['peak_bytes'] / 1e9:.2f} GB" if is_known else "uncapped"


COLUMNS = (
    Column("", "title"),
    Column("tokens/s", "tokens_per_s", ".2f"),
    Column("s/token", "s_per_token", ".3f"),
    Column("ours / it", "ratio", ".2f"),
    Column("wanted", _wanted),
    Column("fastest of ours / it", "fastest_ratio", ".2f"),
    Column("a pass", "tokens_per_pass", ".1f"),
    Column("tokens", "num_tokens"),
    Column("prompts", "num_prompts"),
    Column("threads", lambda row: row["threads"] or "own"),
    Column("first token s", "first_token_s", ".1f"),
    Column("memory", _held),
)


def guards_of(rows: Sequence[Row]) -> dict[str, Guard]:
    """Return ours / theirs, prompt by prompt: absolute speed depends on the disk."""
    guards = dict[str, Guard]()
    ours, *others = map(_rates, rows)
    for row, theirs in zip(rows[1:], others, strict=True):
        shared = [prompt for prompt in theirs if prompt in ours]
        samples = [ours[prompt] / theirs[prompt] for prompt in shared]
        guards[f"ours / {row['peer']}"] = Guard(samples, "higher", [*map(str, shared)])
    return guards


def _rates(row: Row) -> dict[int, float]:
    pairs = list(zip(row.get("prompts", ()), row.get("tokens_per_s_by_prompt", ()), strict=True))
    return {prompt: mean(rate for other, rate in pairs if other == prompt) for prompt, _ in pairs}


@command(
    *("peers", "size source quick compare"),
    examples=["offload bench peers --quick --peer mmap --python others/python"],
)
def main(
    bench: Bench,
    peer: Annotated[list[str] | None, flag("NAME", _PEERS, "--peer")] = None,
    cap: Annotated[str, flag("SIZE", "memory of each process, page cache included")] = "1.2GB",
    python: Annotated[
        str | None, flag("FILE", "an interpreter that has what this one lacks")
    ] = None,
    lookup: Annotated[bool, flag(None, _LOOKUP, "--lookup")] = False,
    gguf: Annotated[
        str, flag("TYPE", "Q8_0 or Q4_0: ours and llama.cpp on that file", "--gguf")
    ] = "BF16",
    experts: Annotated[bool, flag(None, _EXPERTS, "--experts")] = False,
) -> Findings:
    """How many times more tokens per second than other programs, with the same files, prompts and
    memory?
    """
    known = _known(lookup=lookup, gguf=gguf, experts=experts)
    one_of(peer or (), known, "--peer")
    if python is not None and shutil.which(python) is None:
        raise UserError(f"--python must be an interpreter, cannot run {python}: check the path")
    cap_bytes = parse_size(cap, "--cap")
    part = slice(1, None, 2) if lookup else slice(None)
    texts = bench.prompts(max(program.num_prompts for program in known.values()), part)
    setting = moe_setting(bench.given.size, None, bench.screen) if experts else bench.setting()
    setting = setting._replace(ram_bytes=cap_bytes)
    ids = raw_ids(setting.origin, texts, PROMPT_TOKENS)
    common = Common(setting, ids, (sys.executable, *filter(None, [python])), bench.quick, gguf)
    bench.begin(setting, num_prompt_tokens=PROMPT_TOKENS, lookup=lookup, gguf=gguf, experts=experts)
    if setting.as_dict()["target_bytes"] <= cap_bytes:
        print("the target fits into --cap: no ratio was promised for that")
        # passes are as many wherever the weights lie
        timed = {
            name: program for name, program in known.items() if program.figure == "tokens_per_s"
        }
        known = {
            **known,
            **{name: program._replace(wanted=None) for name, program in timed.items()},
        }

    def say(row: Row) -> None:
        words = row.get("reason") or f"{row['tokens_per_s']:.2f} tokens/s"
        print(f"{row['peer']}: {words}", file=sys.stderr)
        bench.row(row)

    rows = compare(peer or list(known), known, common, say)
    return Findings(
        rows=rows, tables=[(COLUMNS, rows)], guards=guards_of(rows), has_failed="reason" in rows[0]
    )


def _known(*, lookup: bool, gguf: str, experts: bool) -> Mapping[str, Program]:
    """Return the programs that are compared in one of these ways. Raises `UserError`."""
    one_of([gguf], ("BF16", "Q8_0", "Q4_0"), "--gguf")
    if lookup + experts + (gguf != "BF16") > 1:
        raise UserError("--lookup, --gguf and --experts compare by themselves: give one of them")
    return LOOKUPS if lookup else EXPERTS if experts else PROGRAMS if gguf == "BF16" else BLOCKS
