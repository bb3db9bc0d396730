"""What guesses without a model are worth, alone and beside a draft: copies, datastore, n-grams.

Three texts. `code` goes on as the target likes, and so does `copy`, a function that is begun again
under another name. A small target may not be able to copy, so `copy, dictated` is the same prompt
with the edited function as what the target is told to write: passes, drafting and times are real,
its own choice is not heeded. All sources take turns, and so does one token per pass. Where nothing
repeats, lookup by itself must cost nothing: its steps stand beside steps without it, in turns.
Prompts are the second half of what there is; with `--tuning` those of the first, to tune by.

Invariant: nothing is printed before every token that a target chose was proved. What was dictated
needs no proof.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import numpy as np
import typer

from offload.bench.harness.command import Bench, command, one_of, say_link, say_table
from offload.bench.harness.gate import Written
from offload.bench.harness.prompts import CODE, COPY, Prompt, encoded, prompts
from offload.bench.harness.record import Guard, Row
from offload.bench.harness.setting import PROMPT_TOKENS, Setting, find_setting
from offload.bench.harness.steps import Step, dictated
from offload.bench.harness.stores import library_store, permuted_store
from offload.bench.harness.wanted import say_wanted, wanted_row
from offload.bench.latency import decode
from offload.cli.demo import PAIR
from offload.datastore.store import open_datastore
from offload.drafting.base import NoState
from offload.drafting.lookup import GuessRequest
from offload.drafting.retrieval import Retrieval
from offload.engine.decoder import Decoder
from offload.engine.text import load_tokenizer
from offload.machine import rss_bytes
from offload.trees.spec import parse_match_length, parse_tree
from offload.trees.topology import chain
from offload.units import Sampling

SOURCES = (
    "lookup",
    "store",
    "lookup+store",
    "ngram",
    "draft",
    "draft+lookup",
    "draft+store",
    "draft+lookup+store",
)
_CONTEXT = 1024
_TREE = "dynamic:64x16"
_LEAST_RAM_BYTES = 260_000_000
_WANTED = {  # of tokens per sweep: which text and sources, beside which, at least
    ("code", "store", "none"): 1.6, ("copy, dictated", "lookup", "none"): 3.0, ("code", "draft+store", "draft"): 1.1,
    ("copy", "draft+store", "draft"): 0.98, ("copy, dictated", "draft+store", "draft"): 0.98,
    ("copy, dictated", "draft+lookup", "draft"): 1.5,
}  # fmt: skip
_MOST_SLOWER = 1.02
_MOST_RETRIEVAL_S = 1e-3
# REST's tree and continuation; as by default
_ASKED = GuessRequest(63, 10)
_LENGTH = "1:16"


@dataclass(frozen=True, slots=True)
class Effort(decode.Effort):
    """How much is measured; every case is one of `sources`."""

    # pairs of steps where nothing repeats
    num_pairs: int = 80
    sources: tuple[str, ...] = SOURCES

    def cases(self) -> list[decode.Case]:
        plain = decode.Case(0.0, "match", "none")
        tree = self.trees[-1]
        return [
            plain,
            *(
                decode.Case(at, "match", tree, one)
                for at in self.temperatures
                for one in self.sources
            ),
        ]


FULL = {"num_prompts": 8, "num_tokens": 128, "num_plain": 8, "temperatures": (0.0, 0.7)}
QUICK = {
    "num_prompts": 3,
    "num_tokens": 48,
    "num_plain": 3,
    "temperatures": (0.0,),
    "num_pairs": 40,
}


def open_all(
    setting: Setting, effort: Effort, store: Path, resources: ExitStack
) -> dict[str, Decoder]:
    """Open a decoder for each mixture of sources, all layers streamed, with room for the tree."""
    found = dict[str, Decoder]()
    for name in effort.sources:
        parts = name.split("+")
        place = setting if "draft" in parts else setting._replace(draft=None)
        options: dict[str, Any] = {
            "lookup": "lookup" in parts,
            "datastore": store if "store" in parts else None,
        }
        options["ngram"] = store if "ngram" in parts else None
        opened = place.open_streamed(effort.trees[-1], context=_CONTEXT, **options)
        found[name] = resources.enter_context(opened)
    return found


def dictate(decoders: Mapping[str, Decoder], found: Sequence[Prompt], effort: Effort) -> list[Row]:
    """Return a row for each mixture, one token per pass first; they take turns by prompt."""
    steps: dict[str, list[list[Step]]] = {name: [] for name in ("none", *decoders)}
    for prompt, name in ((prompt, name) for prompt in found for name in steps):
        decoder = decoders.get(name) or next(iter(decoders.values()))
        shape = chain(0) if name == "none" else parse_tree(effort.trees[-1]).build()
        num_tokens = (effort.num_plain if name == "none" else effort.num_tokens) + shape.depth + 1
        then_ids = decoder.encode(prompt.then, raw=True)[:num_tokens]
        steps[name].append(
            list(dictated(decoder, encoded(decoder, prompt, PROMPT_TOKENS), then_ids, shape))
        )
    rows = [_dictated_row(name, texts) for name, texts in steps.items()]
    return [
        {**row, "speedup": row["decode_tokens_per_s"] / rows[0]["decode_tokens_per_s"]}
        for row in rows
    ]


def _dictated_row(name: str, texts: Sequence[Sequence[Step]]) -> Row:
    every = [step for text in texts for step in text]
    seconds = sum(step.seconds for step in every)
    num_tokens = sum(step.num_tokens for step in every)
    row = {
        "texts": f"{COPY}, dictated",
        "sources": name,
        "name": f"{COPY}, dictated: {name}",
        "num_sweeps": len(every),
    }
    per_text = [sum(step.num_tokens for step in text) / max(1, len(text)) for text in texts]
    row |= {"tokens_per_sweep": num_tokens / len(every), "tokens_per_sweep_samples": per_text}
    return {
        **row,
        "decode_tokens_per_s": num_tokens / seconds,
        "sweep_s": median(step.seconds for step in every),
    }


def against_plain(setting: Setting, num_pairs: int) -> tuple[Row, list[Written]]:
    """Return seconds of a step that looks up in vain over those of one that does not.

    Side by side: both texts begin with every token at most once and go on with tokens that are
    drawn from nearly all alike.
    """
    ram_bytes = max(setting.ram_bytes, _LEAST_RAM_BYTES)
    seconds = (list[float](), list[float]())
    alone = setting._replace(draft=None, ram_bytes=ram_bytes)
    sampling = Sampling(temperature=50.0)
    prompt_ids = np.random.default_rng(0).permutation(4000)[:PROMPT_TOKENS].tolist()
    with ExitStack() as resources:
        decoders = [resources.enter_context(alone.open("auto", context=_CONTEXT)) for _ in range(2)]
        shapes = decoders[0].tree_choice(sampling).shape, chain(0)
        texts = [
            one.begin(prompt_ids, sampling, shape=shape)
            for one, shape in zip(decoders, shapes, strict=True)
        ]
        # the first takes the prompt in, the second finds full slots
        for index in range(num_pairs + 2):
            for which in (index % 2, 1 - index % 2):
                started = time.perf_counter()
                num_tokens = len(decoders[which].step(texts[which]))
                if index > 1:
                    seconds[which].append((time.perf_counter() - started) / num_tokens)
    ratios = [one / other for one, other in zip(*seconds, strict=True)]
    written = [Written(prompt_ids, text.new_ids, sampling, "match") for text in texts]
    return wanted_row(
        "nothing repeats: s/token, lookup / none", median(ratios), _MOST_SLOWER, ratios, "lower"
    ), written


def retrieval(store: Path, found: Sequence[Prompt], num_steps: int) -> Row:
    """Return seconds of one step's matches and their trie, at places of held-out texts.

    No place comes twice.
    """
    tokenizer = load_tokenizer(PAIR / "target")
    assert tokenizer is not None, "the packaged pair has one"
    index = open_datastore(store, tokenizer.get_vocab())
    before_bytes = rss_bytes()
    source = Retrieval(index, parse_match_length(_LENGTH))
    seconds = list[float]()
    for prompt in found:
        ids = tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        for end in range(16, len(ids), max(1, len(ids) * len(found) // num_steps)):
            started = time.perf_counter()
            list(source.tiers(ids[:end], _ASKED, NoState()))
            seconds.append(time.perf_counter() - started)
    name = f"retrieval from {index.num_tokens:,} tokens: s/step, median"
    row = wanted_row(name, median(seconds), _MOST_RETRIEVAL_S, seconds, "lower")
    cuts = quantiles(seconds, n=20)
    return {
        **row,
        "p95_s": cuts[-1],
        "most_s": max(seconds),
        "rss_bytes": rss_bytes() - before_bytes,
    }


def promises(rows: Sequence[Row]) -> list[Row]:
    """Return what was wanted of tokens per pass, as far as it was measured."""
    known = {
        (row["texts"], row["sources"]): row for row in rows if row.get("temperature", 0.0) == 0.0
    }
    found = []
    for (texts, sources, beside), wanted in _WANTED.items():
        if {(texts, sources), (texts, beside)} <= known.keys():
            row = known[texts, sources]
            other = known[texts, beside]
            pairs = zip(
                row["tokens_per_sweep_samples"], other["tokens_per_sweep_samples"], strict=True
            )
            ratio = row["tokens_per_sweep"] / other["tokens_per_sweep"]
            samples = [one / two for one, two in pairs if two]
            found.append(
                wanted_row(f"{texts}: {sources} / {beside}", ratio, wanted, samples, "higher")
            )
    return found


Source = Annotated[
    list[str] | None, typer.Option("--sources", metavar="NAME", help=f"of {', '.join(SOURCES)}")
]
Size = Annotated[
    str | None, typer.Option(metavar="SIZE", help="of the target; default: 2GB, with --quick 600MB")
]
Tree = Annotated[str, typer.Option(metavar="TREE", help="bounds that all have alike")]
Store = Annotated[
    Path | None,
    typer.Option(metavar="STORE", help="time retrieval there; made, large, where none is"),
]
Tuning = Annotated[bool, typer.Option("--tuning", help="the other half of the prompts, to tune by")]
Num = Annotated[int | None, typer.Option(metavar="N", min=1, help="of both sets")]


@command(
    "lookup", "quick compare", examples=["offload bench lookup --quick --store /tmp/large.store"]
)
def main(
    bench: Bench,
    sources: Source = None,
    size: Size = None,
    tree: Tree = _TREE,
    num_prompts: Num = None,
    store: Store = None,
    tuning: Tuning = False,
) -> None:
    """What are guesses without a model worth, alone and beside a draft?"""
    one_of(sources or (), SOURCES, "--sources")
    asked = {"num_prompts": num_prompts} if num_prompts else {}
    how: dict[str, Any] = {**(QUICK if bench.quick else FULL), **asked}
    effort = Effort(**how, trees=(tree,), sources=tuple(sources or SOURCES))
    setting = find_setting(
        None, None, size or ("600MB" if bench.quick else "2GB"), None, bench.screen
    )
    half = slice(0 if tuning else 1, None, 2)
    found = prompts([CODE, COPY], effort.num_prompts, half)
    names = [prompt.name for prompt in found]
    settings = {
        **setting.as_dict(),
        "prompts": names,
        "tree": tree,
        "num_new_tokens": effort.num_tokens,
    }
    bench.check_same(setting, prompts=names, tree=tree)
    ceiling = say_link(setting)
    copies = [prompt for prompt in found if prompt.then]
    with bench.screen as screen, ExitStack() as resources:
        decoders = open_all(setting, effort, library_store(screen), resources)
        first = next(iter(decoders.values()))
        measured = decode.measure(
            setting, first, effort, found, note=bench.row, tell=screen.count, others=decoders
        )
        told = dictate(decoders, copies, effort)
        screen.wait("where nothing repeats")
        alone, more = against_plain(setting, effort.num_pairs)
    proof = bench.prove(setting, [*measured.written, *more])
    rows = told
    guards = dict[str, Guard]()
    for texts in (COPY, CODE):
        names = [prompt.name for prompt in found if prompt.name.startswith(f"{texts}/")]
        own = [
            _named(row, texts)
            for row in decode.rows_of([run for run in measured.runs if run.prompt in names])
        ]
        rows = [*own, *rows]
        guards = {**guards, **decode.guards_of(own, names)}
    figures = [*promises(rows), alone, *([] if store is None else [stored(store, bench)])]
    say_table(_HEAD, map(_cells, rows))
    guards |= say_wanted(figures, _told)
    every = [bench.row(row) for row in (*rows, *figures)]
    bench.finish(
        every,
        settings=settings,
        ceiling={
            "bytes_per_s": median(measured.ceilings),
            "first": ceiling,
            "samples": measured.ceilings,
        },
        guards=guards,
        proof=proof,
    )


def stored(store: Path, bench: Bench) -> Row:
    """Return retrieval from that store, made where there is none; prints what it is made of."""
    made = {}
    with bench.screen as screen:
        if not store.exists():
            made = {"made_of": permuted_store(store, screen)}
        screen.wait("retrieving")
        return {**retrieval(store, prompts([CODE], 99), 500 if bench.quick else 2000), **made}


_HEAD = ["text: sources", "tokens/sweep", "x none", "s/sweep", "draft s", "link used"]


def _named(row: Row, texts: str) -> Row:
    sources = row["sources"] or "none"
    told = (
        f"{texts}: {sources}"
        if row["temperature"] == 0
        else f"{texts}, T={row['temperature']:g}: {sources}"
    )
    return {**row, "texts": texts, "sources": sources, "name": told}


def _cells(row: Row) -> list[str]:
    figures = [
        f"{row['tokens_per_sweep']:.2f}",
        f"{row.get('speedup', 1.0):.2f}",
        f"{row['sweep_s']:.3f}",
    ]
    used = (
        (f"{row['draft_s']:.3f}", f"{row['link_utilisation']:.3f}")
        if "link_utilisation" in row
        else ("", "")
    )
    return [row["name"], *figures, *used]


def _told(row: Row) -> list[str]:
    told = list[str]()
    if "p95_s" in row:
        told.append(
            f"p95 {row['p95_s']:.6f}, at most {row['most_s']:.6f}, {row['rss_bytes'] / 1e6:.0f} MB in memory"
        )
    return told + ([f"made of {row['made_of']}"] if "made_of" in row else [])
