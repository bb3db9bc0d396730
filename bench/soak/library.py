"""A process that opens a model, writes some texts and closes it, each time in another way.

Runs are broken off, chats and sessions kept and gone on with. It tells each text as a line of JSON;
a line `round` says that everything is closed, and waits for an answer: that is when it is looked
at. Invariant: between rounds it holds nothing that it did not hold before the first one.
"""

import gc
import json
import sys
import tempfile
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from offload.bench.soak.clients import CONTEXT, Wish, wishes
from offload.engine.chat import Chat
from offload.engine.decoder import Decoder
from offload.engine.generation import Generation
from offload.engine.load import load
from offload.engine.scheduler import in_order

TREES = ("none", "chain:4", "chain:auto", "16x4", "dynamic:24x6", "sequences:4x4", "auto")
RULES = ("match", "match", "topk")
# share of texts that are broken off
_LEFT_SHARE = 0.3


class Order(NamedTuple):
    target: str
    draft: str
    ram_bytes: list[int]
    seed: int


def main(order: Order) -> None:
    rng = Random(order.seed)
    table = wishes()
    for number in count():
        write_some(order, rng, table)
        gc.collect()
        print(json.dumps({"round": number}), flush=True)
        if not sys.stdin.readline():
            return


def write_some(order: Order, rng: Random, table: list[Wish]) -> None:
    options: dict[str, Any] = {
        "tree": rng.choice(TREES),
        "rule": rng.choice(RULES),
        "parallel": rng.choice((1, 1, 2, 3)),
        "lookup": rng.choice((True, None)),
        "draft_dtype": rng.choice((None, "int8")),
        "context": CONTEXT,
        "profile": "none",
    }
    if options["tree"] in ("none", "chain:auto"):
        options["lookup"] = None
    ram_bytes = rng.choice(order.ram_bytes)
    *alone, first, other = rng.sample(range(len(table)), 6)
    with load(order.target, order.draft, ram_bytes, **options) as decoder:
        for name in alone:
            run = decoder.start(table[name].request(decoder), continues=rng.random() < 0.5)
            most = rng.randrange(4) if rng.random() < _LEFT_SHARE else None
            for number, _ in enumerate(run):
                if number == most:
                    break
            tell(name, run.result())
            decoder.release(run)
        both = [table[name].request(decoder) for name in (first, other)]
        for name, result in zip((first, other), in_order(decoder, both), strict=True):
            tell(name, result)
        if decoder.num_parallel == 1:
            talk(decoder, rng)


def talk(decoder: Decoder, rng: Random) -> None:
    with tempfile.TemporaryDirectory(prefix="offload-soak-") as folder:
        chat = Chat(decoder, max_new_tokens=4)
        path = Path(folder) / "session"
        for _ in chat.ask(f"What is {rng.randrange(100)}?"):
            pass
        chat.save(path)
        chat.load(path)
        for _ in chat.ask("And then?"):
            break


def tell(name: int, result: Generation) -> None:
    head = {"wish": name, "new_ids": result.token_ids, "rule": result.rule}
    print(json.dumps({**head, "is_invariant": result.is_invariant}), flush=True)


if __name__ == "__main__":
    main(Order(*json.loads(sys.stdin.readline())))
