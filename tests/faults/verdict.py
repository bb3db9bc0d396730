"""What is promised of a command that fails: exit code, one line, the text so far, no half-written file, a next run."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from faults.forge import Ended, Forge
from faults.scenes import Scene

_ENDED_BY = {0, 1, 2, *(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))}
_MOST_CHARS = 620
Files = dict[str, bytes]


class Reference(NamedTuple):
    """How a command ends that nothing disturbs."""

    ended: Ended
    files: Files


class Circumstances(NamedTuple):
    """What there was before, and what the test has done beside the fault itself.

    Attributes:
        changed: files that it has damaged.
        is_reader_gone: nobody reads what is printed, so that an early end is no failure.
    """

    before: Files
    changed: tuple[str, ...] = ()
    is_reader_gone: bool = False

    def unchanged(self, files: Files) -> Files:
        """Without those that the test has damaged."""
        return {name: data for name, data in files.items() if name not in self.changed}


class Verdict(NamedTuple):
    """How it has ended, and what should not have been."""

    end: str
    breaches: list[str]


def contents(root: Path) -> Files:
    """All files below, by name; folders are empty ones."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else b"" for path in sorted(root.rglob("*"))
    }


def judged(forge: Forge, scene: Scene, references: Sequence[Reference], around: Circumstances, ended: Ended) -> Verdict:
    """Whether one of the references allows that end; the next run is tried where files are not what they were."""
    after, before = around.unchanged(contents(forge.root)), around.unchanged(around.before)
    own = [reference._replace(files=around.unchanged(reference.files)) for reference in references]
    breaches = min((_breaches(scene, one, around, before, after, ended) for one in own), key=len)
    if after != before and after != own[0].files and not breaches and not around.changed:
        breaches = _of_next_run(forge, scene, own[0].files)
    end = "survived" if ended.code == 0 else f"exit {ended.code}"
    if not ended.is_struck:
        end = "not struck"
    return Verdict("BREACH" if breaches else end, breaches)


def _breaches(
    scene: Scene, reference: Reference, around: Circumstances, before: Files, after: Files, ended: Ended
) -> list[str]:
    is_whole, wanted = ended.code == 0 and not scene.is_timed and not around.is_reader_gone, reference.files
    breaches = [*_of_exit(scene, ended), *_of_text(scene, reference.ended, ended, is_whole)]
    if is_whole:
        breaches += [f"exit 0 without {name}" for name in sorted(wanted) if after.get(name) != wanted[name]]
    return breaches + [f"{name}: {what}" for name, what in _of_files(scene, wanted, before, after)]


def _of_exit(scene: Scene, ended: Ended) -> list[str]:
    if ended.is_hung:
        return ["it hangs"]
    breaches, lines = [] if ended.code in _ENDED_BY else [f"exit code {ended.code}"], ended.err.splitlines()
    if "Traceback" in ended.err or "Exception ignored" in ended.err:
        breaches.append(f"traceback: {lines[-1]}")
    own = [line for line in lines if not line.startswith("transformers: ")]
    is_told = all(line.startswith("offload: ") and len(line) <= _MOST_CHARS for line in own)
    num_told = range(9) if scene.stdin else (0,) if ended.code == 0 else (1,)  # a conversation goes on behind an error
    if ended.code in (0, 1, 2) and not (is_told and len(own) in num_told):
        breaches.append(f"exit {ended.code} with {len(own)} lines: {ended.err[-300:]!r}")
    return breaches


def _of_text(scene: Scene, wanted: Ended, ended: Ended, is_whole: bool) -> list[str]:
    if scene.is_timed:
        return []
    if is_whole:
        return [] if ended.out == wanted.out else [f"exit 0 with another text: {ended.out!r}"]
    said = ended.out.rstrip("\n\ufffd")
    return [] if wanted.out.startswith(said) else [f"text that never was: {ended.out!r}"]


def _of_files(scene: Scene, wanted: Files, before: Files, after: Files) -> list[tuple[str, str]]:
    """Each file must be what it was, or what it should become; what `stays` may be on its way."""
    breaches = []
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old == new or (scene.stays and name.startswith(scene.stays)) or (scene.is_timed and name in wanted):
            continue
        if new is None:
            breaches.append((name, "it is gone"))
        elif name not in wanted:
            breaches.append((name, f"left behind with {len(new)} bytes"))
        elif new != wanted[name]:
            breaches.append((name, f"half-written, {len(new)} of {len(wanted[name])} bytes"))
    return breaches


def _of_next_run(forge: Forge, scene: Scene, wanted: Files) -> list[str]:
    ended = forge.run(scene.argv, stdin=scene.stdin, visits=scene.visits, port=scene.port)
    if ended.code != 0:
        return [f"the next run ends with {ended.code}: {ended.err[-300:]!r}"]
    is_same = scene.is_timed or scene.goes_on or contents(forge.root) == wanted
    return [] if is_same else ["the next run leaves other files"]
