"""One compared program in a process of its own: it runs its prompts in its memory group.

It prints one JSON line. This file imports nothing heavy: the module that knows the program is
imported inside the group, by its `Order`.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from offload.machine import available_ram_bytes, peak_rss_bytes, rss_bytes

# in one pass; of a trial
LONGEST_BURST = 40
_FEWEST_TOKENS = 2
Emit = Callable[[list[int]], None]  # takes new tokens at the moment they are known


class Order(NamedTuple):
    """What a child is to do; plain values only, it travels as JSON."""

    module: str  # has `open_peer(order) -> Peer`
    options: dict[str, Any]  # what `open_peer` makes of it
    target: str  # folder of the checkpoint, or the GGUF file
    draft: str
    prompts: list[list[int]]
    num_tokens: int  # new ones for every prompt, at least, after the first burst
    limit_s: float  # a run that takes longer is cut there
    # counts to try, briefly, before the best one is measured. Empty: the program's own choice
    threads: list[int]
    cap_bytes: int  # memory of the whole process
    group: str | None = None  # file to write the process id into; None: uncapped


class Peer(Protocol):
    """A program that decodes greedily and hands on the tokens of every pass; `emit` may end it."""

    def use_threads(self, count: int) -> None: ...

    def generate(
        self, prompt_ids: list[int], num_tokens: int, limit_s: float, emit: Emit
    ) -> None: ...


class Measured(NamedTuple):
    prompt: int  # index
    bursts: list[tuple[float, list[int]]]  # seconds since the start, tokens that were known by then

    @property
    def token_ids(self) -> list[int]:
        return [token for _, tokens in self.bursts for token in tokens]

    @property
    def num_decoded(self) -> int:
        """Tokens after the first burst, which belongs to the prompt."""
        return len(self.token_ids) - len(self.bursts[0][1])


def rate(runs: Sequence[Measured]) -> float:
    """Return tokens per second after the first burst, over all runs."""
    decode_s = sum(run.bursts[-1][0] - run.bursts[0][0] for run in runs)
    return sum(run.num_decoded for run in runs) / decode_s if decode_s else 0.0


def follow(order: Order) -> dict[str, Any]:
    """Run the order in this process; return what the parent reads (`run.Outcome`)."""
    if order.group:
        Path(order.group).write_text(str(os.getpid()))
    drop_pages(Path(order.target))
    started = time.perf_counter()
    peer: Peer = import_module(order.module).open_peer(order)
    load_s = time.perf_counter() - started
    trials = dict[int, float]()
    for count in order.threads:
        peer.use_threads(count)
        trials[count] = rate([_run(peer, order, 0, max(_FEWEST_TOKENS, order.num_tokens // 4))])
    best = max(trials, key=lambda count: trials[count], default=0)
    if best:
        peer.use_threads(best)
    runs = [_run(peer, order, prompt, order.num_tokens) for prompt in range(len(order.prompts))]
    figures = {
        "num_threads": best,
        "trial_tokens_per_s": trials,
        "load_s": load_s,
        "rss_bytes": peak_rss_bytes(),
    }
    return {"runs": runs, **figures}


def drop_pages(path: Path) -> None:
    """Ask the kernel to forget what it has cached of a file or of the files in a folder."""
    for each in [path] if path.is_file() else [each for each in path.iterdir() if each.is_file()]:
        file = os.open(each, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def free_bytes(order: Order) -> int:
    """Return the bytes that the cap leaves beside this process, its libraries above all."""
    return available_ram_bytes() if order.group else order.cap_bytes - rss_bytes()


class _EnoughError(Exception):
    """Raised through a program that has decoded what was wanted."""


def _run(peer: Peer, order: Order, prompt: int, num_tokens: int) -> Measured:
    """Stop after the burst that reaches `num_tokens`: a cut one would count its time in full."""
    run = Measured(prompt, [])
    started = time.perf_counter()

    def note(tokens: list[int]) -> None:
        run.bursts.append((time.perf_counter() - started, tokens))
        if run.num_decoded >= num_tokens:
            raise _EnoughError

    # a program that stops by itself gets room for the longest last burst
    with suppress(_EnoughError):
        peer.generate(order.prompts[prompt], num_tokens + LONGEST_BURST, order.limit_s, note)
    return run


if __name__ == "__main__":
    print("\n" + json.dumps(follow(Order(*json.loads(sys.argv[1])))))
