"""The promises of the main job (streaming, memory, speed, prompt, start), beside their ceilings.

`streaming` and `prompt` are rows of `passes`, `speed` is `decode` with three trees; memory and
start are measured in fresh processes. The ceiling of what streams is a plain reader, in turn with
it.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Annotated

from offload.bench.harness.command import Bench, Findings, command, flag, one_of
from offload.bench.harness.memory_child import Order
from offload.bench.harness.prompts import prompts
from offload.bench.harness.setting import PROMPT_TOKENS, Setting
from offload.bench.harness.tables import Row, ratios
from offload.bench.latency import decode, passes
from offload.checkpoint.packaged import PAIR
from offload.errors import UserError
from offload.timer import timed

SPEED_TREES = ("64x16", "128x20", "grown:128x20")
SPEED = decode.Runs(6, 96, 8, trees=("none", *SPEED_TREES), temperatures=(0.0,))
_RATES = ("decode_tokens_per_s", "speedup", "tokens_per_sweep", "draft_s", "stall_s")


def streaming(bench: Bench, setting: Setting) -> Row:
    """Time back-to-back one-token passes against the plain reader, in turn."""
    measured, row = _passes(setting)
    name = "streaming: one-token sweep / plain reader of the same bytes"
    over = ratios(row["ones_s"], measured.read_s[1:])
    return {"row": name, "wanted": "<= 1.10", "value": median(over), "ratios": over, **row}


def prompt(bench: Bench, setting: Setting) -> Row:
    """Time the pass that takes in 128 prompt tokens against one-token passes right after it."""
    measured, row = _passes(setting)
    name = f"prompt: sweep of {PROMPT_TOKENS} prompt tokens / one-token sweep"
    over = ratios(measured.prompt_s, row["ones_s"])
    return {"row": name, "wanted": "<= 1.30", "value": median(over), "ratios": over, **row}


@cache
def _passes(setting: Setting) -> tuple[passes.Measured, Row]:
    """Return five rounds of a prompt's pass and three one-token passes, proved."""
    with setting.open("none", context=1024) as decoder:
        effort = passes.Effort((1,), 5, 3, 0.0)
        measured = passes.measure(setting, decoder, prompts(["code"], 5), effort)
        num_bytes = decoder.plan.streamed_bytes
    if not num_bytes:
        rule = "rows of passes need a target of which layers are streamed, all of this one stay"
        raise UserError(f"{rule}: give a larger --size")
    setting.prove(measured.written)
    seconds = [timed.seconds for timed in measured.passes]
    ones_s = [median(seconds[at : at + 3]) for at in range(0, 15, 3)]
    return measured, {
        "sweep_s": median(ones_s),
        "plain_reader_bytes_per_s": num_bytes / median(measured.read_s),
        "streamed_bytes": num_bytes,
        "ones_s": ones_s,
    }


def speed(bench: Bench, setting: Setting) -> Row:
    """Measure tokens per second with and without trees, in turns, and the link's used share."""
    chosen = prompts(["code"], SPEED.num_prompts)
    with SPEED.open(setting) as decoder:
        measured = decode.measure(bench, setting, decoder, SPEED, chosen)
    near_ties = setting.prove(measured.written).num_near
    rows = {
        row["tree"]: {name: row[name] for name in (*_RATES, "link_utilisation") if name in row}
        for row in decode.rows_of(measured.runs)
    }
    return {
        "row": f"speed: tokens/s with {' and '.join(SPEED_TREES)} / without a tree",
        "near_ties": near_ties,
        "value": [rows[tree]["speedup"] for tree in SPEED_TREES],
        "threads": measured.settings["num_threads"],
        "wanted": ">= 4.5 (5.5 while the link is the slower side)",
        **rows,
    }


def memory(bench: Bench, setting: Setting) -> Row:
    """Measure peak resident memory beyond the libraries, in a fresh process, beside its budget."""
    measured = _in_fresh_process(setting, 64)
    return {
        "row": "memory: (peak RSS - RSS after the imports) / --ram",
        "value": measured["peak_bytes"] / measured["ram_bytes"],
        "wanted": "<= 1",
        "grown_bytes": measured["peak_bytes"],
        **{name: measured[name] for name in ("ram_bytes", "imported_bytes", "planned_bytes")},
    }


def start(bench: Bench, setting: Setting) -> Row:
    """Time `offload --help`, and from the end of imports to the first layer of the first pass."""
    ask = [sys.executable, "-m", "offload", "--help"]
    help_s = [timed(lambda: subprocess.run(ask, check=True, capture_output=True)) for _ in range(5)]
    first_s = [_in_fresh_process(setting, 1)["first_layer_s"] for _ in range(3)]
    return {
        "row": "start: offload --help, then imports to first layer of the first sweep (s)",
        "value": [median(help_s), median(first_s)],
        "wanted": "< 0.3, < 1",
    }


def _in_fresh_process(setting: Setting, num_tokens: int) -> Row:
    """Return the figures of one text in a process of a quarter of the target's size."""
    options = {"ram": setting.ram_bytes, "tree": "64x16", "context": 512, "lookup": True}
    order = Order(str(setting.target), str(PAIR / "draft"), options, 1, num_tokens, PROMPT_TOKENS)
    return order.in_fresh_process()


_ROWS: dict[str, Callable[[Bench, Setting], Row]] = {
    job.__name__: job for job in (streaming, memory, speed, prompt, start)
}


@command("main-job", examples=["offload bench main-job --row speed --size 2GB"])
def main(
    bench: Bench,
    row: Annotated[list[str] | None, flag("ROW", f"of {', '.join(_ROWS)}; default: all")] = None,
    size: Annotated[list[str] | None, flag("SIZE", "default: 2GB, some rows 1GB too")] = None,
) -> Findings:
    """The promises of the main job, each beside its ceiling; some minutes on two cores."""
    one_of(row or (), _ROWS, "--row")
    # memory is for the largest of what any row opens
    need = SPEED.need()
    bench.say_link(bench.setting(size=(size or ["2GB"])[0], need=need))
    results = list[Row]()
    for name in row or _ROWS:
        for wish in size or (["1GB", "2GB"] if name in ("streaming", "memory") else ["2GB"]):
            measured = _ROWS[name](bench, bench.setting(size=wish, need=need))
            results.append(bench.row({"size": wish, **measured}))
            lines = [f"{key}: {value}" for key, value in results[-1].items()]
            print(*lines, sep="\n   ", end="\n\n", flush=True)
    return Findings(rows=results, settings={"rows": list(row or _ROWS), "sizes": size})
