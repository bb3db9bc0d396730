"""One command under test: how it ends undisturbed, where its calls come from, and how it ends under a fault."""

import errno
import random
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from faults.calls import CALLS, STOP, Fault
from faults.forge import Ended, Forge, restore
from faults.scenes import Scene
from faults.verdict import Circumstances, Reference, Verdict, contents, judged

_PRINT, _OF_SOCKETS = CALLS.index("print"), {CALLS.index(name) for name in ("socket", "recv", "send")}
_SLOWER = 1.3  # than in a process that has done it before


class Damage(NamedTuple):
    """What happens to a file below the root while the command is stopped."""

    kind: str  # cut, replace, delete or overwrite
    file: str


class Trial:
    """A scene that is run again and again, on files that are as they were each time.

    Attributes:
        sites: by kind of call, the numbers of calls that come from the same place in the program.
    """

    def __init__(self, forge: Forge, scene: Scene, pristine: Path) -> None:
        self._forge, self.scene, self._pristine = forge, scene, pristine
        self._own: dict[str, Any] = {"stdin": scene.stdin, "visits": scene.visits, "port": scene.port}
        self._run(is_rehearsal=True)
        first = self._run(is_recorded=True)
        assert first.code == 0, f"{scene.name} does not run: {first.err}"
        self.sites = forge.sites()
        restore(forge.root, pristine)
        self._before = contents(forge.root)
        self.reference = Reference(self._run(), contents(forge.root))
        self._others: dict[Damage, list[Reference]] = {}

    def numbers(self, fault: Fault, *, every: bool = False) -> list[int]:
        """Calls that the fault could strike: the first, middle and last from each place, or every one."""
        sites = [site for site in self.sites.get(fault.call, []) if site]
        some = (site if every else (site[0], site[len(site) // 2], site[-1]) for site in sites)
        return sorted({number for numbers in some for number in numbers})

    def strike(self, fault: Fault, at: int) -> tuple[Verdict, Ended]:
        is_reader_gone = fault.call in _OF_SOCKETS or (fault.call == _PRINT and fault.value == errno.EPIPE)
        return self._judged(self._run(fault, at), Circumstances(self._before, is_reader_gone=is_reader_gone))

    def damage(self, damage: Damage, at: int, *, is_blind: bool = False) -> tuple[Verdict, Ended]:
        """Stop at a call of any kind, and damage a file meanwhile; who opens it only then may take it as it is."""
        if damage not in self._others:
            self._others[damage] = self._damaged_before(damage)
        ended = self._run(STOP, at, meanwhile=self._meanwhile(damage), is_blind=is_blind)
        changed = (damage.file, str(Path(damage.file).with_name("other")))
        return self._judged(ended, Circumstances(self._before, changed), self._others[damage])

    def limit(self, **limits: int) -> tuple[Verdict, Ended]:
        return self._judged(self._run(limits=limits), Circumstances(self._before))

    def interrupt(self, signals: Sequence[tuple[float, int]]) -> tuple[Verdict, Ended]:
        """Signals to a process of its own; one that came before Python could hear it has ended that alone."""
        restore(self._forge.root, self._pristine)
        ended = self._forge.interrupt(self.scene.argv, signals, **self._own)
        if ended.code in {-number for _, number in signals} and not ended.out + ended.err:
            ended = ended._replace(code=128 - ended.code)
        return self._judged(ended, Circumstances(self._before, is_reader_gone=bool(self.scene.visits)))

    def moments(self, chance: random.Random, count: int) -> list[int]:
        """In ms from the start: the first from all of a run, the others from where everything has been imported."""
        imported_s = max(0.0, self._whole_s - _SLOWER * self.reference.ended.seconds)
        return [round(1000 * chance.uniform(low_s, self._whole_s)) for low_s in (0.0, *[imported_s] * (count - 1))]

    @cached_property
    def _whole_s(self) -> float:
        return self.interrupt(())[1].seconds

    def _judged(self, ended: Ended, around: Circumstances, others: Sequence[Reference] = ()) -> tuple[Verdict, Ended]:
        return judged(self._forge, self.scene, [self.reference, *others], around, ended), ended

    def _damaged_before(self, damage: Damage) -> list[Reference]:
        """How the scene ends where the file was that way from the beginning, if it works at all."""
        ended = self._run(STOP, 1, meanwhile=self._meanwhile(damage))
        return [] if ended.code else [Reference(ended, contents(self._forge.root))]

    def _meanwhile(self, damage: Damage) -> list[object]:
        return [damage.kind, str(self._forge.root / damage.file)]

    def _run(self, fault: Fault | None = None, at: int = 1, **options: object) -> Ended:
        restore(self._forge.root, self._pristine)
        return self._forge.run(self.scene.argv, fault, at, **self._own, **options)  # type: ignore[arg-type]
