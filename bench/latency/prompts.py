"""The time to a first token behind a long beginning: read again, kept, or brought back from a folder.

A new beginning is read (`cold`), then as many other conversations take all places, and the beginning
comes again with another question (`behind others`); the program starts again with the folder, and
it comes once more (`behind a restart`). Nothing can be faster than one pass (`pass`), so the ratio to
a cold prompt is at best one over its passes.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

from offload.bench.harness.command import Bench, Effort, Findings, command, flag
from offload.bench.harness.gate import Written
from offload.bench.harness.prompts import Prompt
from offload.bench.harness.setting import Need, Setting
from offload.bench.harness.tables import Column, Guard, Row, medians, ratios, values
from offload.engine.decoder import Decoder
from offload.engine.request import Request
from offload.errors import require

COLD, OTHERS, RESTART, PASS = "cold", "behind others", "behind a restart", "pass"
FULL = Effort(rounds=3)
QUICK = Effort(rounds=1)
_QUESTION_TOKENS = 16
_NEW_TOKENS = 2


def ask(
    decoder: Decoder, ids: list[int], name: str, num_new: int = _NEW_TOKENS
) -> tuple[Row, Written]:
    """Return the time to the first token of a prompt, and what was written."""
    began_s = perf_counter()
    passes_before = decoder.target.stream.bytes_read
    run = decoder.start(Request(ids, max_new_tokens=num_new), continues=True)
    pieces = iter(run)
    next(pieces)
    first_s = perf_counter() - began_s
    moved_bytes = decoder.target.stream.bytes_read - passes_before
    for _ in pieces:
        pass
    decoder.release(run)
    result = run.result()
    row = {
        "name": name,
        "first_s": first_s,
        "num_tokens": len(ids),
        "num_kept": result.stats.num_kept_tokens,
        "num_passes": moved_bytes / max(1, decoder.plan.streamed_bytes),
    }
    return row, Written.from_result(ids, result)


def one_round(
    setting: Setting,
    texts: Sequence[Prompt],
    number: int,
    tokens: int,
    others: int,
    options: Mapping[str, Any],
) -> Iterator[tuple[Row, Written]]:
    """Yield a cold prompt, what comes behind others, a short prompt, and what comes behind a restart."""
    with setting.open("none", **options) as decoder:
        words = [token for text in texts for token in decoder.encode(text.text, raw=True)]
        # each round begins with another word, so that nothing of it was read
        words = words[number:] * (2 + (tokens + 1) * (others + 4) // len(words))
        questions = [words[at : at + _QUESTION_TOKENS] for at in (3, 33, 63)]
        yield ask(decoder, [*words[:tokens], *questions[0]], COLD)
        for other in range(others):
            first = (other + 1) * 101
            ask(decoder, words[first : first + tokens // 4], "other", 1)
        yield ask(decoder, [*words[:tokens], *questions[1]], OTHERS)
        yield ask(decoder, words[7 : 7 + _QUESTION_TOKENS], PASS)
    with setting.open("none", **options) as decoder:
        yield ask(decoder, [*words[:tokens], *questions[2]], RESTART)


COLUMNS = (
    Column("prompt", "name"),
    Column("tokens", "num_tokens"),
    Column("kept", "num_kept"),
    Column("passes", "num_passes", ".1f"),
    Column("s to the first token", "first_s", ".2f"),
)


@command(
    *("prompts", "model draft size ram device gpu_mem source quick"),
    examples=["offload bench prompts --quick --size 1GB --ram 400MB --link-limit 100MB"],
)
def main(
    bench: Bench,
    tokens: Annotated[int, flag("N", "of the beginning", min=64)] = 900,
    others: Annotated[int, flag("N", "conversations in between", min=1)] = 7,
    parallel: Annotated[int, flag("B", "places for texts", min=1)] = 4,
    context: Annotated[int, flag("N", "positions of a text", min=128)] = 1024,
    cache: Annotated[str, flag("SIZE", "memory for prompts, of --ram")] = "64MB",
    link_limit: Annotated[str | None, flag("SIZE", "slow the stream down to it")] = None,
) -> Findings:
    """Time to the first token of a prompt whose beginning was read before."""
    requirement = "a beginning and a question must fit into `context`"
    num_most = tokens + 2 * _QUESTION_TOKENS
    require(num_most < context, requirement, num_most, "give fewer --tokens, or more --context")
    need = Need("none", context=context, parallel=parallel)
    effort = bench.effort(FULL, QUICK)
    setting = bench.setting(need=need)
    bench.begin(setting, tokens=tokens, others=others, parallel=parallel, link_limit=link_limit)
    rows = list[Row]()
    written = list[Written]()
    texts = bench.prompts(64)
    with tempfile.TemporaryDirectory(prefix="offload-prompts-") as folder:
        options = {
            "parallel": parallel,
            "context": context,
            "link_limit": link_limit,
            "prompt_cache": Path(folder),
            "prompt_cache_ram": cache,
        }
        for number in range(effort.rounds):
            for row, text in one_round(setting, texts, number, tokens, others, options):
                rows.append(row)
                bench.note(row)
                written.append(text)
    cold = values(rows, "first_s", name=COLD)
    guards = {
        f"{name} / {COLD}": Guard(ratios(values(rows, "first_s", name=name), cold), "lower")
        for name in (OTHERS, RESTART)
    }
    return Findings(
        rows=rows, tables=[(COLUMNS, medians(rows, "name"))], written=written, guards=guards
    )
