"""What guesses without a model are worth, alone and beside a draft: copies, datastore, n-grams.

`code` goes on as the target likes, and so does `copy`, a function that is begun again under another
name. All sources take turns, and so does one token per pass. Prompts are the second half of what
there is: the first is for tuning.
"""

import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from offload.bench.harness.command import Bench, Findings, command, flag, one_of
from offload.bench.harness.prompts import CODE, COPY, held_out_files, library_files, read_source
from offload.bench.harness.tables import Column, Guard, Row, Screen, check, ratios
from offload.bench.latency import decode
from offload.checkpoint.files import cache_folder
from offload.checkpoint.packaged import PAIR
from offload.datastore.build import Coder, build
from offload.engine.decoder import Decoder
from offload.engine.tokenizer import load_tokenizer

SOURCES = (
    *("lookup", "store", "lookup+store", "ngram"),
    *("draft", "draft+lookup", "draft+store", "draft+lookup+store"),
)
_CONTEXT = 1024
_STORE_BYTES = 3 << 30
# of tokens per sweep: which text and sources, beside which, at least
_WANTED = {
    ("code", "store", "none"): 1.6,
    ("code", "draft+store", "draft"): 1.1,
    ("copy", "draft+store", "draft"): 0.98,
}
FULL = decode.Runs(8, 128, 8, temperatures=(0.0, 0.7))
QUICK = decode.Runs(3, 48, 3, temperatures=(0.0,))


def store_files() -> list[Path]:
    """Return the standard library without the files that prompts are cut from."""
    held_out = set(held_out_files())
    return [path for path in library_files() if path not in held_out]


def library_store(screen: Screen) -> Path:
    """Return the library's store for the packaged pair, built once. Raises `UserError`."""
    files = store_files()
    sizes = repr([(str(path), path.stat().st_size) for path in files]).encode()
    path = cache_folder() / f"bench-library-{zlib.crc32(sizes):08x}.store"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    screen.wait("making a store of the standard library")
    tokenizer = load_tokenizer(PAIR / "target")
    assert tokenizer is not None, "the packaged pair has one"

    def encode(texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
        return ids

    coder = Coder(str(PAIR / "target"), tokenizer.get_vocab(), encode)
    build(path, map(read_source, files), coder, _STORE_BYTES, screen.wait)
    return path


def checks(rows: Sequence[Row]) -> list[Row]:
    known = {(row["texts"], row["sources"]): row for row in rows if row["temperature"] == 0.0}
    verdicts = []
    for (texts, sources, beside), wanted in _WANTED.items():
        both = [known[texts, way] for way in (sources, beside) if (texts, way) in known]
        if len(both) == 2:
            samples = (row["tokens_per_sweep_samples"] for row in both)
            ratio = both[0]["tokens_per_sweep"] / both[1]["tokens_per_sweep"]
            name = f"{texts}: {sources} / {beside}"
            verdicts.append(check(name, ratios(*samples), wanted, "higher", ratio))
    return verdicts


COLUMNS = (
    Column("text: sources", "name"),
    Column("tokens/sweep", "tokens_per_sweep", ".2f"),
    Column("x none", lambda row: row.get("speedup", 1.0), ".2f"),
    Column("s/sweep", "sweep_s", ".3f"),
    Column("draft s", "draft_s", ".3f"),
    Column("link used", "link_utilisation", ".3f"),
)


@command("lookup", "num_prompts quick compare", examples=["offload bench lookup --quick"])
def main(
    bench: Bench,
    sources: Annotated[
        list[str] | None, flag("NAME", f"of {', '.join(SOURCES)}", "--sources")
    ] = None,
    size: Annotated[
        str | None, flag("SIZE", "of the target; default: 2GB, with --quick 600MB")
    ] = None,
    tree: Annotated[str, flag("TREE", "bounds that all have alike")] = "dynamic:64x16",
) -> Findings:
    """What are guesses without a model worth, alone and beside a draft?"""
    one_of(sources or (), SOURCES, "--sources")
    ways = tuple(dict.fromkeys(sources or SOURCES))
    effort = replace(bench.effort(FULL, QUICK), trees=("none", tree), sources=ways)
    chosen = bench.prompts(effort.num_prompts, slice(1, None, 2), [CODE, COPY])
    setting = bench.setting(size=size or ("600MB" if bench.quick else "2GB"))
    bench.begin(setting, tree=tree, num_new_tokens=effort.num_tokens)
    with bench.screen as screen, ExitStack() as resources:
        store = library_store(screen)
        decoders = dict[str, Decoder]()
        for name in effort.sources:
            parts = name.split("+")
            place = setting if "draft" in parts else setting._replace(draft=None)
            opened = place.open_streamed(
                tree,
                context=_CONTEXT,
                lookup="lookup" in parts,
                datastore=store if "store" in parts else None,
                ngram=store if "ngram" in parts else None,
            )
            decoders[name] = resources.enter_context(opened)
        first = decoders[ways[0]]
        measured = decode.measure(bench, setting, first, effort, chosen, others=decoders)
    rows = list[Row]()
    guards = dict[str, Guard]()
    for texts in (CODE, COPY):
        names = [prompt.name for prompt in chosen if prompt.name.startswith(f"{texts}/")]
        of_texts = decode.rows_of([run for run in measured.runs if run.prompt in names])
        for row in of_texts:
            warm = f", T={row['temperature']:g}" if row["temperature"] else ""
            row |= {"texts": texts, "sources": row["sources"] or "none"}
            row["name"] = f"{texts}{warm}: {row['sources']}"
        guards |= decode.guards_of(of_texts, names)
        rows += of_texts
    figures = checks(rows)
    return Findings(
        rows=[*rows, *figures],
        tables=[(COLUMNS, rows)],
        checks=figures,
        written=measured.written,
        ceiling=measured.ceiling,
        guards=guards,
    )
