"""Clocks: what measures or limits time asks the monotonic one, and a pause of hours between two looks breaks nothing.

The wall clock is set by people and by servers of time, forwards and back. A laptop's sleep, or SIGSTOP, is time that
passes between two lines. Both are simulated by other functions.
"""

import ast
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from reciting import PROMPT, before_steps, open_decoder
from served import serving
from test_structure import sources

HOURS_S, YEARS_S = 5 * 3600.0, 20 * 365 * 86400.0

WALL = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime", "ctime", "asctime", "strftime",
        "fromtimestamp", "st_atime", "st_mtime", "st_ctime", "st_mtime_ns", "getmtime", "getctime"}  # fmt: skip
TOLD = {
    ("offload/server/openai/choices.py", "time"): "`created` of an answer, in OpenAI's protocol",
    ("offload/server/openai/responses.py", "time"): "`created_at` of an answer, in OpenAI's protocol",
    ("offload/server/app.py", "time"): "`created` of the model's card",
    ("offload/server/app.py", "fromtimestamp"): "the same in Anthropic's form",
    ("offload/engine/block_folder.py", "time"): "scratch files of programs that have ended; a jump costs one block",
    ("offload/engine/block_folder.py", "st_mtime"): "the same",
    ("offload/engine/block_folder.py", "st_mtime_ns"): "which block was used longest ago; a jump evicts another one",
    ("offload/reports/measured_profile.py", "now"): "when a profile was written, for people",
    ("offload/checkpoint/files.py", "st_mtime_ns"): "compared for equality alone: whether a file is the same",
    ("offload/checkpoint/whole.py", "st_mtime"): "beside what the hub's library has noted, as it does itself",
    ("bench/harness/record.py", "now"): "when a figure was taken, for people",
    ("bench/harness/picture.py", "now"): "the date under a picture",
    ("bench/peers/peers.py", "st_mtime_ns"): "compared for equality alone",
}


def looks_at_the_wall(source: str) -> Iterator[tuple[int, str]]:
    """Uses of the wall clock and of files' times; `time.monotonic` and `perf_counter` are none."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in WALL:
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr.startswith(("st_", "get")) or owner in ("time", "datetime", "date"):
                yield node.lineno, node.attr
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in WALL)


LOOKS = ("time.time()", "from time import time", "datetime.now(UTC)", "os.stat(p).st_mtime", "started = time.time_ns()",
         "os.path.getmtime(p)")  # fmt: skip


def test_the_wall_clock_is_for_people() -> None:
    looks = [(str(path), line, look) for path, source in sources() for line, look in looks_at_the_wall(source)]
    wrong = [f"{path}:{line} {look}: take time.monotonic" for path, line, look in looks if (path, look) not in TOLD]
    assert not wrong, "\n" + "\n".join(wrong)
    assert TOLD.keys() == {(path, look) for path, _, look in looks}
    assert all(list(looks_at_the_wall(source)) for source in LOOKS), "a look is found"


class Jumps:
    """Clocks that jump: the wall's by years, back and forth, at every look; the monotonic ones by hours, when told."""

    def __init__(self, patch: pytest.MonkeyPatch, *, every: int = 0) -> None:
        self._pause_s, self._every, self._num_looks = 0.0, every, 0
        for name in ("time", "time_ns"):
            patch.setattr(time, name, self._wall(getattr(time, name), 1 if name == "time" else 10**9))
        for name in ("monotonic", "perf_counter"):
            patch.setattr(time, name, self._steady(getattr(time, name)))

    def sleep(self) -> None:
        """Hours go by."""
        self._pause_s += HOURS_S

    def _wall(self, real: Callable[[], Any], unit: int) -> Callable[[], Any]:
        return lambda: real() + random.choice([-1, 0, 1]) * type(real())(YEARS_S) * unit

    def _steady(self, real: Callable[[], float]) -> Callable[[], float]:
        def steady() -> float:
            self._num_looks += 1
            if self._every and self._num_looks % self._every == 0:
                self.sleep()
            return real() + self._pause_s

        return steady


def test_a_text_is_the_same_whatever_clocks_do(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours pass at every seventh look, in the midst of steps, and figures stay numbers that make sense."""
    with open_decoder(talker) as decoder:
        wanted = decoder.generate(PROMPT, max_new_tokens=40)
        with monkeypatch.context() as patch:
            Jumps(patch, every=7)
            generation = decoder.generate(PROMPT, max_new_tokens=40)
    assert generation.token_ids == wanted.token_ids
    assert 0 < generation.stats.num_sweeps == wanted.stats.num_sweeps


def test_a_stream_over_http_outlives_a_sleep(looper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client has slept as well: clocks of silence have run out, though no rank was silent."""
    asked = {"prompt": PROMPT, "max_tokens": 40, "stream": True, "temperature": 0}
    with (
        monkeypatch.context() as patch,
        serving(looper) as served,
        before_steps(lambda: time.sleep(0.02)),
    ):  # no clock may go back
        jumps = Jumps(patch)
        with httpx.stream("POST", f"{served.address}/v1/completions", json=asked, timeout=1e6) as stream:
            lines, seen = stream.iter_lines(), list[str]()
            while sum('"text":"' in line for line in seen) < 2:
                seen.append(next(lines))
            jumps.sleep()
            assert "data: [DONE]" in list(lines)
        jumps.sleep()
        assert httpx.get(f"{served.address}/health", timeout=1e6).status_code == 200
