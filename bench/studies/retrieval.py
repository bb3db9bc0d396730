"""What retrieval yields by its three numbers (REST, 2311.08252, section 4): nodes c, continuation m, match n_max.

One is varied at a time, from a store of the standard library, on code that the packaged target writes behind held-out
beginnings, resident: what a sweep yields does not depend on streaming. Growth is repeated over the written text.
Invariant: the text is the same for all, and proved.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from offload.bench.harness.command import Bench, command, say_table
from offload.bench.harness.gate import Written
from offload.bench.harness.picture import draw_sweeps, require_pictures
from offload.bench.harness.prompts import CODE, encoded, prompts
from offload.bench.harness.record import Guard, Row, writable
from offload.bench.harness.setting import PROMPT_TOKENS, Setting, resident_pair
from offload.bench.harness.stores import library_store
from offload.config import Sampling
from offload.tree.topology import DynamicShape
from offload.tuning.trace_acceptance import dynamic_again, write

START = {"c": 64, "m": 10, "n_max": 16}  # REST's
SWEEPS = {"c": (4, 8, 16, 32, 64, 128, 256), "m": (2, 4, 6, 10, 16, 24), "n_max": (2, 3, 4, 6, 8, 16, 32)}
_NUM_NEW, _MOST_NODES = 128, 257
_SAMPLING = Sampling()
Text = tuple[list[int], list[int]]  # prompt, what the target wrote behind it


def swept(setting: Setting, store: Path, texts: Sequence[Text]) -> Iterator[Row]:
    """A row for each number and value: tokens per sweep, text by text."""
    every = [(name, value, {**START, name: value}) for name, values in SWEEPS.items() for value in values]
    for name, value, numbers in every:
        options = {"lookup": False, "datastore": store, "lookup_length": f"2:{numbers['n_max']}"}
        with setting.open(f"dynamic:{_MOST_NODES}x{numbers['m']}", context=512, **options) as decoder:
            bounds = DynamicShape(numbers["c"] + 1, min(numbers["m"], numbers["c"]))  # c leaves the root out
            sweeps = [dynamic_again(decoder, *text, _SAMPLING, bounds) for text in texts]
        counts = [count for one in sweeps for count in one]
        samples = [sum(one) / len(one) for one in sweeps if one]
        row = {"name": f"{name}={value}", "number": name, "value": value, "num_sweeps": len(counts)}
        yield {**row, "tokens_per_sweep": sum(counts) / len(counts), "tokens_per_sweep_samples": samples}


Picture = Annotated[Path | None, typer.Option(metavar="FILE", help="tokens per sweep by each", callback=writable)]


@command("retrieval", "quick compare", examples=["offload bench retrieval --picture rest.png"])
def main(bench: Bench, picture: Picture = None) -> None:
    """How much do nodes, continuation and match of retrieval from a store yield?"""
    if picture is not None:
        require_pictures()
    setting = resident_pair(None)._replace(draft=None)
    found = prompts([CODE], 4 if bench.quick else 12, slice(1, None, 2))
    names = [prompt.name for prompt in found]
    bench.check_same(setting, prompts=names)
    with bench.screen as screen:
        store = library_store(screen)
        screen.wait("writing the texts")
        with setting.open("dynamic:64x16", context=512, lookup=True) as decoder:
            ids = [encoded(decoder, prompt, PROMPT_TOKENS) for prompt in found]
            texts = [(one, write(decoder, one, _SAMPLING, _NUM_NEW, "dynamic:64x16")) for one in ids]
        proof = bench.prove(setting, [Written(*text, _SAMPLING, "match") for text in texts])
        rows = []
        for row in swept(setting, store, texts):
            rows.append(bench.row(row))
            screen.count(len(rows), sum(map(len, SWEEPS.values())), "growing trees")
    settings = {**setting.as_dict(), "prompts": names, "store": store.name, "start": START}
    say_table(["others at " + " ".join(f"{key}={value}" for key, value in START.items()), "tokens/sweep"],
        ([row["name"], f"{row['tokens_per_sweep']:.3f}"] for row in rows))  # fmt: skip
    if picture is not None:
        draw_sweeps(rows, settings, picture)
    guards = {row["name"]: Guard(row["tokens_per_sweep_samples"], "higher") for row in rows}
    most = {name: START["m"] + 1 if name != "m" else max(values) + 1 for name, values in SWEEPS.items()}
    bench.finish(rows, settings=settings, ceiling={"tokens_per_sweep": most}, guards=guards, proof=proof)
