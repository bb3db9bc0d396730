"""The promises of the main job (streaming, memory, speed, prompt, start), beside their ceilings.

`streaming` and `prompt` are rows of `passes`, `speed` is `decode` with three trees; memory and
start are measured in fresh processes. The ceiling of everything that streams is a plain reader of
as many bytes, in turn with the passes.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Annotated

import typer

from offload.bench.harness.command import Bench, command, one_of, say_link
from offload.bench.harness.prompts import prompts
from offload.bench.harness.record import Row
from offload.bench.harness.setting import PROMPT_TOKENS, Setting, find_setting
from offload.bench.latency import decode, passes
from offload.cli.console import Console
from offload.units import parse_size

SPEED_TREES = ("64x16", "128x20", "grown:128x20")


def streaming(size: str) -> Row:
    """Time back-to-back one-token passes against the plain reader, in turn."""
    return _passes(
        size,
        "streaming: one-token sweep / plain reader of the same bytes",
        "<= 1.10",
        is_prompt=False,
    )


def prompt(size: str) -> Row:
    """Time the pass that takes in 128 prompt tokens against one-token passes right after it."""
    name = f"prompt: sweep of {PROMPT_TOKENS} prompt tokens / one-token sweep"
    return _passes(size, name, "<= 1.30", is_prompt=True)


def _passes(size: str, name: str, wanted: str, *, is_prompt: bool) -> Row:
    setting = _setting(size)
    with setting.open("none", context=1024) as decoder:
        measured = passes.measure(
            setting, decoder, prompts(["code"], 5), passes.Effort((1,), 5, 3, 0.0)
        )
        num_bytes = decoder.plan.streamed_bytes
    setting.prove(measured.written)
    seconds = [one.seconds for one in measured.passes]
    ones = [median(seconds[at : at + 3]) for at in range(0, 15, 3)]
    above, below = (measured.prompt_s, ones) if is_prompt else (ones, measured.read_s[1:])
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    figures = {
        "sweep_s": median(ones),
        "plain_reader_bytes_per_s": num_bytes / median(measured.read_s),
    }
    told = {"row": name, "value": median(ratios), "wanted": wanted, **figures}
    return {**told, "streamed_bytes": num_bytes, "ratios": ratios}


def speed(size: str) -> Row:
    """Measure tokens per second with and without trees, in turns, and the link's used share."""
    setting = _setting(size)
    effort = decode.Effort(6, 96, 8, (0.0,), ("none", *SPEED_TREES))
    with decode.open_for(setting, effort) as decoder:
        measured = decode.measure(setting, decoder, effort, prompts(["code"], effort.num_prompts))
    near_ties = setting.prove(measured.written).num_near
    names = (
        "decode_tokens_per_s",
        "speedup",
        "tokens_per_sweep",
        "draft_s",
        "stall_s",
        "link_utilisation",
    )
    rows = {
        row["tree"]: {name: row[name] for name in names if name in row}
        for row in decode.rows_of(measured.runs)
    }
    told = {
        "row": f"speed: tokens/s with {' and '.join(SPEED_TREES)} / without a tree",
        "near_ties": near_ties,
    }
    told |= {
        "value": [rows[tree]["speedup"] for tree in SPEED_TREES],
        "threads": measured.settings["num_threads"],
    }
    return {**told, "wanted": ">= 4.5 (5.5 while the link is the slower side)", **rows}


def memory(size: str) -> Row:
    """Measure peak resident memory beyond the libraries, in a fresh process, beside its budget."""
    figures = _in_fresh_process(_MEMORY, size)
    name = "memory: (peak RSS - RSS after the imports) / --ram"
    return {
        "row": name,
        "value": figures["grown_bytes"] / figures["ram_bytes"],
        "wanted": "<= 1",
        **figures,
    }


def start(size: str) -> Row:
    """Time `offload --help`, and from the end of imports to the first layer of the first pass."""
    help_s = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "offload", "--help"], check=True, capture_output=True)
        help_s.append(time.perf_counter() - started)
    first_s = median(_in_fresh_process(_START, size)["first_layer_s"] for _ in range(3))
    name = "start: offload --help, then imports to first layer of the first sweep (s)"
    return {"row": name, "value": [median(help_s), first_s], "wanted": "< 0.3, < 1"}


# Transformers imports lazily: models are named, so that their imports are over before anything is
# measured.
_IMPORTS = """
import json, sys, time
import torch, transformers, transformers.models.llama.modeling_llama
_ = transformers.modeling_utils.PreTrainedModel, transformers.AutoModelForCausalLM
from offload.cli.demo import PAIR, PROMPT, demo_options
from offload.engine.team import Hooks
from offload.engine.load import open_decoder
from offload.machine import peak_rss_bytes, rss_bytes
target, options = sys.argv[1], demo_options(int(sys.argv[2]), "64x16")
"""
_MEMORY = f"""{_IMPORTS}
before = rss_bytes()
with open_decoder(target, PAIR / "draft", options) as decoder:
    decoder.generate((decoder.encode(PROMPT, raw=True) * 4)[:{PROMPT_TOKENS}], max_new_tokens=64)
    found = {{"planned_bytes": decoder.plan.total_bytes, "grown_bytes": peak_rss_bytes() - before}}
print(json.dumps({{"ram_bytes": int(sys.argv[2]), "imported_bytes": before, **found}}))
"""
_START = f"""{_IMPORTS}
times, started = [], time.perf_counter()
hooks = Hooks(on_layer=lambda: times.append(time.perf_counter()))
with open_decoder(target, PAIR / "draft", options, hooks=hooks) as decoder:
    decoder.generate(PROMPT, max_new_tokens=1)
print(json.dumps({{"first_layer_s": times[0] - started}}))
"""
_ROWS: dict[str, Callable[[str], Row]] = {
    "streaming": streaming, "memory": memory, "speed": speed, "prompt": prompt, "start": start,
}  # fmt: skip


def _in_fresh_process(code: str, size: str) -> Row:
    """Return what a fresh process prints as JSON, given the target and a quarter of its size."""
    command = [
        sys.executable,
        "-c",
        code,
        str(_setting(size).target),
        str(parse_size(size, "--size") // 4),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: Row = json.loads(done.stdout.splitlines()[-1])
    return figures


def _setting(size: str) -> Setting:
    return find_setting(None, None, size, None, Console(is_quiet=True))


@command("main-job", examples=["offload bench main-job --row speed --size 2GB"])
def main(
    bench: Bench,
    row: Annotated[
        list[str] | None, typer.Option(metavar="ROW", help=f"of {', '.join(_ROWS)}; default: all")
    ] = None,
    size: Annotated[
        list[str] | None, typer.Option(metavar="SIZE", help="default: 2GB, some rows 1GB too")
    ] = None,
) -> None:
    """The promises of the main job, each beside its ceiling; some minutes on two cores."""
    one_of(row or (), _ROWS, "--row")
    rate = say_link(_setting((size or ["2GB"])[0]))
    results = list[Row]()
    for name in row or _ROWS:
        for wish in size or (["1GB", "2GB"] if name in ("streaming", "memory") else ["2GB"]):
            results.append(bench.row({"size": wish, **_ROWS[name](wish)}))
            print(
                *(f"{key}: {value}" for key, value in results[-1].items()),
                sep="\n   ",
                end="\n\n",
                flush=True,
            )
    bench.finish(
        results, settings={"rows": list(row or _ROWS), "sizes": size}, ceiling={"bytes_per_s": rate}
    )
