"""What fewer bytes are worth: seconds of a pass and of a token in bf16, fp8, int4 and packed.

Every layer is streamed. Formats take turns, round after round, because disks drift; each pass
stands beside the bytes that it reads and the seconds that it waits for them. A quantised target is
a model of its own: its tokens are proved by those of a run without a tree, and no draft was trained
for it.
"""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer

from offload.bench.harness.command import Bench, Findings, command
from offload.bench.harness.prompts import Prompt, encoded
from offload.bench.harness.quantised import FORMATS, PACKED, quantised
from offload.bench.harness.record import Guard, Row
from offload.bench.harness.setting import PROMPT_TOKENS, Setting
from offload.bench.harness.tables import Column, medians
from offload.errors import UserError
from offload.units import parse_rate

PLAIN = "bf16"
CONTEXT = 512
TREES = ("none", "16x8", "32x12", "64x16", "128x20")


class Effort(NamedTuple):
    """How much is measured."""

    rounds: int
    num_plain: int  # tokens of a run without a tree, which is as many passes
    # tokens of a run with a tree
    num_tokens: int
    trees: Sequence[str]


FULL = Effort(5, 12, 96, TREES)
QUICK = Effort(2, 6, 48, ("none", "32x12", "128x20"))


def run_format(setting: Setting, prompt: Prompt, effort: Effort, limit: int | None) -> list[Row]:
    """Return one row for each tree. Raises `UserError` where a tree changes a text."""
    rows = list[Row]()
    options: dict[str, Any] = {"context": CONTEXT, "link_limit": limit}
    with setting.open_streamed(effort.trees[-1], **options) as decoder:
        ids = encoded(decoder, prompt, PROMPT_TOKENS)
        plain_ids = list[int]()
        for tree in effort.trees:
            num = effort.num_plain if tree == "none" else effort.num_tokens
            got = decoder.generate(ids, max_new_tokens=num, tree=tree)
            plain_ids = plain_ids or got.token_ids
            if any(one != other for one, other in zip(got.token_ids, plain_ids, strict=False)):
                raise UserError(
                    f"with {tree} the text is another than without: no speed is printed"
                )
            sweeps = max(1, got.stats.num_sweeps)
            rows.append(
                {
                    "tree": tree,
                    "pass_s": got.stats.sweep_s / sweeps,
                    "stall_s": got.stats.stall_s / sweeps,
                    "token_s": 1 / got.stats.tokens_per_s,
                    "tokens_per_pass": got.stats.tokens_per_sweep,
                    "pass_bytes": got.stats.bytes_streamed / sweeps,
                }
            )
    return rows


COLUMNS = (
    Column("format", "format"),
    Column("tree", "tree"),
    Column("s a pass", "pass_s", ".3f"),
    Column("waiting s", "stall_s", ".3f"),
    Column("of bf16's", "ratio_of_pass", ".2f"),
    Column("s a token", "token_s", ".3f"),
    Column("of bf16's best", "ratio_of_best", ".2f"),
    Column("tokens", "tokens_per_pass", ".1f"),
    Column("GB read", lambda row: row["pass_bytes"] / 1e9, ".2f"),
)


@command(
    "quantised", "size source quick", examples=["offload bench quantised --quick --size 600MB"]
)
def main(
    bench: Bench,
    link_limit: Annotated[
        str | None, typer.Option(metavar="SPEED", help="slow the link down to this, such as 1GB")
    ] = None,
) -> Findings:
    """Seconds of a pass and of a token with the same weights in fewer bytes."""
    limit = parse_rate(link_limit, "--link-limit")
    effort = bench.effort(FULL, QUICK)
    plain = bench.setting()
    settings = {PLAIN: plain}
    for name in (*FORMATS, PACKED):
        settings[name] = plain._replace(target=quantised(plain.target, name))
    ceiling = bench.say_link(plain)
    prompts, names = bench.prompts(1)
    every = list[Row]()
    for _, name in bench.turns(range(effort.rounds), [*settings], "decoding"):
        runs = run_format(settings[name], prompts[0], effort, limit)
        every += [{"format": name, **row} for row in runs]
    rows = medians(every, "format", "tree")
    base = {row["tree"]: row for row in rows if row["format"] == PLAIN}
    best_s = min(row["token_s"] for row in base.values())
    for row in rows:
        row["ratio_of_pass"] = row["pass_s"] / base[row["tree"]]["pass_s"]
        row["ratio_of_best"] = row["token_s"] / best_s
    return Findings(
        rows=rows,
        columns=COLUMNS,
        settings={**plain.as_dict(), "prompts": names},
        ceiling={"bytes_per_s": ceiling},
        guards=guards_of(rows),
    )


def guards_of(rows: Sequence[Row]) -> dict[str, Guard]:
    """Return passes without a tree and the best tree of each format, beside those of bf16."""
    guards = dict[str, Guard]()
    for name in {row["format"] for row in rows} - {PLAIN}:
        own = [row for row in rows if row["format"] == name]
        passes = [row["ratio_of_pass"] for row in own if row["tree"] == "none"]
        guards[f"pass, {name} / bf16"] = Guard(passes, "lower")
        best = min(row["ratio_of_best"] for row in own)
        guards[f"best token, {name} / bf16"] = Guard([best], "lower")
    return guards
