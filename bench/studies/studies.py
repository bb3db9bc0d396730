"""Evidence for trees and rules, one command each: figures as JSON, a picture, a table, one JSON line at the end.

All use the packaged pair, resident in memory but for `choice`, and prompts from files that it was not trained on: 128
tokens and 128 new ones. Standard errors take prompts as what is independent.

    offload bench tree size --quick             minutes on two cores; without --quick, a quarter of an hour
    offload bench tree rejection --out results

| name | what | in the paper (2402.12374) |
|---|---|---|
| size | tokens per step against tree size, measured and predicted; the row `scalable` | figures 2 and 5a |
| rejection | rejection rate against the number of children, for every rule | figure 3 |
| temperature | rules against temperature and top-p with the tree fixed | figure 5b, table 6 |
| baselines | SpecInfer 5x8, 8x8, 16x48 against Sequoia of the same size | tables 4 and 5 |
| choice | the tree chosen for the machine against fixed sizes, really streamed | figure 5c, table 3 |
| dynamic | trees that the draft's scores shape against static ones of the same size | |
| traces | tokens per sweep as traces of other text predict them, and as measured | |
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers.utils import logging

from offload.bench.harness.command import one_of, say_table
from offload.bench.harness.picture import draw
from offload.bench.harness.record import writable
from offload.bench.harness.whole_file import whole
from offload.bench.studies import choice, dynamic, rejection, rules, size
from offload.bench.studies.pair_text import FULL, PROMPT_TOKENS, QUICK, Figures, Pair, Scale

STUDIES: dict[str, Callable[[Pair, Scale], Figures]] = {  # figures with `table` and, but for `traces`, `picture`
    "size": size.measure,
    "rejection": rejection.measure,
    "temperature": rules.measure_temperature,
    "baselines": rules.measure_baselines,
    "choice": choice.measure,
    "dynamic": dynamic.measure,
    "traces": choice.measure_traces,
}


def run_study(name: str, pair: Pair, scale: Scale, folder: Path) -> Figures:
    """Measure, write `<name>.json` and `<name>.png` into `folder`; returns what the JSON file holds."""
    started, started_cpu = time.perf_counter(), time.process_time()
    figures = STUDIES[name](pair, scale)
    settings = {**scale._asdict(), "num_prompt_tokens": PROMPT_TOKENS, "dtype": "float32"}
    times = {"elapsed_s": time.perf_counter() - started, "cpu_s": time.process_time() - started_cpu}
    result = {"study": name, "settings": settings, **times, **figures}
    with whole(folder / f"{name}.json") as place:
        place.write_text(json.dumps(result, indent=1) + "\n")
    if "picture" in figures:
        with whole(folder / f"{name}.png") as place:
            draw(figures["picture"]).savefig(place)
    return result


def main(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"one of {', '.join(STUDIES)}")],
    quick: Annotated[bool, typer.Option("--quick", help="half a minute to six minutes on two cores, by study")] = False,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="for NAME.json and NAME.png")] = Path("build/studies"),
) -> None:
    """One study of trees: a table, a picture, one JSON line."""
    one_of([name], STUDIES, "bench tree")
    for file in (out / f"{name}.json", out / f"{name}.png"):
        writable(file)
    logging.disable_progress_bar()  # of weights that take a blink to load
    torch.set_num_threads(1)  # passes of a few rows are several times slower on two threads
    result = run_study(name, Pair(), QUICK if quick else FULL, out)
    head, *rows = result["table"]
    say_table(head, rows)
    print(f"{out / name}.json: {result['elapsed_s']:.0f} s, {result['cpu_s']:.0f} s of one core")
    print(json.dumps(result))
