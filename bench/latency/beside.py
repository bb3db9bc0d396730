"""This checkout beside others, or beside itself with other flags: whole processes, in turns.

A side is `offload generate` as a user starts it: it imports, loads, chooses its tree, writes a text.
Sides take turns prompt by prompt, since machines drift, after each has filled its caches once.

Invariant: every text of every side is proved; one whose tokens are not the model's own is refused.
"""

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

from offload.bench.harness.command import Bench, Effort, Findings, command, flag
from offload.bench.harness.gate import Written
from offload.bench.harness.process import ROOT, run
from offload.bench.harness.prompts import tokenizer_of
from offload.bench.harness.setting import PROMPT_TOKENS, Need, Setting
from offload.bench.harness.tables import Column, Guard, Row, ratios
from offload.engine.conversation import encode_prompt
from offload.errors import UserError, require
from offload.sampling_options import Sampling

_RATE = "tokens_per_s"
_ADJUSTING = ("repeat_penalty", "presence_penalty", "frequency_penalty", "logit_bias")


class Side(NamedTuple):
    name: str
    checkout: Path
    flags: Sequence[str] = ()

    def write(self, setting: Setting, prompt: str, num_new: int) -> dict[str, Any]:
        """Return the JSON of one process, and `process_s`. Raises `RunError`."""
        draft = [] if setting.draft is None else ["--draft", str(setting.draft.resolve())]
        words = ["generate", "--model", str(setting.target.resolve()), *draft, "--raw", "--json"]
        words += ["--ram", str(setting.ram_bytes), "--max-tokens", str(num_new)]
        words += ["--profile", "none", f"--prompt={prompt}", *self.flags]
        started = time.perf_counter()
        # without the working folder, which may be a checkout itself
        printed = run([sys.executable, "-P", "-m", "offload", *words], root=self.checkout)
        result: dict[str, Any] = json.loads(printed)
        return {**result, "process_s": time.perf_counter() - started}


FULL = Effort(8, 96)
QUICK = Effort(2, 32)


def require_provable(sampling: Mapping[str, Any]) -> None:
    """Refuse settings under which a text's own past changes what is drawn. Raises `UserError`."""
    if adjusted := [name for name in _ADJUSTING if name in sampling]:
        requirement = (
            "bench beside proves what it times, and logits that are adjusted hide what was drawn"
        )
        raise UserError(f"{requirement}, got {', '.join(adjusted)}: leave it out of --with")


def row_of(side: Side, prompt: str, result: dict[str, Any]) -> Row:
    stats = result["stats"]
    figures = {name: stats[name] for name in ("ttft_s", "tokens_per_sweep", "peak_rss_bytes")}
    rate = 1 / stats["tpot_s"] if stats["tpot_s"] else 0.0
    head = {"side": side.name, "prompt": prompt, "process_s": result["process_s"], _RATE: rate}
    return {**head, **figures, "tree": stats["tree"], "text": result["text"]}


def beside_first(name: str, rows: Sequence[Row], first: Sequence[Row]) -> Row:
    """Return medians of one side, and its speed over that of the first, prompt by prompt."""
    names = (_RATE, "process_s", "ttft_s", "tokens_per_sweep", "peak_rss_bytes")
    times = ratios([row[_RATE] for row in rows], [row[_RATE] for row in first])
    num_same = sum(
        text_row["text"] == other["text"] for text_row, other in zip(rows, first, strict=True)
    )
    return {
        **{"side": name, "num_same_texts": num_same, "ratios": times},
        **{key: median(row[key] for row in rows) for key in names},
        "ratio": median(times) if times else None,
    }


COLUMNS = (
    Column("side", "side"),
    Column("tokens/s", _RATE, ".2f"),
    Column("x the first", "ratio", ".3f"),
    Column("least", lambda row: min(row["ratios"], default=None), ".2f"),
    Column("most", lambda row: max(row["ratios"], default=None), ".2f"),
    Column("a pass", "tokens_per_sweep", ".2f"),
    Column("process s", "process_s", ".2f"),
    Column("first token s", "ttft_s", ".2f"),
    Column("peak MiB", "peak_rss_bytes", ".0f", 2**20),
    Column("texts as the first's", "num_same_texts"),
)


@command(
    *("beside", "model draft size ram source num_prompts max_tokens quick compare"),
    examples=[
        "offload bench beside --checkout ../before",
        'offload bench beside --with="--threads 1" --with="--threads 2"',
        'offload bench beside --with="--no-invariant" --with="--link-limit 100MB"',
    ],
)
def main(
    bench: Bench,
    checkout: Annotated[list[Path] | None, flag("DIR", "of another program, several")] = None,
    flags: Annotated[
        list[str] | None, flag("FLAGS", "this one with further flags of generate", "--with")
    ] = None,
) -> Findings:
    """How fast is this program beside another checkout, or with other flags?"""
    every = [Side("this", ROOT)]
    for folder in checkout or ():
        requirement = "--checkout must be a folder that has offload in it"
        require(
            (folder / "offload" / "__init__.py").is_file(),
            requirement,
            str(folder),
            "check the path",
        )
        every.append(Side(str(folder), folder.resolve()))
    every += [Side(words, ROOT, shlex.split(words)) for words in flags or ()]
    # one that is named twice takes its turns once
    sides = [*{side.name: side for side in every}.values()]
    if len(sides) == 1:
        raise UserError("bench beside compares: give --checkout DIR, or --with FLAGS")
    effort = bench.effort(FULL, QUICK)
    num_new = bench.given.max_tokens or effort.num_tokens
    chosen = bench.prompts(effort.num_prompts)
    setting = bench.setting(need=Need("auto"))
    tokenizer = tokenizer_of(setting.target)
    bench.begin(setting, num_new_tokens=num_new)
    rows: dict[str, list[Row]] = {side.name: [] for side in sides}
    written = list[Written]()
    with bench.screen:
        for side in sides:
            bench.screen.wait(f"warming up: {side.name}")
            require_provable(side.write(setting, chosen[0].text, 2)["sampling"])
        for prompt, side in bench.turns(chosen, sides, "writing"):
            ids = encode_prompt(tokenizer, prompt.text, raw=True)[:PROMPT_TOKENS]
            text = tokenizer.decode(ids)
            result = side.write(setting, text, num_new)
            rows[side.name].append(row_of(side, prompt.name, result))
            bench.note(rows[side.name][-1])
            sampling = Sampling(**result["sampling"], seed=result["seed"])
            ids = encode_prompt(tokenizer, text, raw=True)
            written.append(Written(ids, result["token_ids"], sampling, result["rule"]))
    shown = [beside_first(name, side_rows, rows["this"]) for name, side_rows in rows.items()]
    labels = [prompt.name for prompt in chosen]
    return Findings(
        rows=[row for side_rows in rows.values() for row in side_rows],
        tables=[(COLUMNS, shown)],
        written=written,
        guards={
            f"tokens/s, {row['side']} / this": Guard(row["ratios"], "higher", labels)
            for row in shown[1:]
        },
    )
