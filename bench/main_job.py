"""The promises of the main job, measured: streaming, memory, speed, prompt and start, each beside its ceiling.

The target is the packaged one, inflated; the ceiling of everything that streams is a plain reader of as many bytes, run
in turn with the sweeps, so that a disk that drifts slows both. No speed is printed for a token that the original model,
run resident in float32, would not have drawn.

    offload bench main-job                          all rows at 1 GB and 2 GB, some minutes on two cores
    offload bench main-job --row speed --size 2GB
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from offload.bench.plain_reader import plain_read_s, shards_of
from offload.bench.record import new_result, writable
from offload.cli.console import Console
from offload.config import Sampling, parse_size
from offload.errors import UserError

PROMPT_TOKENS, SPEED_TREES = 128, ("64x16", "128x20", "grown:128x20")
Row = dict[str, Any]


def streaming(size: str, *, rounds: int = 5, sweeps: int = 3) -> Row:
    """Back-to-back one-token sweeps against the plain reader, in turn."""
    from offload.cli.demo import PROMPT, demo_options, open_demo

    target = _target(size)
    with open_demo(target, demo_options(parse_size(size, "--size") // 4, "none"), _SILENT) as decoder:
        num_bytes = decoder.plan.streamed_bytes
        steps = iter(decoder.run(PROMPT, Sampling(), max_new_tokens=2 + rounds * (sweeps + 1), raw=True))
        pairs = []
        for _ in range(rounds):
            next(steps)  # not timed: it finds the slots that were filled while the plain reader ran
            sweep_s = _timed(lambda: list(islice(steps, sweeps))) / sweeps
            pairs.append((sweep_s, plain_read_s(shards_of(target), num_bytes)))
    return {
        "row": "streaming: one-token sweep / plain reader of the same bytes",
        "value": statistics.median(sweep_s / read_s for sweep_s, read_s in pairs),
        "wanted": "<= 1.10",
        "sweep_s": statistics.median(sweep_s for sweep_s, _ in pairs),
        "plain_reader_bytes_per_s": num_bytes / statistics.median(read_s for _, read_s in pairs),
        "streamed_bytes": num_bytes,
        "ratios": [sweep_s / read_s for sweep_s, read_s in pairs],
    }


def prompt(size: str, *, rounds: int = 5) -> Row:
    """The sweep that takes in 128 prompt tokens against one-token sweeps right after it."""
    from offload.cli.demo import demo_options, open_demo

    ratios = []
    with open_demo(_target(size), demo_options(parse_size(size, "--size") // 4, "none"), _SILENT) as decoder:
        ids = decoder.encode(held_out_prompts(1)[0], raw=True)[:PROMPT_TOKENS]
        list(decoder.run(ids, Sampling(), max_new_tokens=2))
        for _ in range(rounds):
            steps = iter(decoder.run(ids, Sampling(), max_new_tokens=3))
            prompt_s, one_s = _timed(lambda: next(steps)), _timed(lambda: list(islice(steps, 2))) / 2  # noqa: B023
            ratios.append(prompt_s / one_s)
    name = f"prompt: sweep of {len(ids)} prompt tokens / one-token sweep"
    return {"row": name, "value": statistics.median(ratios), "wanted": "<= 1.30", "ratios": ratios}


def speed(size: str, *, num_prompts: int = 6, num_tokens: int = 96, num_plain: int = 8) -> Row:
    """Tokens per second with and without trees, prompt by prompt in turn, and the share of the link that was used."""
    from offload.cli.demo import demo_options, open_demo

    target, totals = _target(size), {tree: _Total() for tree in ("none", *SPEED_TREES)}
    with open_demo(target, demo_options(parse_size(size, "--size") // 4, SPEED_TREES[-1]), _SILENT) as decoder:
        for text in held_out_prompts(num_prompts):
            ids = decoder.encode(text, raw=True)[:PROMPT_TOKENS]
            for tree, total in totals.items():
                result = decoder.generate(ids, max_new_tokens=num_plain if tree == "none" else num_tokens, tree=tree)
                ceiling = decoder.plan.streamed_bytes / plain_read_s(shards_of(target), decoder.plan.streamed_bytes)
                total.add(result, ceiling, _proved_gaps(ids, result.token_ids))
        threads = decoder.num_threads
    base = totals["none"].tokens_per_s
    rows = {tree: {**total.as_dict(), "speedup": total.tokens_per_s / base} for tree, total in totals.items()}
    return {
        "row": f"speed: tokens/s with {' and '.join(SPEED_TREES)} / without a tree",
        "value": [rows[tree]["speedup"] for tree in SPEED_TREES],
        "wanted": ">= 4.5 (5.5 while the link is the slower side)",
        "threads": threads,
        **rows,
    }


class _Total:
    """Sums over prompts of one tree."""

    def __init__(self) -> None:
        self.num_tokens = self.num_near = self.num_sweeps = self.num_bytes = 0
        self.decode_s = self.draft_s = self.stall_s = 0.0
        self.ceilings: list[float] = []

    def add(self, result: Any, ceiling: float, gaps: list[float]) -> None:
        stats = result.stats
        self.num_tokens += stats.num_new_tokens - stats.num_first_tokens
        self.num_near += sum(gap > 0 for gap in gaps)
        self.num_sweeps += stats.num_sweeps
        self.num_bytes += stats.bytes_streamed
        self.decode_s += stats.decode_s
        self.draft_s += stats.draft_s
        self.stall_s += stats.stall_s
        self.ceilings.append(ceiling)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.decode_s

    def as_dict(self) -> Row:
        rate = self.num_bytes / self.decode_s
        return {
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_sweep": self.num_tokens / self.num_sweeps,
            "sweep_s": self.decode_s / self.num_sweeps,
            "draft_s": self.draft_s / self.num_sweeps,
            "stall_s": self.stall_s / self.num_sweeps,
            "link_bytes_per_s": rate,
            "link_utilisation": rate / statistics.median(self.ceilings),
            "near_ties": self.num_near,
        }


def memory(size: str) -> Row:
    """Peak resident memory beyond the imported libraries, in a process of its own, against its budget."""
    figures = _in_fresh_process(f"from offload.bench.main_job import report_memory; report_memory({size!r})")
    name = "memory: (peak RSS - RSS after the imports) / --ram"
    return {"row": name, "value": figures["grown_bytes"] / figures["ram_bytes"], "wanted": "<= 1", **figures}


def report_memory(size: str) -> None:
    """Print the memory figures of this process as JSON; run by `memory` in a fresh one."""
    import torch  # noqa: F401
    import transformers

    from offload.machine import peak_rss_bytes, rss_bytes

    lazy_bytes = rss_bytes()
    _ = transformers.modeling_utils.PreTrainedModel, transformers.AutoModelForCausalLM  # imported lazily: now for good
    imported_bytes = rss_bytes()
    from offload.cli.demo import PROMPT, demo_options, open_demo

    ram_bytes = parse_size(size, "--size") // 4
    with open_demo(_target(size), demo_options(ram_bytes, "64x16"), _SILENT) as decoder:
        ids = (decoder.encode(PROMPT, raw=True) * 4)[:PROMPT_TOKENS]
        decoder.generate(ids, max_new_tokens=64)
        planned_bytes = decoder.plan.total_bytes
    figures = {"ram_bytes": ram_bytes, "planned_bytes": planned_bytes, "imported_bytes": imported_bytes}
    figures |= {"grown_bytes": peak_rss_bytes() - imported_bytes, "lazily_imported_bytes": imported_bytes - lazy_bytes}
    print(json.dumps(figures))


def start(size: str) -> Row:
    """`offload --help`, and from the end of the imports to the first layer of the first sweep."""
    command = [sys.executable, "-m", "offload", "--help"]
    help_s = statistics.median(
        _timed(lambda: subprocess.run(command, check=True, capture_output=True)) for _ in range(5)
    )
    code = f"from offload.bench.main_job import report_start; report_start({size!r})"
    first_s = statistics.median(_in_fresh_process(code)["first_layer_s"] for _ in range(3))
    name = "start: offload --help, then imports to first layer of the first sweep (s)"
    return {"row": name, "value": [help_s, first_s], "wanted": "< 0.3, < 1"}


def report_start(size: str) -> None:
    """Print the seconds from the end of the imports to the first computed layer; run by `start` in a fresh process."""
    import transformers.models.llama.modeling_llama

    from offload.cli.demo import PAIR, PROMPT
    from offload.engine.load import load

    target = _target(size)
    times: list[float] = []
    started = time.perf_counter()

    def note_time() -> None:
        times.append(time.perf_counter() - started)

    ram_bytes = parse_size(size, "--size") // 4
    how: dict[str, Any] = {"tree": "64x16", "device": "cpu", "context": 512, "on_layer": note_time}
    with load(target, PAIR / "draft", ram=ram_bytes, **how) as decoder:
        decoder.generate(PROMPT, max_new_tokens=1)
    print(json.dumps({"first_layer_s": times[0], "module": transformers.__name__}))


def held_out_prompts(num_prompts: int) -> list[str]:
    """Beginnings of library files on which the pair was not trained."""
    from offload.bench.train_pair import corpus_files, read_source

    files = [path for path in corpus_files(held_out=True) if 4000 < path.stat().st_size < 60000]
    return [read_source(path)[:1200] for path in files[:: max(1, len(files) // num_prompts)][:num_prompts]]


_SILENT = Console(is_quiet=True)
_ROWS: dict[str, Callable[[str], Row]] = {
    "streaming": streaming,
    "memory": memory,
    "speed": speed,
    "prompt": prompt,
    "start": start,
}


def _target(size: str) -> Path:
    from offload.cli.demo import inflated_target

    return inflated_target(parse_size(size, "--size"), lambda done, total: None)


def _proved_gaps(prompt_ids: list[int], new_ids: list[int]) -> list[float]:
    """The gate: how far each token is from the original model's float32 draw; more than rounding ends the bench."""
    from offload.bench.gate import draws_hold
    from offload.cli.demo import PAIR
    from offload.tuning.audit import draw_gaps

    gaps = draw_gaps(PAIR / "target", prompt_ids, new_ids, Sampling())
    draws_hold(gaps, Sampling())
    return gaps


def _in_fresh_process(code: str) -> Row:
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    figures: Row = json.loads(done.stdout.splitlines()[-1])
    return figures


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main(
    row: Annotated[
        list[str] | None, typer.Option(metavar="ROW", help=f"any of {', '.join(_ROWS)}; default: all")
    ] = None,
    size: Annotated[
        list[str] | None, typer.Option(metavar="SIZE", help="of the target; default: 2GB, some rows 1GB too")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="store the result", callback=writable)
    ] = None,
) -> None:
    """The promises of the main job, each beside its ceiling."""
    if unknown := [name for name in row or () if name not in _ROWS]:
        raise UserError(f"--row must be one of {', '.join(_ROWS)}, got {unknown[0]!r}: leave it out for all")
    from offload.bench import setting as common  # heavy, and rows import this file into processes that they weigh

    rate = common.say_link(shards_of(_target((size or ["2GB"])[0])))
    results = []
    for name in row or _ROWS:
        for wish in size or (["1GB", "2GB"] if name in ("streaming", "memory") else ["2GB"]):
            results.append({"size": wish, **_ROWS[name](wish)})
            print(*(f"{key}: {value}" for key, value in results[-1].items()), sep="\n   ", end="\n\n", flush=True)
    settings = {"rows": list(row or _ROWS), "sizes": size}
    result = new_result("main-job", settings=settings, ceiling={"bytes_per_s": rate}, rows=results, guards={})
    common.finish(result, json_file, None)


if __name__ == "__main__":
    from offload.bench.suite import run_alone

    run_alone("main-job")
