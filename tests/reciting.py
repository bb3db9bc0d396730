"""Models that recite a text known beforehand, in tokens that cut its characters apart; their runs, cut short or not.

Why: whatever a run prints, whole or cut short, can be told right from wrong to the letter.
"""

import errno
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from shell import Outcome, shell
from tiny import streaming_ram

import offload
from offload.engine.decoder import Decoder
from offload.engine.step import SpeculationStep
from offload.model.target import Target
from offload.streaming import disk as host_store

# Tokens after the prompt's colon. A Chinese character is cut into three, an emoji into two; the last token ends a line.
PIECES = (":", " Hel", "lo", " w", "ör", "ld ", b"\xe6", b"\x97", b"\xa5", b" \xf0\x9f\x98", b"\x80", "!\n")
SAID = " Hello wörld 日 😀!\n"
NUM_SAID = len(PIECES) - 1
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
PROMPT = "Say:"
TREES = ("none", "chain:1", "8x3", "sequences:2x4", "chain:7")
LARGEST_TREE = "sequences:2x4"  # 9 nodes
CONTEXT = 256


def settings(model: Path, *, tree: str = "8x3") -> list[object]:
    """Flags of a streamed run with a draft that is always right."""
    budget = ["--ram", streaming_ram(model), "--context", CONTEXT, "--threads", 1]
    return ["-m", model, "-d", model, "--tree", tree, *budget]


def open_decoder(model: Path, tree: str = LARGEST_TREE) -> Decoder:
    return offload.load(model, model, tree=tree, ram=streaming_ram(model), context=CONTEXT, threads=1)


def generate(
    model: Path, *arguments: object, tree: str = "8x3", prompt: str | None = PROMPT, stdin: bytes = b""
) -> Outcome:
    given = [] if prompt is None else ["-p", prompt]
    return shell("generate", *settings(model, tree=tree), *given, *arguments, stdin=stdin)


def generate_json(model: Path, *arguments: object, **options: Any) -> dict[str, Any]:
    outcome = generate(model, "--json", *arguments, **options)
    assert outcome.code == 0 and outcome.err == "", "one JSON object and nothing else"
    return only_object(outcome.out)


def only_object(out: str) -> dict[str, Any]:
    value = json.loads(out)
    assert isinstance(value, dict) and out.count("\n") == 1
    return value


def recited(num_chars: int) -> str:
    """The first characters of what the looper says, as many as `num_chars`."""
    return ((SAID + ":") * (num_chars // len(SAID) + 1))[:num_chars]


def at_sweep(number: int, act: Callable[[], object]) -> Any:
    """Patch the target so that `act` runs just before a sweep; the prompt's is number 1."""
    return at_call(Target, "score", number, act)


def at_call(owner: type, method: str, number: int, act: Callable[[], object]) -> Any:
    """Patch a class so that `act` runs just before the so-many-th call of a method."""
    original, count = getattr(owner, method), iter(range(1, 1 << 30))

    def counted(self: object, *arguments: Any) -> Any:
        if next(count) == number:
            act()
        return original(self, *arguments)

    return patch.object(owner, method, counted)


def before_steps(act: Callable[[], object]) -> Any:
    """Patch the decoder so that `act` runs just before every step."""
    original = SpeculationStep.step

    def step(self: SpeculationStep, *arguments: Any) -> Any:
        act()
        return original(self, *arguments)

    return patch.object(SpeculationStep, "step", step)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def failing_reads(number: int) -> Any:
    """Patch the disk so that reads fail from this one on."""
    preadv, count = os.preadv, iter(range(1, 1 << 30))

    def read(fd: int, buffers: Any, offset: int) -> int:
        if next(count) >= number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    return patch.object(host_store.os, "preadv", read)


def num_readers() -> int:
    return sum(thread.name.startswith("offload-read") for thread in threading.enumerate())
