"""A spread of faults in some commands; `make faults` strikes calls of all kinds in all of them.

Why: what fails once in a year of runs must end as promised, too: with one line and its exit code, the text
so far, no file half-written, and a next run that works. Invariant: what a verdict looks for shows where it is planted.
"""

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faults.calls import ANY, CALLS, ERROR, FAULTS, SIGNAL, STOP, Fault
from faults.forge import Ended, Forge, restore
from faults.scenes import Scene, prepare, scenes
from faults.trial import Damage, Trial
from faults.verdict import Circumstances, Reference, Verdict, contents, judged, of_ids
from matrix import matrix, random_of_the_seed

STRIKES = 2  # of each row
ROWS = [("session, new", 0), ("session, new", 1), *(("datastore build", number) for number in range(4))]
TrialOf = Callable[[str], Trial]
has_shim = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None or sys.version_info >= (3, 13),
    reason="faults are injected by a shim in C, for Linux and Python before 3.13",
)


@pytest.fixture(scope="module")
def trial_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialOf]:
    folder = tmp_path_factory.mktemp("faults")
    forge = Forge(folder)
    prepare(forge.root)
    restore(folder / "pristine", forge.root)
    by_name = {scene.name: scene for scene in scenes(forge.root)}
    yield cache(lambda name: Trial(forge, by_name[name], folder / "pristine"))
    forge.close()


@has_shim
@matrix("name, number", ROWS, daily=1)
def test_faults_end_as_promised(name: str, number: int, trial_of: TrialOf) -> None:
    chance, trial = random_of_the_seed(name, number), trial_of(name)
    possible = [fault for fault in FAULTS if trial.numbers(fault)]
    for fault in chance.sample(possible, STRIKES):
        at = chance.choice(trial.numbers(fault))
        verdict, _ = trial.strike(fault, at)
        call = (*CALLS, "any")[fault.call]
        assert not verdict.breaches, f"make faults ONLY='--scene {name!r} --call {call} --fault {fault.name} --at {at}'"


@pytest.mark.full
@has_shim
def test_the_shim_strikes_where_it_is_told(trial_of: TrialOf) -> None:
    trial = trial_of("session, new")
    for call, which in (("open", 0), ("rename", -1)):  # the last one is the session's own
        fault = Fault("EIO", CALLS.index(call), ERROR, 5)
        verdict, ended = trial.strike(fault, trial.numbers(fault)[which])
        assert verdict.end in ("exit 1", "exit 2") and "Input/output error" in ended.err
    late = trial.numbers(STOP)[-20]
    assert trial.strike(STOP, late)[0].end == "survived"
    killed = trial.strike(Fault("SIGKILL", ANY, SIGNAL, signal.SIGKILL), late)[1]
    assert killed.code == -signal.SIGKILL and killed.is_struck
    assert trial.strike(FAULTS[0], 1 << 30)[0].end == "not struck"
    verdict, ended = trial.strike(Fault("SIGINT", ANY, SIGNAL, signal.SIGINT), trial.numbers(STOP)[40])
    assert verdict.end == "exit 130" and not verdict.breaches, verdict


@pytest.mark.full
@has_shim
@pytest.mark.parametrize("damage", ["cut", "overwrite"])
def test_a_shard_damaged_while_it_is_read_never_gives_other_text(damage: str, trial_of: TrialOf) -> None:
    ends = list(damaged(trial_of("session, new"), damage))
    assert not any(verdict.breaches for verdict in ends), ends
    assert "exit 1" in {verdict.end for verdict in ends}, "none of them came in time to matter"


@pytest.mark.full
@has_shim
def test_other_weights_show_in_the_text_where_nobody_looks_after_files(trial_of: TrialOf) -> None:
    seen = list[Verdict]()
    for end in damaged(trial_of("session, new"), "overwrite", is_blind=True):
        seen.append(end)
        if any(breach.startswith("exit 0 with another text") for breach in end.breaches):
            return
    raise AssertionError(seen)


def damaged(trial: Trial, kind: str, **options: bool) -> Iterator[Verdict]:
    """A shard of the target at moments from the end on; which are those of the text depends on the machine."""
    damage, numbers = Damage(kind, "target/model-00003-of-00005.safetensors"), trial.numbers(STOP, every=True)
    yield from (trial.damage(damage, numbers[len(numbers) * part // 32], **options)[0] for part in range(31, 15, -2))


def reply(text: str, *, end: str = "[DONE]") -> str:
    event = json.dumps({"choices": [{"text": text}]})
    return f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {event}\n\ndata: {end}\n\n"


PLANTED: dict[str, tuple[dict[str, Any], dict[str, bytes]]] = {
    "traceback: ValueError: no": ({"code": 1, "err": "Traceback (most recent call last):\nValueError: no\n"}, {}),
    "exit code 3": ({"code": 3}, {}),
    "exit code -11": ({"code": -11}, {}),
    "it hangs": ({"code": -9, "is_hung": True}, {}),
    "exit 1 with 0 lines": ({"code": 1}, {}),
    "exit 2 with 2 lines": ({"code": 2, "err": "offload: one\noffload: two\n"}, {}),
    "exit 0 with 1 lines": ({"err": "offload: failed\n"}, {"out": b"whole"}),
    "exit 0 with another text": ({"out": "Other"}, {"out": b"whole"}),
    "text that never was": ({"code": 1, "out": "Hex", "err": "offload: failed\n"}, {}),
    "exit 0 without out": ({}, {}),
    "out: half-written, 2 of 5 bytes": ({"code": 1, "err": "offload: failed\n"}, {"out": b"wh"}),
    ".out.12: left behind with 2 bytes": ({"code": 1, "err": "offload: failed\n"}, {".out.12": b"wh"}),
    "a reply with another text: 'Other'": ({"replies": [reply("Other")]}, {"out": b"whole"}),
    "a reply that ends untold after 'Hel'": ({"replies": [reply("Hel", end="")]}, {"out": b"whole"}),
    "a reply with another text: 'x'": ({"replies": [reply("x", end='{"error": {}}')]}, {"out": b"whole"}),
    "the next run: exit 0 with another text": ({"code": 1, "err": "offload: failed\n"}, {"half": b"wh"}),
    "kept: it is gone": ({"code": 1, "err": "offload: failed\n"}, {"kept": b""}),
}


@pytest.mark.parametrize("words", PLANTED)
def test_a_planted_breach_shows(words: str, tmp_path: Path) -> None:
    whole = Ended(0, "Hello", "", 0.1, False, replies=(reply("Hello"),))
    changes, files = PLANTED[words]
    (tmp_path / "kept").write_bytes(b"as it was")
    before = contents(tmp_path)
    reference = Reference(whole, {**before, "out": b"whole"})
    for name, data in files.items():
        if data:
            (tmp_path / name).write_bytes(data)
        else:
            (tmp_path / name).unlink()
    forge: Any = SimpleNamespace(root=tmp_path, run=lambda *_, **__: whole._replace(out="Other"))
    verdict = judged(
        forge, Scene("some", (), stays=("half",)), [reference], Circumstances(before), whole._replace(**changes)
    )
    assert verdict.end == "BREACH" and any(breach.startswith(words) for breach in verdict.breaches), verdict


def test_other_tokens_show() -> None:
    first, two = (Ended(0, json.dumps({"token_ids": ids}), "", 0.1, False) for ids in ([1], [1, 2]))
    assert of_ids(two, two, True) == of_ids(two, first, False) == []
    assert of_ids(two, first, True) and of_ids(first, two, False) and of_ids(two, two._replace(out='{"token'), True)
