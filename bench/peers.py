"""The same model, prompts and memory for other programs: how many times more tokens per second ours gives.

Every program runs in a process and a memory group of its own, whose cap counts the page cache too, greedily and on the
same prompts; slow ones get fewer of them and fewer new tokens, as the table says. Each may use the better of one and
two threads; ours chooses for itself. Ours is measured first and last, because disks drift. No speed is printed for
tokens that the original model, resident in float32, would not have chosen.

    offload bench peers --quick                            13 to 15 minutes on two cores
    offload bench peers --quick --peer mmap --python ~/others/bin/python

Programs that are not installed are listed as missing; `--python` names another interpreter that has them.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, NamedTuple

import typer

from offload.bench import setting as common
from offload.bench.peer_child import Order, rate
from offload.bench.peer_run import Outcome, gguf_file, interpreter_with, last_line, proved, run_child
from offload.bench.plain_reader import shards_of
from offload.bench.record import Guard, new_result, store
from offload.bench.setting import PROMPT_TOKENS
from offload.bench.text_table import aligned
from offload.config import parse_size
from offload.errors import UserError

OURS, QUICK_LIMIT_S, FULL_LIMIT_S = "ours", 60.0, 240.0
_ROOM_FOR_NEW = 300  # of the context of 512, beside the prompt and the longest burst
Row = dict[str, Any]
Say = Callable[[Row], None]


class Program(NamedTuple):
    """One way to decode, and how much of it is measured in quick mode."""

    title: str
    module: str  # has `open_peer`
    options: dict[str, Any]  # see the module
    needs: tuple[str, ...]  # what the interpreter must be able to import
    num_tokens: int  # new ones per prompt; four times as many without --quick
    num_prompts: int
    wanted: float | None = None  # at least: our tokens per second / theirs
    threads: tuple[int, ...] = (1, 2)

    @property
    def reads_gguf(self) -> bool:
        """Whether it wants the weights in llama.cpp's format."""
        return "gguf" in self.needs


def _ours(title: str, tree: str, size: tuple[int, int], wanted: float | None) -> Program:
    needs = ("torch", "transformers")
    return Program(title, f"{_HERE}.peer_offload", {"tree": tree}, needs, *size, wanted, threads=())


def _transformers(title: str, size: tuple[int, int], wanted: float | None, **options: Any) -> Program:
    options = {"weights": "disk", "assistant": None, "lookup": 0, **options}
    return Program(title, f"{_HERE}.peer_transformers", options, ("transformers", "accelerate"), *size, wanted)


def _llama_cpp(title: str, draft_tokens: int, size: tuple[int, int], wanted: float) -> Program:
    options = {"draft_tokens": draft_tokens}
    return Program(title, f"{_HERE}.peer_llama_cpp", options, ("llama_cpp", "gguf"), *size, wanted)


_HERE = "offload.bench"
_TUNED = {
    "num_assistant_tokens": 16,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
}
_ONE_BY_ONE, _DRAFTED = (8, 2), (20, 6)  # (new tokens, prompts)
PROGRAMS: dict[str, Program] = {
    OURS: _ours("ours, --tree grown:128x20", "grown:128x20", _DRAFTED, None),
    "none": _ours("ours, --tree none", "none", _ONE_BY_ONE, 5),
    "disk": _transformers("accelerate disk offload", _ONE_BY_ONE, 12),
    "disk-assistant": _transformers("disk offload, assistant at its defaults", (12, 6), None, assistant={}),
    "disk-tuned": _transformers("disk offload, assistant tuned", _DRAFTED, 3, assistant=_TUNED),
    "disk-lookup": _transformers("disk offload, prompt lookup", (8, 6), None, lookup=10),
    "mmap": _transformers("transformers on the mmap", _ONE_BY_ONE, 8, weights="mmap"),
    "mmap-tuned": _transformers("the mmap, assistant tuned", _DRAFTED, 3, weights="mmap", assistant=_TUNED),
    "llama": _llama_cpp("llama.cpp on the mmap", 0, _ONE_BY_ONE, 8),
    "llama-draft": _llama_cpp("llama.cpp, its draft at n-max 16", 16, _DRAFTED, 2.5),
    "airllm": Program("airllm", f"{_HERE}.peer_airllm", {}, ("airllm",), 2, 1, threads=(1,)),
}


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


def compare(names: Sequence[str], programs: Mapping[str, Program], setting: Setting, say: Say) -> list[Row]:
    """Measure ours, the named programs and ours again; the rows, ours first, with their ratios.

    Args:
        say: hears of every row once it is known; ratios are only in what is returned.
    """
    outcomes: dict[str, Outcome] = {}
    for name in (OURS, *(name for name in names if name != OURS), OURS):
        outcome = measure(programs[name], setting)
        outcomes[name] = _joined(outcomes[name], outcome) if name in outcomes else outcome
        say(_row(name, programs[name], outcome))
    rows = [_row(name, programs[name], outcome) for name, outcome in outcomes.items()]
    ours = rows[0].get("tokens_per_s")
    return [{**row, **_ratio(ours, row, programs[row["peer"]].wanted)} for row in rows]


def measure(program: Program, setting: Setting) -> Outcome:
    """Run one program and prove its tokens."""
    python = interpreter_with(program.needs, setting.pythons)
    if python is None:
        return Outcome(reason=f"missing: no interpreter here can import {' and '.join(program.needs)}")
    target, draft = setting.target, setting.draft
    try:
        if program.reads_gguf:
            target, draft = (gguf_file(path, setting.gguf_folder, python) for path in (target, draft))
    except subprocess.CalledProcessError as error:
        return Outcome(reason=f"failed: {last_line(error.stderr)}")
    num_tokens = program.num_tokens if setting.is_quick else min(4 * program.num_tokens, _ROOM_FOR_NEW)
    order = Order(
        module=program.module,
        options=program.options,
        target=str(target),
        draft=str(draft),
        prompts=setting.prompts[: program.num_prompts],
        num_tokens=num_tokens,
        limit_s=QUICK_LIMIT_S if setting.is_quick else FULL_LIMIT_S,
        threads=list(program.threads),
        cap_bytes=setting.cap_bytes,
        group=None,
    )
    return proved(run_child(python, order), setting.model, setting.prompts)


def _joined(first: Outcome, second: Outcome) -> Outcome:
    """Both measurements of one program; a reason of either stands."""
    if first.reason or second.reason:
        return Outcome(reason=first.reason or second.reason)
    peaks = [each.peak_bytes for each in (first, second) if each.peak_bytes is not None]
    return second._replace(
        runs=[*first.runs, *second.runs],
        num_near=first.num_near + second.num_near,
        is_capped=first.is_capped and second.is_capped,
        peak_bytes=max(peaks, default=None),
        rss_bytes=max(first.rss_bytes, second.rss_bytes),
    )


def _row(name: str, program: Program, outcome: Outcome) -> Row:
    row: Row = {"peer": name, "title": program.title}
    if outcome.reason:
        return {**row, "reason": outcome.reason}
    runs = list(outcome.runs)
    return {
        **row,
        "tokens_per_s": rate(runs),
        "s_per_token": 1 / rate(runs),
        "tokens_per_s_by_prompt": [rate([run]) for run in runs],
        "tokens_per_pass": sum(run.num_decoded for run in runs) / sum(len(run.bursts) - 1 for run in runs),
        "first_token_s": sum(run.bursts[0][0] for run in runs) / len(runs),
        "num_tokens": sum(run.num_decoded for run in runs),
        "prompts": [run.prompt for run in runs],
        "num_prompts": len({run.prompt for run in runs}),
        "threads": outcome.num_threads,
        "trial_tokens_per_s": outcome.trial_tokens_per_s,
        "near_ties": outcome.num_near,
        "is_capped": outcome.is_capped,
        "peak_bytes": outcome.peak_bytes,
        "rss_bytes": outcome.rss_bytes,
        "load_s": outcome.load_s,
    }


def _ratio(ours: float | None, row: Row, wanted: float | None) -> Row:
    """Ours / theirs, where both are known."""
    if ours is None or row["peer"] == OURS or "tokens_per_s" not in row:
        return {}
    ratio = ours / row["tokens_per_s"]
    return {"ratio": ratio} if wanted is None else {"ratio": ratio, "wanted": wanted, "is_met": ratio >= wanted}


def table(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Heading and one line per row, as text; a row without figures says why."""
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
    wanted = f">= {row['wanted']:g} {'met' if row['is_met'] else 'MISSED'}" if "wanted" in row else ""
    held = f"{row['peak_bytes'] / 1e9:.2f} GB" if row["is_capped"] and row["peak_bytes"] else "uncapped"
    rates = [f"{row['tokens_per_s']:.2f}", f"{row['s_per_token']:.3f}", ratio, wanted]
    counts = [f"{row['tokens_per_pass']:.1f}", str(row["num_tokens"]), str(row["num_prompts"])]
    return [row["title"], *rates, *counts, str(row["threads"] or "own"), f"{row['first_token_s']:.1f} s", held]


def guards_of(rows: Sequence[Row]) -> dict[str, Guard]:
    """Ours / theirs, prompt by prompt: absolute speed is the disk's affair."""
    ours = _rates(rows[0])
    guards = {}
    for row in rows[1:]:
        ratios = {str(prompt): ours[prompt] / theirs for prompt, theirs in _rates(row).items() if prompt in ours}
        guards[f"ours / {row['peer']}"] = Guard(list(ratios.values()), "higher", list(ratios))
    return guards


def _rates(row: Row) -> dict[int, float]:
    """Tokens per second of every prompt, in the mean where it was run twice."""
    found: dict[int, list[float]] = {}
    for prompt, one in zip(row.get("prompts", ()), row.get("tokens_per_s_by_prompt", ()), strict=True):
        found.setdefault(prompt, []).append(one)
    return {prompt: mean(rates) for prompt, rates in found.items()}


def _setting(size: str, cap: str, python: str | None, is_quick: bool) -> Setting:
    from offload.bench.main_job import held_out_prompts
    from offload.cli.demo import PAIR, cache_folder, inflated_target
    from offload.engine.text import encode_prompt, load_tokenizer

    if python is not None and shutil.which(python) is None:
        raise UserError(f"--python must be an interpreter, cannot run {python}: check the path")
    cap_bytes = parse_size(cap, "--cap")
    tokenizer = load_tokenizer(PAIR / "target")
    assert tokenizer is not None, "the packaged pair has one"
    texts = held_out_prompts(max(program.num_prompts for program in PROGRAMS.values()))
    return Setting(
        target=inflated_target(parse_size(size, "--size"), lambda done, total: None),
        draft=PAIR / "draft",
        model=PAIR / "target",
        gguf_folder=cache_folder(),
        prompts=[encode_prompt(tokenizer, text, raw=True)[:PROMPT_TOKENS] for text in texts],
        cap_bytes=cap_bytes,
        pythons=(sys.executable, *([python] if python else [])),
        is_quick=is_quick,
    )


def _promised(setting: Setting) -> Mapping[str, Program]:
    """All programs; nothing was promised for a target that fits into the memory of each."""
    if sum(path.stat().st_size for path in shards_of(setting.target)) > setting.cap_bytes:
        return PROGRAMS
    print("the target fits into --cap: no ratio was promised for that")
    return {name: program._replace(wanted=None) for name, program in PROGRAMS.items()}


def _settings(setting: Setting) -> Row:
    return {
        "target": setting.target.name,
        "target_bytes": sum(path.stat().st_size for path in shards_of(setting.target)),
        "draft": setting.draft.name,
        "ram_bytes": setting.cap_bytes,
        "num_prompt_tokens": PROMPT_TOKENS,
        "quick": setting.is_quick,
    }


def _print_row(row: Row) -> None:
    said = row.get("reason") or f"{row['tokens_per_s']:.2f} tokens/s"
    print(f"{row['peer']}: {said}", file=sys.stderr, flush=True)


Quick = Annotated[bool, typer.Option("--quick", help="a quarter of the tokens; 15 minutes for all, on two cores")]
Names = Annotated[
    list[str] | None, typer.Option("--peer", metavar="NAME", help=f"of {', '.join(PROGRAMS)}; several; default: all")
]
Cap = Annotated[str, typer.Option(metavar="SIZE", help="memory of each process, page cache included")]
Python = Annotated[str | None, typer.Option(metavar="FILE", help="another interpreter, for peers that this one lacks")]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(
    epilog="Examples:\n\n    offload bench peers --quick\n\n"
    "    offload bench peers --quick --peer none --peer llama-draft --python ~/others/bin/python --json peers.json"
)
def main(
    quick: Quick = False,
    peer: Names = None,
    size: common.Size = "2GB",
    cap: Cap = "1.2GB",
    python: Python = None,
    json_file: common.Json = None,
) -> None:
    """How many times more tokens per second than other programs, with the same files, prompts and memory?"""
    names = peer or list(PROGRAMS)
    if unknown := [name for name in names if name not in PROGRAMS]:
        raise UserError(f"--peer must be one of {', '.join(PROGRAMS)}, got {unknown[0]!r}: leave it out for all")
    setting = _setting(size, cap, python, quick)
    ceiling = common.say_link(shards_of(setting.target))
    rows = compare(names, _promised(setting), setting, _print_row)
    print(aligned(table(rows)))
    result = new_result(
        "peers", settings=_settings(setting), ceiling={"bytes_per_s": ceiling}, rows=rows, guards=guards_of(rows)
    )
    if json_file:
        store(result, json_file)
    print(json.dumps(result.as_dict()))
    if "reason" in rows[0]:
        raise typer.Exit(1)


if __name__ == "__main__":
    from offload.bench.suite import run_alone

    run_alone("peers")
