"""Processes with limits that run cases: this one has imported everything, and forks one child for each.

A child has limits of address space, processor time, file size and open files, a session of its own, an empty home,
and files for what it prints; this process ends it where it takes too long, and looks at what it left. No threads may
run here when it forks. What a sound case imports is imported here, so that no later case has to.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import resource
import selectors
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from case import SOUND, TRACEBACK, Case, End, Target, end_of
from outside import Outside, links_outside, watch_python


class Limits(NamedTuple):
    wall_s: float = 40.0
    cpu_s: int = 12
    more_bytes: int = 3 << 30  # of address space, beyond what this process has
    resident_bytes: int = 700 << 20  # the same of memory; more is a finding
    file_bytes: int = 64 << 20
    num_files: int = 256  # open at once


class Done(NamedTuple):
    case: Case
    damage: str
    end: End


class Cell:
    """Runs cases, several at a time, below a folder of its own."""

    def __init__(self, scratch: Path, num_jobs: int, limits: Limits = Limits()) -> None:  # noqa: B008
        self._scratch, self._limits = scratch, limits
        self._slots = [_Slot(scratch / f"slot{number}") for number in range(num_jobs)]

    def prepare(self, target: Target) -> Done:
        """Write a target's sound folder, and read it undamaged: any other end than a result is a finding."""
        made = Target(f"{target.name}/make", target.make, {}, target.make, writes=("*",))
        for case in (Case(made, 0, SOUND), Case(target, 0, SOUND)):
            done = next(iter(list(self._run_all([case]))))
            if done.end.kind != "result":
                return done._replace(end=End("unsound", f"{done.end.kind}: {done.end.line}", done.end.detail))
            self._slots[-1].import_what_it_did()
            if case.target is made:
                self._slots[-1].keep(self._sound(target))
        return done

    def run(self, cases: Iterable[Case]) -> Iterator[Done]:
        """In the order in which they end. The targets must have been prepared."""
        gc.collect()
        gc.freeze()  # a collector that marks what lies here would copy all of it into each child
        return self._run_all(cases)

    def close(self) -> None:
        for slot in self._slots:
            slot.outside.close()

    def _run_all(self, cases: Iterable[Case]) -> Iterator[Done]:
        waiting, free = iter(cases), list(self._slots)
        with selectors.DefaultSelector() as selector:
            while True:
                while free and (case := next(waiting, None)) is not None:
                    slot = free.pop()
                    slot.start(case, self._sound(case.target), self._limits)
                    selector.register(slot.pidfd, selectors.EVENT_READ, slot)
                if len(free) == len(self._slots):
                    return
                for slot in self._ended(selector):
                    selector.unregister(slot.pidfd)
                    free.append(slot)
                    yield slot.finish(self._limits)

    def _ended(self, selector: selectors.BaseSelector) -> list["_Slot"]:
        """Wait for some to end, and end what has had its time."""
        ended = [key.data for key, _ in selector.select(0.2)]
        for key in selector.get_map().values():
            if time.monotonic() > key.data.deadline_s:
                key.data.kill()
        return ended

    def _sound(self, target: Target) -> Path:
        return self._scratch / "sound" / target.name.replace("/", "-")


class _Slot:
    """Where one case at a time runs."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._root, self.outside = folder, Outside(folder / "outside")
        self._folder, self._home = folder / "case", folder / "home"
        self._said = {name: folder / name for name in ("stdout", "stderr", "end.json")}

    def start(self, case: Case, sound: Path, limits: Limits) -> None:
        """Damage a copy of the sound folder, and fork who reads it."""
        for old in (self._folder, self._home):
            _remove(old)
        self._home.mkdir()
        shutil.copytree(sound, self._folder) if sound.exists() else self._folder.mkdir()
        self.case, self.damage = case, case.damage(self._folder)
        self._before, self._is_killed = _listing(self._folder, case.target.writes), False
        self._linked = links_outside(self._folder)
        self.outside.seen()
        for path in self._said.values():
            path.write_text("")
        self.deadline_s = time.monotonic() + limits.wall_s
        self._resident_bytes = _resident_bytes()
        self.pid = os.fork()
        if self.pid == 0:
            self._be_child(limits)
        self.pidfd = os.pidfd_open(self.pid)

    def kill(self) -> None:
        self._is_killed = True
        os.kill(self.pid, signal.SIGKILL)

    def finish(self, limits: Limits) -> Done:
        """How the ended child did."""
        _, status, used = os.wait4(self.pid, 0)
        os.close(self.pidfd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        more_bytes = used.ru_maxrss * 1024 - self._resident_bytes
        end = self._end(status)
        if not end.is_finding and more_bytes > limits.resident_bytes:
            end = End("memory", f"{more_bytes >> 20} MiB more than at its start", end.line)
        return Done(self.case, self.damage, end if end.is_finding else self._left(end))

    def keep(self, sound: Path) -> None:
        """A copy of the folder of the case that has ended."""
        shutil.copytree(self._folder, sound, symlinks=True)

    def import_what_it_did(self) -> None:
        """So that the next child finds it here."""
        for name in json.loads(self._said["end.json"].read_text())["modules"]:
            with contextlib.suppress(Exception):  # of libraries that look for others which are not there
                importlib.import_module(name)

    def _end(self, status: int) -> End:
        printed = self._said["stderr"].read_text(errors="replace")[-6000:]
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if self._is_killed or number == signal.SIGXCPU:
            return End("hang", "it took too long", printed)
        if number:
            return End("crash", signal.Signals(number).name, printed)
        try:
            end = End(*json.loads(self._said["end.json"].read_text())["end"])
        except ValueError:
            return End("crash", f"exit {os.WEXITSTATUS(status)}, and not a word", printed)
        return end if end.is_finding or TRACEBACK not in printed else End("exception", "a traceback", printed)

    def _left(self, end: End) -> End:
        """A finding in place of an end that may be, where something was read or changed that may not."""
        read, changed = self.outside.seen()
        if changed or not read <= self._linked:
            return End("outside", f"canaries read {sorted(read)}, changed {sorted(changed)}", end.line)
        if self._before != _listing(self._folder, self.case.target.writes):
            return End("changed", "its folder is not as it was", end.line)
        return end

    def _be_child(self, limits: Limits) -> None:
        """Never returns."""
        try:
            os.setsid()
            self._redirect()
            self._limit(limits)
            os.environ.update(
                {name: str(self._home) for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TMPDIR")}
            )
            os.chdir(self._home)
            before = set(sys.modules)
            strange = watch_python((self._folder, self._home, *self._said.values()))
            end = end_of(self.case.target.run, self._folder, lambda: _traceback(self._said["stderr"]))
            if strange and not end.is_finding:
                end = End("outside", "; ".join(sorted(set(strange)))[:600], end.line)
            modules = [name for name in sys.modules if name not in before]
            self._said["end.json"].write_text(json.dumps({"end": end, "modules": modules}))
        finally:
            os._exit(0)

    def _redirect(self) -> None:
        for number, path in enumerate((Path(os.devnull), self._said["stdout"], self._said["stderr"])):
            os.dup2(os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND), number)

    def _limit(self, limits: Limits) -> None:
        faulthandler.enable(file=2)
        faulthandler.dump_traceback_later(min(limits.wall_s, limits.cpu_s) * 0.8, exit=False, file=2)
        with open("/proc/self/statm") as file:
            address_bytes = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        for kind, most in (
            (resource.RLIMIT_AS, address_bytes + limits.more_bytes),
            (resource.RLIMIT_CPU, limits.cpu_s),
            (resource.RLIMIT_FSIZE, limits.file_bytes),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NOFILE, limits.num_files),
        ):
            resource.setrlimit(kind, (most, most))


def _traceback(stderr: Path) -> str:
    """That of the exception at hand, or what was printed where there is none."""
    return traceback.format_exc()[-6000:] if sys.exc_info()[0] else stderr.read_text(errors="replace")[-2000:]


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _listing(folder: Path, ignored: tuple[str, ...]) -> dict[str, tuple[int, int, int]]:
    """What would show that something below a folder was changed."""
    results = dict[str, tuple[int, int, int]]()
    for path in folder.rglob("*"):
        if not any(path.match(pattern) for pattern in ignored):
            status = path.lstat()
            results[str(path)] = (status.st_mode, status.st_ino, 0 if path.is_dir() else status.st_mtime_ns)
    return results


def _remove(folder: Path) -> None:
    """Whatever a damage has made of its permissions."""
    if folder.exists():
        for path in [folder, *folder.rglob("*")]:
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(folder)
