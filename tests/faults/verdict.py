"""What is promised of a command that fails: exit code, one line, the text so far, no half-written file, a next run."""

import json
import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from faults.forge import Ended, Forge
from faults.scenes import Scene

_ENDED_BY = {0, 1, 2, *(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))}
_MOST_CHARS = 620
_SUMS = "cache/offload/weights"  # of weights: what cannot keep one reads all bytes again the next time
Files = dict[str, bytes]


class Reference(NamedTuple):
    ended: Ended
    files: Files


class Circumstances(NamedTuple):
    """What there was before, and what the test has done beside the fault itself.

    Attributes:
        changed: files that it has damaged.
        is_reader_gone: what is printed is not read, so that an early end is no failure.
    """

    before: Files
    changed: tuple[str, ...] = ()
    is_reader_gone: bool = False

    def unchanged(self, files: Files) -> Files:
        """Without those that the test has damaged."""
        return {name: data for name, data in files.items() if name not in self.changed}


class Verdict(NamedTuple):
    end: str
    breaches: list[str]


def contents(root: Path) -> Files:
    """All files below, by name; folders are empty ones.

    A kept sum is called what it says: its name tells times and places of files, which every copy has of its own.
    """
    result = Files()
    for path in sorted(root.rglob("*")):
        name, data = str(path.relative_to(root)), path.read_bytes() if path.is_file() else b""
        is_sum = path.parent == root / _SUMS and re.fullmatch(r"\d+-[0-9a-f]+", path.name)
        result[f"{_SUMS}/{data.decode(errors='replace')}" if is_sum else name] = data
    return result


def judged(forge: Forge, scene: Scene, references: Sequence[Reference], around: Circumstances, ended: Ended) -> Verdict:
    """Whether one of the references allows that end; the next run is tried where files are not what they were."""
    after, before = around.unchanged(contents(forge.root)), around.unchanged(around.before)
    items = [reference._replace(files=around.unchanged(reference.files)) for reference in references]
    breaches = min((_breaches(scene, result, around, before, after, ended) for result in items), key=len)
    if after != before and not _are_same(scene, after, items[0].files) and not breaches:
        breaches = _of_next_run(forge, scene, references[0], around)
    end = "survived" if ended.code == 0 else f"exit {ended.code}"
    if not ended.is_struck:
        end = "not struck"
    return Verdict("BREACH" if breaches else end, breaches)


def _breaches(
    scene: Scene, reference: Reference, around: Circumstances, before: Files, after: Files, ended: Ended
) -> list[str]:
    is_whole, wanted = ended.code == 0 and not around.is_reader_gone, reference.files
    breaches = [*_of_exit(scene, ended), *_of_text(scene, reference.ended, ended, is_whole)]
    breaches += _of_replies(reference.ended.replies, ended.replies, is_whole)
    if is_whole:
        missing = [name for name in sorted(wanted) if not _is_same(scene, after, wanted, name)]
        breaches += [f"exit 0 without {name}" for name in missing if name in after or not name.startswith(_SUMS)]
    return breaches + [f"{name}: {breach}" for name, breach in _of_files(scene, wanted, before, after)]


def _of_exit(scene: Scene, ended: Ended) -> list[str]:
    if ended.is_hung:
        return ["it hangs"]
    breaches, lines = [] if ended.code in _ENDED_BY else [f"exit code {ended.code}"], ended.err.splitlines()
    if "Traceback" in ended.err or "Exception ignored" in ended.err:
        breaches.append(f"traceback: {lines[-1]}")
    items = [line for line in lines if not line.startswith("transformers: ")]
    is_told = all(line.startswith("offload: ") and len(line) <= _MOST_CHARS for line in items)
    goes_on = scene.stdin or scene.visits
    num_told = range(9) if goes_on else (0,) if ended.code == 0 else (1,)  # a conversation goes on behind an error
    if ended.code in (0, 1, 2) and not (is_told and len(items) in num_told):
        breaches.append(f"exit {ended.code} with {len(items)} lines: {ended.err[-300:]!r}")
    return breaches


def _of_text(scene: Scene, wanted: Ended, ended: Ended, is_whole: bool) -> list[str]:
    if "--json" in scene.argv:
        return of_ids(wanted, ended, is_whole)
    if scene.is_timed:
        return []
    if is_whole:
        return [] if ended.out == wanted.out else [f"exit 0 with another text: {ended.out!r}"]
    said = ended.out.rstrip("\n\ufffd")
    return [] if wanted.out.startswith(said) else [f"text that never was: {ended.out!r}"]


def of_ids(wanted: Ended, ended: Ended, is_whole: bool) -> list[str]:
    """Return this for tokens, in JSON beside what tells times."""
    try:
        ids, wanted_ids = (json.loads(outcome.out)["token_ids"] for outcome in (ended, wanted))
    except (ValueError, KeyError):
        return [f"exit 0 with {ended.out!r}"] if is_whole else []
    is_right = ids == wanted_ids or (not is_whole and ids == wanted_ids[: len(ids)])
    return [] if is_right else [f"tokens {ids}, not {wanted_ids}"]


def _of_replies(wanted: Sequence[str], replies: Sequence[str], is_whole: bool) -> list[str]:
    """A server answers with the right text, with what is right so far and an error, or breaks off as it ends."""
    breaches = []
    for (text, end), (right, _) in zip(map(_said, replies), map(_said, wanted), strict=False):
        if text != right if end == "whole" else not right.startswith(text):
            breaches.append(f"a reply with another text: {text!r}")
        if end == "cut" and is_whole:
            breaches.append(f"a reply that ends untold after {text!r}")
    return breaches


def _said(reply: str) -> tuple[str, str]:
    """Its text, and whether it is whole, ends with an error, or is cut."""
    head, _, body = reply.partition("\r\n\r\n")
    is_stream = "text/event-stream" in head
    lines = [line[6:] for line in body.splitlines() if line.startswith("data: ")] if is_stream else [body]
    events = []
    with suppress(ValueError):  # of the last, where it is cut; the end of a stream is no JSON
        for line in lines:
            events.append(json.loads(line))
    text = "".join(event["choices"][0]["text"] for event in events if "choices" in event)
    if any("error" in event for event in events):
        return text, "error"
    is_whole = head.startswith("HTTP/1.1 200") and ("[DONE]" in lines if is_stream else bool(events))
    return text, "whole" if is_whole else "cut"


def _of_files(scene: Scene, wanted: Files, before: Files, after: Files) -> list[tuple[str, str]]:
    """Each file must be what it was, or what it should become; what `stays` may be on its way."""
    breaches = []
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old == new or (scene.stays and name.startswith(scene.stays)):
            continue
        if new is None:
            breaches.append((name, "it is gone"))
        elif name not in wanted:
            breaches.append((name, f"left behind with {len(new)} bytes"))
        elif not _is_same(scene, after, wanted, name):
            breaches.append((name, f"half-written, {len(new)} of {len(wanted[name])} bytes"))
    return breaches


def _is_same(scene: Scene, after: Files, wanted: Files, name: str) -> bool:
    """All of what tells times must be there."""
    new, right = after.get(name), wanted.get(name)
    if scene.is_timed and new and right and right.startswith(b"{"):
        with suppress(ValueError):
            return json.loads(new).keys() == json.loads(right).keys()
    return new == right or (new is not None and right is not None and _stampless(new) == _stampless(right))


def _stampless(data: bytes) -> bytes:
    """Without the proof of an identity that tells times and places of files, which every copy has of its own.

    Nor with the checksum of a session, which is over that, too; what else it is over is compared here.
    """
    data = re.sub(rb'(\\*"files\\*": ?\\*")[0-9a-f]{32}', rb"\1", data)
    return re.sub(rb'"crc32": ?"[0-9a-f]+"', b"", data)


def _are_same(scene: Scene, after: Files, wanted: Files) -> bool:
    return all(_is_same(scene, after, wanted, name) for name in {*after, *wanted})


def _of_next_run(forge: Forge, scene: Scene, reference: Reference, around: Circumstances) -> list[str]:
    """Once more, with what was damaged as it was before."""
    for name in around.changed:
        (forge.root / name).unlink(missing_ok=True)
        if name in around.before:
            (forge.root / name).write_bytes(around.before[name])
    ended = forge.run(scene.argv, stdin=scene.stdin, visits=scene.visits, port=scene.port)
    if ended.code != 0:
        return [f"the next run ends with {ended.code}: {ended.err[-300:]!r}"]
    if scene.goes_on:
        return []
    said = [*_of_text(scene, reference.ended, ended, True), *_of_replies(reference.ended.replies, ended.replies, True)]
    is_same = around.changed or _are_same(scene, contents(forge.root), reference.files)
    return [f"the next run: {breach}" for breach in [*said, *([] if is_same else ["it leaves other files"])]]
