"""Seconds of a pass and of a token in bf16, fp8, int4 and packed.

Every layer is streamed. Formats take turns, round after round, because disks drift; each pass
stands beside the bytes that it reads and the seconds that it waits for them. A quantised target is
a model of its own: its tokens are proved by those of a run without a tree, and no draft was trained
for it.
"""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from offload.bench.harness.command import Bench, Findings, command, flag
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
    with setting.open_streamed(effort.trees[-1], context=CONTEXT, link_limit=limit) as decoder:
        ids = encoded(decoder, prompt, PROMPT_TOKENS)
        plain_ids = list[int]()
        for tree in effort.trees:
            num = effort.num_plain if tree == "none" else effort.num_tokens
            got = decoder.generate(ids, max_new_tokens=num, tree=tree)
            plain_ids = plain_ids or got.token_ids
            if any(one != other for one, other in zip(got.token_ids, plain_ids, strict=False)):
                told = f"with {tree} the text is another than without"
                raise UserError(f"{told}: no speed is printed")
            stats = got.stats
            sweeps = max(1, stats.num_sweeps)
            row: Row = {"tree": tree, "token_s": 1 / stats.tokens_per_s}
            row["tokens_per_pass"] = stats.tokens_per_sweep
            for name, whole in (
                ("pass_s", stats.sweep_s),
                ("stall_s", stats.stall_s),
                ("pass_bytes", stats.bytes_streamed),
            ):
                row[name] = whole / sweeps
            rows.append(row)
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
        str | None, flag("SPEED", "slow the link down to this, such as 1GB")
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
    guards = dict[str, Guard]()
    for row in rows:
        row["ratio_of_pass"] = row["pass_s"] / base[row["tree"]]["pass_s"]
        row["ratio_of_best"] = row["token_s"] / best_s
        if row["format"] != PLAIN and row["tree"] == "none":
            guards[f"pass, {row['format']} / bf16"] = Guard([row["ratio_of_pass"]], "lower")
    for name in settings.keys() - {PLAIN}:
        best = min(row["ratio_of_best"] for row in rows if row["format"] == name)
        guards[f"best token, {name} / bf16"] = Guard([best], "lower")
    return Findings(
        rows=rows,
        columns=COLUMNS,
        settings={**plain.as_dict(), "prompts": names},
        ceiling={"bytes_per_s": ceiling},
        guards=guards,
    )
