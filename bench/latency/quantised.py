"""What fewer bytes are worth: seconds of a pass and of a token in bf16, fp8, int4 and packed.

Every layer is streamed. Formats take turns, round after round, because disks drift; each pass
stands beside the bytes that it reads and the seconds that it waits for them. A quantised target is
a model of its own: its tokens are proved by those of a run without a tree, and no draft was trained
for it.
"""

from collections.abc import Sequence
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer

from offload.bench.harness.command import Bench, command, say_link, say_table
from offload.bench.harness.prompts import Prompt, encoded
from offload.bench.harness.quantised import FORMATS, PACKED, quantised
from offload.bench.harness.record import Guard, Row
from offload.bench.harness.setting import PROMPT_TOKENS, Setting, find_setting
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


def measure(
    settings: dict[str, Setting], prompt: Prompt, effort: Effort, limit: int | None
) -> list[Row]:
    """Return one row for each format and tree: medians over rounds.

    Raises `UserError` where a tree changes a text.
    """
    runs = dict[tuple[str, str], list[Row]]()
    for _ in range(effort.rounds):
        for name, setting in settings.items():
            options: dict[str, Any] = {"context": CONTEXT, "link_limit": limit}
            with setting.open_streamed(effort.trees[-1], **options) as decoder:
                texts = {}
                ids = encoded(decoder, prompt, PROMPT_TOKENS)
                for tree in effort.trees:
                    num = effort.num_plain if tree == "none" else effort.num_tokens
                    got = decoder.generate(ids, max_new_tokens=num, tree=tree)
                    texts[tree] = got.token_ids
                    runs.setdefault((name, tree), []).append(_figures(got.stats))
                _require_same(name, texts)
    return [{"format": name, "tree": tree, **_middle(rows)} for (name, tree), rows in runs.items()]


def _figures(stats: Any) -> Row:
    sweeps = max(1, stats.num_sweeps)
    return {
        "pass_s": stats.sweep_s / sweeps,
        "stall_s": stats.stall_s / sweeps,
        "token_s": 1 / stats.tokens_per_s,
        "tokens_per_pass": stats.tokens_per_sweep,
        "pass_bytes": stats.bytes_streamed / sweeps,
    }


def _middle(rows: Sequence[Row]) -> Row:
    return {key: median(row[key] for row in rows) for key in rows[0]}


def _require_same(name: str, texts: dict[str, list[int]]) -> None:
    for tree, ids in texts.items():
        shared = min(len(ids), len(texts["none"]))
        if ids[:shared] != texts["none"][:shared]:
            raise UserError(
                f"{name}: with {tree} the text is another than without: no speed is printed"
            )


Limit = Annotated[
    str | None, typer.Option(metavar="SPEED", help="slow the link down to this, such as 1GB")
]


@command(
    "quantised", "size source quick", examples=["offload bench quantised --quick --size 600MB"]
)
def main(bench: Bench, link_limit: Limit = None) -> None:
    """Seconds of a pass and of a token with the same weights in fewer bytes."""
    limit = parse_rate(link_limit, "--link-limit")
    effort = QUICK if bench.quick else FULL
    plain = find_setting(None, None, bench.given("size"), None, bench.screen)
    settings = {PLAIN: plain} | {
        name: plain._replace(target=quantised(plain.target, name)) for name in (*FORMATS, PACKED)
    }
    ceiling, (prompts, names) = say_link(plain), bench.prompts(1)
    rows = measure(settings, prompts[0], effort, limit)
    base = {row["tree"]: row for row in rows if row["format"] == PLAIN}
    best = min(row["token_s"] for row in base.values())
    for row in rows:
        row["ratio_of_pass"] = row["pass_s"] / base[row["tree"]]["pass_s"]
        row["ratio_of_best"] = row["token_s"] / best
        bench.row(row)
    head = [
        "format",
        "tree",
        "a pass",
        "waiting",
        "of bf16's",
        "a token",
        "of bf16's best",
        "tokens",
        "read",
    ]
    say_table(head, [_cells(row) for row in rows])
    bench.finish(
        rows,
        settings={**plain.as_dict(), "prompts": names},
        ceiling={"bytes_per_s": ceiling},
        guards=guards_of(rows),
    )


def guards_of(rows: Sequence[Row]) -> dict[str, Guard]:
    """Return passes without a tree and the best tree of each format, beside those of bf16."""
    guards = dict[str, Guard]()
    for name in {row["format"] for row in rows} - {PLAIN}:
        own = [row for row in rows if row["format"] == name]
        guards[f"pass, {name} / bf16"] = Guard(
            [row["ratio_of_pass"] for row in own if row["tree"] == "none"], "lower"
        )
        guards[f"best token, {name} / bf16"] = Guard(
            [min(row["ratio_of_best"] for row in own)], "lower"
        )
    return guards


def _cells(row: Row) -> list[str]:
    times = [f"{row['pass_s']:.3f} s", f"{row['stall_s']:.3f} s", f"{row['ratio_of_pass']:.2f}"]
    tokens = [
        f"{row['token_s']:.3f} s",
        f"{row['ratio_of_best']:.2f}",
        f"{row['tokens_per_pass']:.1f}",
    ]
    return [row["format"], row["tree"], *times, *tokens, f"{row['pass_bytes'] / 1e9:.2f} GB"]
