"""How control walks through the house while a decoder is loaded and writes: down, and back up by few callbacks.

Layers are those of the import contract in pyproject.toml. A climb is a call from a file of a lower layer to one of a
higher: what a lower one calls there it was given.
"""

import gc
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

from shell import shell
from tiny import FAMILIES, build, save

import offload
from offload.checkpoint.packaged import PAIR

ROOT = Path(__file__).resolve().parents[2]
# with one tree: which is chosen goes by the machine
MOST_FILES = 124
# packages that a plan enters, and files that are none
MOST_ROOMS = 14
# what is listed here is called by files below
CALLED_FROM_BELOW = {
    "calibration.threads",  # what is timed
    "drafting.lookup",  # names the next child of a node of a tree that grows
    "engine.build",  # bytes and layers that have landed
    "engine.run_trees",  # says what one more pass of the draft would cost
    "engine.load",  # its signature is made of a record
    "memory.planner",  # its plans are remembered
    "model.headers",  # layers are described once
    "model.tree_model",  # sends noise to a device
    "units",  # reads the size of the prompt cache
}


@cache
def level(module: str) -> int:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    of = {name.strip(): number for number, row in enumerate(contract["layers"]) for name in row.split("|")}
    parts = f"offload.{module}".split(".")
    return next((of[name] for end in range(len(parts), 1, -1) if (name := ".".join(parts[:end])) in of), 0)


@cache
def module_of(file: str) -> str:
    path = Path(file)
    inner = ROOT / "offload"
    if path.is_relative_to(ROOT / "kernels"):
        return ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(path.relative_to(inner).with_suffix("").parts) if path.is_relative_to(inner) else ""


@contextmanager
def walked(calls: set[tuple[str, str]]) -> Iterator[None]:
    """Note (caller, called) of all calls between files of the house meanwhile; what libraries call is theirs."""

    def note(frame: FrameType | None, event: str, _: object) -> None:
        if event != "call" or frame is None or not (called := module_of(frame.f_code.co_filename)):
            return
        caller = frame.f_back
        while caller is not None and not module_of(caller.f_code.co_filename):
            caller = caller.f_back
        calls.add((module_of(caller.f_code.co_filename) if caller else "", called))

    # what earlier tests have left is not ended meanwhile
    gc.collect()
    gc.disable()
    sys.setprofile(note)
    threading.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        gc.enable()
        threading.setprofile(None)


def climbs(calls: set[tuple[str, str]]) -> set[str]:
    return {called for caller, called in calls if caller and level(caller) > level(called)}


def test_loading_and_writing_go_down(tmp_path: Path) -> None:
    target = save(build(FAMILIES["llama"](), 0), tmp_path / "target")
    draft = save(build(FAMILIES["llama"](), 1), tmp_path / "draft")
    offload.load(target, draft, tree="dynamic:16x4").close()  # what is imported, or remembered, at first
    calls = set[tuple[str, str]]()
    with walked(calls), offload.load(target, draft, tree="dynamic:16x4") as decoder:
        decoder.generate([1, 2, 3], max_new_tokens=8)
    assert climbs(calls) <= CALLED_FROM_BELOW
    assert len({called for _, called in calls}) <= MOST_FILES


def test_a_plan_enters_few_rooms() -> None:
    plan = ("plan", "-m", PAIR / "target", "-d", PAIR / "draft", "--ram", "200MiB")
    shell(*plan)
    calls = set[tuple[str, str]]()
    with walked(calls):
        assert shell(*plan).code == 0
    rooms = {called.partition(".")[0] if "." in called else "a file" for _, called in calls}
    assert len(rooms) <= MOST_ROOMS, rooms
