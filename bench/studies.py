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
"""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from matplotlib.figure import Figure
from transformers.utils import logging

from offload.bench import study_choice, study_rejection, study_rules, study_size
from offload.bench.pair_text import PROMPT_TOKENS, Pair
from offload.bench.record import writable
from offload.bench.scale import FULL, QUICK, Scale
from offload.bench.text_table import aligned
from offload.bench.whole_file import whole
from offload.errors import UserError

Figures = dict[str, Any]


class Study(NamedTuple):
    """Three functions that share one dictionary of figures."""

    measure: Callable[[Pair, Scale], Figures]
    table: Callable[[Figures], Iterable[list[str]]]
    draw: Callable[[Figures], Figure]


STUDIES = {
    "size": Study(study_size.measure, study_size.table, study_size.draw),
    "rejection": Study(study_rejection.measure, study_rejection.table, study_rejection.draw),
    "temperature": Study(study_rules.measure_temperature, study_rules.table_temperature, study_rules.draw_temperature),
    "baselines": Study(study_rules.measure_baselines, study_rules.table_baselines, study_rules.draw_baselines),
    "choice": Study(study_choice.measure, study_choice.table, study_choice.draw),
}


def run_study(name: str, pair: Pair, scale: Scale, folder: Path) -> Figures:
    """Measure, write `<name>.json` and `<name>.png` into `folder`; returns what the JSON file holds."""
    started, started_cpu, study = time.perf_counter(), time.process_time(), STUDIES[name]
    figures = study.measure(pair, scale)
    settings = {**scale.as_dict(), "num_prompt_tokens": PROMPT_TOKENS, "dtype": "float32"}
    times = {"elapsed_s": time.perf_counter() - started, "cpu_s": time.process_time() - started_cpu}
    result = {"study": name, "settings": settings, **times, **figures}
    with whole(folder / f"{name}.json") as place:
        place.write_text(json.dumps(result, indent=1) + "\n")
    with whole(folder / f"{name}.png") as place:
        study.draw(figures).savefig(place)
    return result


def main(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"one of {', '.join(STUDIES)}")],
    quick: Annotated[bool, typer.Option("--quick", help="half a minute to six minutes on two cores, by study")] = False,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="where NAME.json and NAME.png go")] = Path(
        "build/studies"
    ),
) -> None:
    """One of Sequoia's studies: a table, a picture, one JSON line."""
    if name not in STUDIES:
        raise UserError(f"bench tree must be one of {', '.join(STUDIES)}, got {name!r}: try bench tree size")
    for file in (out / f"{name}.json", out / f"{name}.png"):
        writable(file)
    logging.disable_progress_bar()  # of weights that take a blink to load
    torch.set_num_threads(1)  # passes of a few rows are several times slower on two threads
    result = run_study(name, Pair(), QUICK if quick else FULL, out)
    print(aligned(STUDIES[name].table(result)))
    print(f"{out / name}.json, {out / name}.png: {result['elapsed_s']:.0f} s, {result['cpu_s']:.0f} s of one core")
    print(json.dumps(result))


if __name__ == "__main__":
    from offload.bench.suite import run_alone

    run_alone("tree")
