"""Seconds of drafting against the size of the tree, and how deep the draft's guesses hold.

Tokens per sweep do not depend on streaming, so the original model is used where the target was inflated from one. The
ceiling is memory: every draft step reads the draft's weights once, so it cannot be faster than a copy of as many bytes
allows. The gate is the decoder's: all accepted tokens are proved.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import torch
import typer

from offload.bench import setting as common
from offload.bench.gate import Written
from offload.bench.metrics import acceptance_by_depth
from offload.bench.prompts import encoded, prompts
from offload.bench.record import Guard, Row, new_result
from offload.bench.setting import PROMPT_TOKENS, Setting
from offload.bench.text_table import aligned
from offload.calibration.quick import timed
from offload.checkpoint.safetensors import open_checkpoint
from offload.cli.console import Console
from offload.engine.decoder import Decoder
from offload.errors import UserError
from offload.tree.spec import parse_tree

_COPY_BYTES = 64 << 20


class Effort(NamedTuple):
    """How much is measured."""

    num_prompts: int
    num_tokens: int
    trees: tuple[str, ...]


_CHAINS, _SEQUENCES = ("chain:3", "chain:7", "chain:15"), ("sequences:3x5", "sequences:7x9")
FULL = Effort(
    num_prompts=16,
    num_tokens=128,
    trees=(
        *(*_CHAINS, *_SEQUENCES),
        *("16x8", "32x12", "64x16", "128x20", "256x20", "512x24"),
        *("grown:16x8", "grown:32x12", "grown:64x16", "grown:128x20", "grown:256x20", "grown:512x24"),
    ),
)
QUICK = Effort(
    num_prompts=4,
    num_tokens=64,
    trees=(
        "chain:7",
        "sequences:3x5",
        "16x8",
        "64x16",
        "128x20",
        "256x20",
        "grown:16x8",
        "grown:64x16",
        "grown:128x20",
    ),
)


def say_draft_ceiling(draft: Path) -> tuple[float, float]:
    """Bytes per second of a copy, and the seconds that a draft step takes at least."""
    rate = memory_bytes_per_s()
    num_bytes = sum(path.stat().st_size for path in open_checkpoint(draft).shards)
    floor_s = num_bytes / rate
    common.say_ceiling(f"the draft's {num_bytes / 1e6:.1f} MB from memory in {floor_s * 1e3:.3f} ms a step", rate)
    return rate, floor_s


def memory_bytes_per_s() -> float:
    """At which a copy reads; computing cannot read weights faster."""
    source, destination = (torch.ones(_COPY_BYTES, dtype=torch.uint8) for _ in range(2))
    return _COPY_BYTES / median(timed(lambda: destination.copy_(source)) for _ in range(7))


def measure(
    decoder: Decoder, texts: Sequence[list[int]], effort: Effort, temperature: float, screen: Console
) -> tuple[list[Row], list[Written]]:
    """One row per tree, in turn for every prompt."""
    runs: dict[str, list] = {tree: [] for tree in effort.trees}
    for index, ids in enumerate(texts):
        for done, (tree, results) in enumerate(runs.items()):
            settings = {"temperature": temperature, "seed": index, "tree": tree}
            results.append(decoder.generate(ids, max_new_tokens=effort.num_tokens, **settings))  # type: ignore[arg-type]
            screen.count(index * len(runs) + done + 1, len(texts) * len(runs), "drafting")
    written = [
        Written(ids, run.token_ids, run.sampling, run.rule)
        for results in runs.values()
        for ids, run in zip(texts, results, strict=True)
    ]
    return [_row(tree, results) for tree, results in runs.items()], written


def _row(tree: str, results: list) -> Row:
    stats = [result.stats for result in results]
    accepted = [count for one in stats for count in one.accepted_per_sweep]
    depth = stats[0].tree_depth
    return {
        "tree": tree,
        "num_nodes": stats[0].tree_num_nodes,
        "depth": depth,
        "draft_s": median(one.draft_s / max(1, one.num_sweeps) for one in stats),
        "draft_step_s": median(one.draft_s / max(1, one.num_sweeps * depth) for one in stats),
        "tokens_per_sweep": sum(accepted) / max(1, len(accepted)),
        "tokens_per_sweep_samples": [one.tokens_per_sweep for one in stats],
        "accepted_per_pos": acceptance_by_depth(accepted, depth),
    }


Model = Annotated[str | None, typer.Option("--model", "-m", metavar="MODEL", help="target; default: the packaged one")]
Ram = Annotated[str, typer.Option(metavar="SIZE", help="memory budget")]
Temp = Annotated[float, typer.Option(metavar="T", help="temperature, 0 is greedy")]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(
    epilog="Examples:\n\n    offload bench draft --quick\n\n    offload bench draft --temp 0.6 --prompts prose"
)
def main(
    model: Model = None,
    draft: common.Draft = None,
    ram: Ram = "2GiB",
    temp: Temp = 0.0,
    source: common.Prompts = None,
    quick: common.Quick = False,
    json_file: common.Json = None,
    compare: common.Compare = None,
) -> None:
    """How long does drafting take, and how many of the guesses are accepted at each depth?"""
    effort, old = QUICK if quick else FULL, common.earlier("draft", compare)
    with Console(is_quiet=False) as screen:
        setting = _small(model, draft, ram)
        found = prompts(source or ["code"], effort.num_prompts)
        names = [prompt.name for prompt in found]
        common.check_same(old, setting, temperature=temp, prompts=names)
        assert setting.draft is not None, "`_small` names one"
        rate, floor_s = say_draft_ceiling(setting.draft)
        with setting.open(_largest(effort.trees), context=1024) as decoder:
            texts = [encoded(decoder, prompt, PROMPT_TOKENS) for prompt in found]
            decoder.generate(texts[0], max_new_tokens=2 * effort.num_tokens // 3)  # warms everything up
            rows, written = measure(decoder, texts, effort, temp, screen)
    proof = setting.prove(written)
    head = ["tree", "draft s", "ms a step", "of the ceiling", "tokens/sweep", "reached depth 1, 2, 4, 8"]
    print(aligned([head, *[_cells(row, floor_s) for row in rows]]))
    print(common.proof_line(proof))
    result = new_result(
        "draft",
        settings={**setting.as_dict(), **effort._asdict(), "temperature": temp, "prompts": names, "quick": quick},
        ceiling={"bytes_per_s": rate, "draft_step_s": floor_s},
        rows=rows,
        guards=_guards(rows, names),
    )
    common.finish(result, json_file, old)


def _small(model: str | None, draft: str | None, ram: str) -> Setting:
    """As named, or the packaged pair as it is. Raises `UserError` for a target without a draft."""
    from offload.cli.demo import PAIR

    if model is not None and draft is None:
        raise UserError("bench draft needs a draft: give --draft")
    target, small = model or str(PAIR / "target"), draft or str(PAIR / "draft")
    return common.find_setting(target, small, "", ram, Console(is_quiet=True))


def _largest(trees: Sequence[str]) -> str:
    """The tree that memory must be planned for."""
    return max(trees, key=lambda tree: parse_tree(tree).num_nodes)


def _cells(row: Row, floor_s: float) -> list[str]:
    reached = "  ".join(f"{row['accepted_per_pos'][k - 1]:.2f}" for k in (1, 2, 4, 8) if k <= row["depth"])
    times = [f"{row['draft_s']:.4f}", f"{row['draft_step_s'] * 1e3:.2f}", f"{floor_s / row['draft_step_s']:.3f}"]
    return [row["tree"], *times, f"{row['tokens_per_sweep']:.2f}", reached]


def _guards(rows: Sequence[Row], names: list[str]) -> dict[str, Guard]:
    return {f"tokens per sweep, {row['tree']}": Guard(row["tokens_per_sweep_samples"], "higher", names) for row in rows}


if __name__ == "__main__":
    from offload.bench.suite import run_alone

    run_alone("draft")
