"""Two cards of one machine: a process for each writes the ids that one process writes on the CPU.

The packaged pair in float32, which lies on the cards whole: what is shown is that ranks start, share
and exchange as they should. On a machine with one card nothing is measured, and a row says so.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from offload.bench.harness.record import add_row
from offload.bench.harness.tables import Row, WrongTokenError, attempt, row
from offload.checkpoint.packaged import PAIR, PROMPT
from offload.engine.load import load
from offload.rank_roles import cards_of

_NUM_NEW = 32
_PROMPTS = (PROMPT, "import os\n", PROMPT + "\n")
_USUAL: dict[str, Any] = {"context": 512, "dtype": "float32", "profile": "none", "ram": "4GiB"}
WAYS: dict[str, dict[str, Any]] = {
    "shards": {"ranks": "shards"},
    "shards without a tree": {"ranks": "shards", "tree": "none"},
    "shards, three texts at a time": {"ranks": "shards", "parallel": 3},
    "stages": {"ranks": "stages:0-1"},
    "stages, one run at a time": {"ranks": "stages:0-1", "pipeline": "sync"},
}


def measure(device: str) -> Iterator[Row]:
    """Yield a row for each way of sharing. Raises `WrongTokenError` for other ids than one process's."""
    num_cards = torch.cuda.device_count()
    cards = cards_of(device)
    if "cpu" not in cards and num_cards < len(cards):
        yield row(f"cards: skipped, {len(cards)} are wanted", num_cards, "cards")
        return
    with load(PAIR / "target", None, tree="none", device="cpu", **_USUAL) as alone:
        wanted = [text.token_ids for text in alone.generate(_PROMPTS, max_new_tokens=_NUM_NEW)]
    for way, options in WAYS.items():
        yield from attempt(f"cards, {way}", ("exact",), _of_way(device, way, options, wanted))


def _of_way(
    device: str, way: str, options: dict[str, Any], wanted: list[list[int]]
) -> Iterator[Row]:
    with load(PAIR / "target", PAIR / "draft", device=device, **_USUAL, **options) as decoder:
        texts = decoder.generate(_PROMPTS, max_new_tokens=_NUM_NEW)
        if [text.token_ids for text in texts] != wanted:
            raise WrongTokenError(f"cards, {way}: not the ids of one process on the CPU")
        num_tokens = sum(map(len, wanted))
        name = f"cards, {way}: float32 ids are those of one process on the CPU"
        counted = row(name, num_tokens, "tokens", num_tokens, 1.0, promise="exact")
        yield counted | {"notes": decoder.notes, "plan": decoder.plan.as_dict()}
        yield row(f"cards, {way}: one token", texts[0].stats.tpot_s, "s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0,1")
    given = parser.parse_args()
    for measured_row in measure(given.device):
        add_row(given.rows, measured_row)
        print(measured_row["row"], flush=True)
