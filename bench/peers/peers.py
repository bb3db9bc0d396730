"""Other programs with our model, prompts and memory: how many times more tokens/s ours gives.

With `--lookup` no program has a draft: copies of the text itself, and what counts is tokens per
pass. With `--experts` the target is a mixture of experts, of which a pass needs a few.

Every program runs in a process and a memory group of its own, whose cap counts the page cache too,
greedily and on the same prompts; slow ones get fewer of them and fewer new tokens, as the table
says. Each may use the better of one and two threads; ours chooses for itself. Ours is measured
first and last, because disks drift. No speed is printed for tokens that the original model,
resident in float32, would not have chosen.

Programs that are not installed are listed as missing; `--python` names another interpreter that has
them.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, NamedTuple

import typer

from offload.bench.harness.command import Bench, command, one_of, say_link, say_table
from offload.bench.harness.prompts import prompts
from offload.bench.harness.record import Guard, Row
from offload.bench.harness.setting import PROMPT_TOKENS, find_setting
from offload.bench.moe_pair.make import moe_setting
from offload.bench.peers.child import Order, rate
from offload.bench.peers.run import (
    Outcome,
    gguf_file,
    interpreter_with,
    last_line,
    proved,
    run_child,
)
from offload.cli.demo import cache_folder
from offload.engine.text import encode_prompt, load_tokenizer
from offload.errors import UserError
from offload.units import parse_size

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
_TUNED = {"num_assistant_tokens": 16, "num_assistant_tokens_schedule": "constant",
          "assistant_confidence_threshold": 0.0}  # fmt: skip


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
        """Return the program without a draft."""
        return self._replace(
            options={**self.options, "lookup": _LOOKUP_TOKENS}, figure="tokens_per_pass"
        )


def _ours(tree: str, size: tuple[int, int], wanted: float | None, **options: str) -> Program:
    needs = ("torch", "transformers")
    options = {"tree": tree, **options}
    title = " ".join(["ours,", *(f"--{name} {value}" for name, value in options.items())])
    return Program(title, f"{__package__}.ours", options, needs, *size, wanted, threads=())


def _transformers(
    title: str, size: tuple[int, int], wanted: float | None, **options: Any
) -> Program:
    options = {"weights": "disk", "assistant": None, **options}
    return Program(
        title, f"{__package__}.hugging_face", options, ("transformers", "accelerate"), *size, wanted
    )


def _llama_cpp(title: str, draft_tokens: int, size: tuple[int, int], wanted: float) -> Program:
    options = {"draft_tokens": draft_tokens}
    return Program(title, f"{__package__}.llama_cpp", options, ("llama_cpp", "gguf"), *size, wanted)


PROGRAMS: dict[str, Program] = {
    OURS: _ours("grown:128x20", _DRAFTED, None),
    "none": _ours("none", _ONE_BY_ONE, 5),
    "disk": _transformers("accelerate disk offload", _ONE_BY_ONE, 12),
    "disk-assistant": _transformers(
        "disk offload, assistant at its defaults", (12, 6), None, assistant={}
    ),
    "disk-tuned": _transformers("disk offload, assistant tuned", _DRAFTED, 3, assistant=_TUNED),
    "mmap": _transformers("transformers on the mmap", _ONE_BY_ONE, 8, weights="mmap"),
    "mmap-tuned": _transformers(
        "the mmap, assistant tuned", _DRAFTED, 3, weights="mmap", assistant=_TUNED
    ),
    "llama": _llama_cpp("llama.cpp on the mmap", 0, _ONE_BY_ONE, 8),
    "llama-draft": _llama_cpp("llama.cpp, its draft at n-max 16", 16, _DRAFTED, 2.5),
}


LOOKUPS = {
    OURS: _ours("dynamic:64x16", _COPIED, None).of_lookup(),
    "mmap": _transformers("transformers, prompt lookup", _COPIED, 1.3, weights="mmap").of_lookup(),
    "llama": _llama_cpp("llama.cpp, prompt lookup", 0, _COPIED, 1.3).of_lookup(),
}


BLOCKS = {
    OURS: _ours("auto", _DRAFTED, None),
    "none": _ours("none", _ONE_BY_ONE, None),
    "llama": _llama_cpp("llama.cpp on the mmap", 0, _ONE_BY_ONE, 3),
    "llama-draft": _llama_cpp("llama.cpp, its draft at n-max 16", 16, _DRAFTED, 2),
}

EXPERTS = {
    OURS: _ours("auto", _DRAFTED, None),
    "none": _ours("none", _DRAFTED, None),
    "layers": _ours("auto", _DRAFTED, 3, experts="layers"),
    "layers-64": _ours("dynamic:64x16", _DRAFTED, 3, experts="layers"),
    "llama": _llama_cpp("llama.cpp on the mmap", 0, _DRAFTED, 2),
    "llama-draft": _llama_cpp("llama.cpp, its draft at n-max 4", 4, _DRAFTED, 2),
}
_ROUNDED_ROWS = 1.0  # what scores may differ by where llama.cpp rounds rows to 8 bits as well


class Setting(NamedTuple):
    """What all programs have in common."""

    target: Path
    draft: Path
    model: Path  # small, computes what the target computes: the gate asks it
    gguf_folder: Path
    prompts: list[list[int]]
    cap_bytes: int
    pythons: tuple[str, ...]
    is_quick: bool = True
    # of the blocks that weights are stored in: of others all programs read the same GGUF file
    kind: str = "BF16"


def compare(
    names: Sequence[str],
    programs: Mapping[str, Program],
    setting: Setting,
    say: Callable[[Row], Any],
) -> list[Row]:
    """Measure ours, the named programs and ours again; return rows with ratios, ours first.

    Args:
        say: gets every row once it is known; ratios are only in what is returned.
    """
    outcomes: dict[str, Outcome] = {}
    for name in (OURS, *(name for name in names if name != OURS), OURS):
        outcome = measure(programs[name], setting)
        outcomes[name] = outcomes[name].joined(outcome) if name in outcomes else outcome
        say(_row(name, programs[name], outcome))
    rows = [_row(name, programs[name], outcome) for name, outcome in outcomes.items()]
    for row in rows[1:] if "tokens_per_s" in rows[0] else ():
        if "tokens_per_s" in row:
            wanted = programs[row["peer"]].wanted
            figure = programs[row["peer"]].figure
            row["ratio"] = rows[0][figure] / row[figure]
            row |= {} if wanted is None else {"wanted": wanted, "is_met": row["ratio"] >= wanted}
    return rows


def measure(program: Program, setting: Setting) -> Outcome:
    python = interpreter_with(program.needs, setting.pythons)
    if python is None:
        return Outcome(
            reason=f"missing: no interpreter here can import {' and '.join(program.needs)}"
        )
    target = setting.target
    draft = setting.draft
    model = setting.model
    noise = None
    try:
        if setting.kind != "BF16":
            target = model = gguf_file(target, setting.gguf_folder, python, setting.kind)
            noise = _ROUNDED_ROWS if "gguf" in program.needs else None
        elif "gguf" in program.needs:
            target = gguf_file(target, setting.gguf_folder, python)
        if "gguf" in program.needs:
            draft = gguf_file(draft, setting.gguf_folder, python)
    except subprocess.CalledProcessError as error:
        return Outcome(reason=f"failed: {last_line(error.stderr)}")
    num_tokens = (
        program.num_tokens if setting.is_quick else min(4 * program.num_tokens, _ROOM_FOR_NEW)
    )
    limit_s = QUICK_LIMIT_S if setting.is_quick else FULL_LIMIT_S
    prompts_of = setting.prompts[: program.num_prompts]
    what = program.module, program.options, str(target), str(draft), prompts_of, num_tokens, limit_s
    order = Order(*what, threads=list(program.threads), cap_bytes=setting.cap_bytes, group=None)
    return proved(run_child(python, order), model, setting.prompts, noise)


def _row(name: str, program: Program, outcome: Outcome) -> Row:
    row: Row = {"peer": name, "title": program.title}
    if outcome.reason:
        return {**row, "reason": outcome.reason}
    runs = list(outcome.runs)
    same = ("trial_tokens_per_s", "is_capped", "peak_bytes", "rss_bytes", "load_s")
    num_tokens = sum(run.num_decoded for run in runs)
    by_prompt = [rate([run]) for run in runs]
    row |= {
        "tokens_per_s": rate(runs),
        "s_per_token": 1 / rate(runs),
        "tokens_per_s_by_prompt": by_prompt,
    }
    row |= {"num_tokens": num_tokens, "prompts": [run.prompt for run in runs]}
    row |= {"threads": outcome.num_threads, "near_ties": outcome.num_near}
    return {
        **row,
        "num_prompts": len(set(row["prompts"])),
        "tokens_per_pass": num_tokens / sum(len(run.bursts) - 1 for run in runs),
        "first_token_s": mean(run.bursts[0][0] for run in runs),
        **{key: getattr(outcome, key) for key in same},
    }


def table(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Return heading and one line per row, as text; a row without figures says why."""
    yield [
        "",
        "tokens/s",
        "s/token",
        "ours / it",
        "wanted",
        "a pass",
        "tokens",
        "prompts",
        "threads",
        "first token",
        "memory",
    ]
    for row in rows:
        yield [row["title"], row["reason"]] if "reason" in row else _cells(row)


def _cells(row: Row) -> list[str]:
    ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
    wanted = (
        f">= {row['wanted']:g} {'met' if row['is_met'] else 'MISSED'}" if "wanted" in row else ""
    )
    held = (
        f"{row['peak_bytes'] / 1e9:.2f} GB"
        if row["is_capped"] and row["peak_bytes"]
        else "uncapped"
    )
    rates = [f"{row['tokens_per_s']:.2f}", f"{row['s_per_token']:.3f}", ratio, wanted]
    counts = [f"{row['tokens_per_pass']:.1f}", str(row["num_tokens"]), str(row["num_prompts"])]
    return [
        row["title"],
        *rates,
        *counts,
        str(row["threads"] or "own"),
        f"{row['first_token_s']:.1f} s",
        held,
    ]


def guards_of(rows: Sequence[Row]) -> dict[str, Guard]:
    """Return ours / theirs, prompt by prompt: absolute speed depends on the disk."""
    ours = _rates(rows[0])
    guards = {}
    for row in rows[1:]:
        ratios = {
            str(prompt): ours[prompt] / theirs
            for prompt, theirs in _rates(row).items()
            if prompt in ours
        }
        guards[f"ours / {row['peer']}"] = Guard(list(ratios.values()), "higher", list(ratios))
    return guards


def _rates(row: Row) -> dict[int, float]:
    pairs = list(zip(row.get("prompts", ()), row.get("tokens_per_s_by_prompt", ()), strict=True))
    return {prompt: mean(one for other, one in pairs if other == prompt) for prompt, _ in pairs}


Peers = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help=f"of {', '.join(PROGRAMS)}; default: all")
]
Cap = Annotated[
    str, typer.Option(metavar="SIZE", help="memory of each process, page cache included")
]
Python = Annotated[
    str | None, typer.Option(metavar="FILE", help="an interpreter that has what this one lacks")
]


Lookup = Annotated[
    bool,
    typer.Option("--lookup", help="without a draft: tokens per pass of copies, half the prompts"),
]


Experts = Annotated[
    bool, typer.Option("--experts", help="with a mixture of experts, trained when it is not there")
]


Blocks = Annotated[
    str,
    typer.Option("--gguf", metavar="TYPE", help="Q8_0 or Q4_0: ours and llama.cpp on that file"),
]


@command(
    *("peers", "size source quick compare"),
    examples=["offload bench peers --quick --peer mmap --python others/python"],
)
def main(
    bench: Bench,
    peer: Peers = None,
    cap: Cap = "1.2GB",
    python: Python = None,
    lookup: Lookup = False,
    gguf: Blocks = "BF16",
    experts: Experts = False,
) -> None:
    """How many times more tokens per second than other programs, with the same files, prompts and
    memory?
    """
    one_of([gguf], ("BF16", "Q8_0", "Q4_0"), "--gguf")
    if lookup + experts + (gguf != "BF16") > 1:
        raise UserError("--lookup, --gguf and --experts compare by themselves: give one of them")
    known = LOOKUPS if lookup else EXPERTS if experts else PROGRAMS if gguf == "BF16" else BLOCKS
    one_of(peer or (), known, "--peer")
    if python is not None and shutil.which(python) is None:
        raise UserError(f"--python must be an interpreter, cannot run {python}: check the path")
    cap_bytes = parse_size(cap, "--cap")
    size = bench.given("size")
    screen = bench.screen
    found = (
        moe_setting(size, None, screen) if experts else find_setting(None, None, size, None, screen)
    )
    tokenizer = load_tokenizer(found.origin)
    assert tokenizer is not None and found.draft is not None, "the packaged pair has both"
    num_prompts = max(one.num_prompts for one in known.values())
    part = slice(1, None, 2) if lookup else slice(None)
    texts = prompts(bench.given("source") or ["code"], num_prompts, part)
    ids = [
        encode_prompt(tokenizer, one.text, raw=True)[: None if one.then else PROMPT_TOKENS]
        for one in texts
    ]
    pythons = (sys.executable, *([python] if python else []))
    setting = Setting(
        found.target,
        found.draft,
        found.origin,
        cache_folder(),
        ids,
        cap_bytes,
        pythons,
        bench.quick,
        gguf,
    )
    settings = {**found.as_dict(), "ram_bytes": cap_bytes, "num_prompt_tokens": PROMPT_TOKENS, "lookup": lookup,
                "gguf": gguf, "experts": experts}  # fmt: skip
    bench.check_same(found._replace(ram_bytes=cap_bytes), lookup=lookup, experts=experts)
    ceiling = say_link(found)
    programs = known
    if settings["target_bytes"] <= cap_bytes:
        print("the target fits into --cap: no ratio was promised for that")
        timed = "tokens_per_s"  # passes are as many wherever the weights lie
        programs = {
            name: one._replace(wanted=None) if one.figure == timed else one
            for name, one in known.items()
        }

    def say(row: Row) -> None:
        print(
            f"{row['peer']}: {row.get('reason') or '{:.2f} tokens/s'.format(row['tokens_per_s'])}",
            file=sys.stderr,
        )
        bench.row(row)

    rows = compare(peer or list(known), programs, setting, say)
    head, *lines = table(rows)
    say_table(head, lines)
    bench.finish(rows, settings=settings, ceiling={"bytes_per_s": ceiling}, guards=guards_of(rows))
    if "reason" in rows[0]:
        raise typer.Exit(1)
