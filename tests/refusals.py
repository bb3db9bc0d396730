"""Ways to break a folder that is sound, and what a refusal looks like: one line, exit code 2, no traceback, no text.

Every case goes through the real command line. The sound folders are themselves proved to work (test_bad_folder.py), so
a refusal is due to the break.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shell import Outcome, shell

Break = Callable[[Path], object]
ENOUGH = ("--ram", "1GiB", "--context", "64", "--threads", "1", "-n", "2")
GENERATE, PLAN = ("generate", "-p", "Count:"), ("plan",)
BOTH = (GENERATE, PLAN)


def assert_refused(outcome: Outcome, *words: str) -> None:
    assert outcome.err.count("\n") == 1 and outcome.err.endswith("\n"), f"one line, got {outcome.err!r}"
    assert outcome.err.startswith("offload: ") and len(outcome.err) < 600
    assert outcome.err[:-1].isprintable(), "nothing that moves a terminal's cursor"
    assert outcome.code == 2 and outcome.out == "", outcome
    for word in words:
        assert word in outcome.err, outcome.err


def generate(model: Path, *arguments: object, stdin: bytes = b"") -> Outcome:
    return shell("generate", "-m", model, *ENOUGH, *arguments, stdin=stdin)


def contents(directory: Path) -> dict[str, bytes]:
    """Everything below a folder, byte by byte."""
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def refuse_folder(directory: Path, breaks: Break, words: tuple[str, ...], *, by_plan: bool = True) -> None:
    """Break the folder, see it refused by both commands, and see that refusing it wrote nothing."""
    breaks(directory)
    before = contents(directory.parent)
    assert_refused(generate(directory, "-p", "Count:"), *words)
    planned = shell("plan", "-m", directory, "--ram", "1GiB")
    if by_plan:
        assert_refused(planned, *words)
    else:
        assert planned.code == 0, "plan reads headers alone, and these are sound"
    assert contents(directory.parent) == before


def case(name: str, breaks: Break, *words: str, by_plan: bool = True) -> Any:
    return pytest.param(breaks, words, by_plan, id=name)


def config(**changes: object) -> Break:
    """Change entries of config.json; `...` drops one."""
    return lambda directory: set_json(directory / "config.json", **changes)


def set_json(path: Path, **changes: object) -> None:
    """Change entries of a file that may not be there yet; `...` drops one."""
    entries = {**(json.loads(path.read_text()) if path.exists() else {}), **changes}
    path.write_text(json.dumps({key: value for key, value in entries.items() if value is not ...}))


def drop(pattern: str) -> Break:
    return lambda directory: [path.unlink() for path in directory.glob(pattern)]


def split(shard: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    data_lo = 8 + int.from_bytes(shard[:8], "little")
    return json.loads(shard[8:data_lo]), shard[data_lo:]


def join(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def header(change: Callable[[dict[str, Any]], object]) -> Break:
    def edit(directory: Path) -> None:
        path = directory / "model.safetensors"
        content, data = split(path.read_bytes())
        change(content)
        path.write_bytes(join(json.dumps(content).encode(), data))

    return edit


def cut_file(num_bytes: int) -> Break:
    """Keep the first bytes, or with a negative number drop the last."""

    def cut(directory: Path) -> None:
        path = directory / "model.safetensors"
        path.write_bytes(path.read_bytes()[:num_bytes])

    return cut


WORDS = (b"0", b"9" * 30, b"-1", b"null", b"true", b"[]", b"{}", b'""', b",", b'"')


def damaged(text: bytes, rng: random.Random) -> bytes:
    """Bytes overwritten, dropped, doubled, or exchanged for others that JSON knows."""
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(text))
        end = at + rng.randrange(1, 6)
        other = rng.choice((bytes([rng.randrange(256)]), b"", 2 * text[at:end], rng.choice(WORDS)))
        text = text[:at] + other + text[end:]
    return text
