"""A program to compare with that does what a test tells it: emits given tokens, sleeps, fails or dies."""

import textwrap
from pathlib import Path

import pytest

from offload.bench.peers.child import Order
from offload.checkpoint.packaged import PAIR

PROMPT = list(range(300, 340))
NUM_NEW = 10


def order(module: str = "planted", **changes: object) -> Order:
    """For a child that continues PROMPT."""
    fields: dict[str, object] = {
        "module": module,
        "options": {},
        "target": str(PAIR / "target"),
        "draft": str(PAIR / "draft"),
        "prompts": [PROMPT],
        "num_tokens": NUM_NEW,
        "limit_s": 60.0,
        "threads": [],
        "cap_bytes": 1 << 30,
        "group": None,
    }
    return Order(**{**fields, **changes})  # type: ignore[arg-type]


_SOURCE = """
import os, time
class Planted:
    def __init__(self, order):
        self.options = order.options
        if "error" in self.options: raise ValueError(self.options["error"])
        if "signal" in self.options: os.kill(os.getpid(), self.options["signal"])
    def use_threads(self, count): pass
    def generate(self, prompt_ids, num_tokens, limit_s, emit):
        for token in self.options["tokens"][:num_tokens]:
            time.sleep(self.options.get("sleep_s", 0.001))
            emit([token])
open_peer = Planted
"""


def plant(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let children find it as `planted`."""
    (folder / "planted.py").write_text(textwrap.dedent(_SOURCE))
    monkeypatch.setenv("PYTHONPATH", str(folder))
