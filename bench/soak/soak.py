"""Hours: a server with clients and a process that opens and closes models, every text proved.

A quarter of all texts is broken off. Now and then everything stops, both processes are looked at,
and it goes on.

Invariant: texts are proved at the end, so that the proof's memory and time are in no figure; a text
that was broken off must be the beginning of the right one.
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

import typer

from offload.bench.harness.command import Bench, command, say_link, say_table
from offload.bench.harness.gate import Written
from offload.bench.harness.picture import draw_hours, require_pictures
from offload.bench.harness.promises import WrongTokenError
from offload.bench.harness.record import Guard, Row, writable
from offload.bench.harness.setting import Setting, find_setting
from offload.bench.peers.run import environment
from offload.bench.soak.clients import Answer, Clients
from offload.bench.soak.library import Order
from offload.bench.soak.watch import Sample, drift, growth, look, speed_kept, speeds
from offload.bench.soak.wishes import CONTEXT, Wish, wishes, with_template
from offload.checkpoint.hub import open_headers
from offload.errors import RunError
from offload.memory.planner import ModelFiles, least_budget, plan_memory

NUM_CLIENTS = 5
PARALLEL = 3
QUEUE = 3
_LOOKS = 120
_LEAST_LOOKS = 4
_LEAST_PERIOD_S = 5.0
_START_S = 300.0
_END_S = 60.0
# nodes of all trees of a pass
_MOST_NODES = 96
SERVER = "server"
LIBRARY = "library"
HEAD = [
    "process",
    "looks",
    "memory",
    "drift",
    "descriptors",
    "threads",
    "files",
    "tokens/s",
    "kept",
]


class Told(NamedTuple):
    """A text that one of the processes has written."""

    wish: int
    new_ids: list[int]
    rule: str
    is_invariant: bool


class Server:
    """`offload serve` with its clients."""

    def __init__(
        self, setting: Setting, model: Path, table: Sequence[Wish], seed: int, folder: Path
    ) -> None:
        port = _free_port()
        self.temporary = _made(folder / "server-tmp")
        what = [
            "serve",
            "-m",
            model,
            "-d",
            setting.draft,
            "--ram",
            setting.ram_bytes,
            "--context",
            CONTEXT,
        ]
        what += ["--parallel", PARALLEL, "--queue", QUEUE, "--port", port, "--profile", "none"]
        self.log = (folder / "server.log").open("w")
        self.process = _start(
            ["offload", *map(str, what)], self.temporary, stdout=self.log, stderr=self.log
        )
        self._port = port
        _wait_until(lambda: self._get("/health"), self.process, folder)
        self.clients = Clients(port, table, NUM_CLIENTS, seed)

    def look(self, time_s: float) -> Sample:
        self.clients.pause()
        while _figure(self._get("/metrics"), "requests_active"):  # of those who have left
            time.sleep(0.05)
        return look(
            self.process.pid,
            self.temporary,
            time_s,
            int(_figure(self._get("/metrics"), "tokens_total")),
        )

    def close(self) -> int:
        """End the server; return its exit status."""
        self.clients.close()
        self.process.terminate()
        try:
            return self.process.wait(_END_S)
        finally:
            self.process.kill()
            self.log.close()

    def _get(self, path: str) -> str:
        with urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=_END_S) as response:
            return str(response.read().decode())


class Library:
    """The process that opens and closes models."""

    def __init__(self, order: Order, folder: Path) -> None:
        self.temporary = _made(folder / "library-tmp")
        self.texts = list[Told]()
        self.log = (folder / "library.log").open("w")
        what = ["offload.bench.soak.library", json.dumps(order)]
        self.process = _start(
            what, self.temporary, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log
        )
        self._folder = folder

    def look(self, time_s: float) -> Sample:
        """Sample the process at the end of its round, which is waited for."""
        self._finish_round()
        return look(
            self.process.pid, self.temporary, time_s, sum(len(text.new_ids) for text in self.texts)
        )

    def go(self) -> None:
        self._pipe(self.process.stdin).write("\n")
        self._pipe(self.process.stdin).flush()

    def close(self) -> int:
        self._pipe(self.process.stdin).close()
        try:
            return self.process.wait(_END_S)
        finally:
            self.process.kill()
            self._pipe(self.process.stdout).close()
            self.log.close()

    def _finish_round(self) -> None:
        for line in self._pipe(self.process.stdout):
            row = json.loads(line)
            if "round" in row:
                return
            self.texts.append(Told(row["wish"], row["new_ids"], row["rule"], row["is_invariant"]))
        raise RunError(f"the library's process has ended: {_tail(self._folder, LIBRARY)}")

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


class Soaked(NamedTuple):
    """The samples and texts of a soak."""

    # by process
    samples: dict[str, list[Sample]]
    texts: list[Told]
    answers: list[Answer]
    errors: list[str]
    num_refused: int


def soak(
    setting: Setting, model: Path, seconds: float, seed: int, folder: Path, bench: Bench
) -> Soaked:
    """Run both for so long. Raises `RunError` where one ends before."""
    table = wishes()
    period_s = max(_LEAST_PERIOD_S, seconds / _LOOKS)
    order = Order(str(model), str(setting.draft), [setting.ram_bytes, 3 * setting.ram_bytes], seed)
    samples = dict[str, list[Sample]]({SERVER: [], LIBRARY: []})
    with _both(setting, model, table, seed, folder, order) as (server, library):
        started = time.monotonic()
        while (passed_s := time.monotonic() - started) < seconds or len(
            samples[SERVER]
        ) < _LEAST_LOOKS:
            server.clients.go()
            time.sleep(min(period_s, max(0.0, seconds - passed_s)))
            for name, one in ((SERVER, server), (LIBRARY, library)):
                samples[name].append(one.look(time.monotonic() - started))
                bench.row({"process": name, **samples[name][-1]._asdict()})
            library.go()
            bench.screen.wait(
                f"{passed_s / 60:.0f} of {seconds / 60:.0f} minutes, {len(library.texts)} texts"
            )
        statuses = {SERVER: server.close(), LIBRARY: library.close()}
    ends = [
        f"{name} ended with {code}: {_tail(folder, name)}"
        for name, code in statuses.items()
        if code
    ]
    errors = [*server.clients.errors, *ends]
    return Soaked(
        samples, library.texts, server.clients.answers, errors, server.clients.num_refused
    )


@contextmanager
def _both(
    setting: Setting, model: Path, table: Sequence[Wish], seed: int, folder: Path, order: Order
) -> Iterator[tuple[Server, Library]]:
    library = Library(order, folder)
    try:
        server = Server(setting, model, table, seed, folder)
        try:
            yield server, library
        finally:
            server.clients.close()
            server.process.kill()
    finally:
        library.process.kill()


def prove(bench: Bench, setting: Setting, model: Path, soaked: Soaked) -> Any:
    """Prove every token of both. Raises `WrongTokenError` and `UserError`."""
    table = wishes()
    with setting._replace(target=model).open("none", context=CONTEXT) as decoder:
        ids = [wish.ids(decoder) for wish in table]
        asked = {answer.wish for answer in soaked.answers}
        right = {
            number: decoder.generate(
                ids[number],
                temperature=wish.sampling.temperature,
                seed=wish.sampling.seed,
                max_new_tokens=wish.num_new,
            )
            for number, wish in enumerate(table)
            if number in asked
        }
    for answer in soaked.answers:
        require_right(answer, right[answer.wish].text)
    told = [
        Told(number, one.token_ids, one.rule, one.is_invariant) for number, one in right.items()
    ]
    texts = {repr(one): one for one in (*told, *soaked.texts)}.values()
    written = [
        Written(ids[one.wish], one.new_ids, table[one.wish].sampling, one.rule, one.is_invariant)
        for one in texts
    ]
    return bench.prove(setting, written)


def require_right(answer: Answer, right: str) -> None:
    """Raise `WrongTokenError` for a wrong text; one that was left may lack its end."""
    is_right = answer.text == right if answer.is_whole else right.startswith(answer.text)
    if not is_right:
        raise WrongTokenError(
            f"text {answer.wish} of the server is wrong: {answer.text!r:.80} instead of {right!r:.80}"
        )


Hours = Annotated[float, typer.Option(metavar="H", min=0.001, help="for how long")]
Size = Annotated[str, typer.Option(metavar="SIZE", help="of the target that is streamed")]
Seed = Annotated[int, typer.Option(metavar="N", help="of what is asked, and how")]
Picture = Annotated[
    Path | None, typer.Option(metavar="FILE", help="both processes over time", callback=writable)
]


@command("soak", "quick", examples=["offload bench soak --hours 2 --picture hours.png"])
def main(
    bench: Bench, hours: Hours = 2.0, size: Size = "200MB", seed: Seed = 0, picture: Picture = None
) -> None:
    """Does anything drift in hours of texts, chats, cancelled runs and clients?"""
    if picture is not None:
        require_pictures()
    setting = find_setting(None, None, size, None, bench.screen)
    setting = setting._replace(ram_bytes=_least_ram(setting))
    seconds = 180.0 if bench.quick else 3600 * hours
    ceiling = say_link(setting)
    with tempfile.TemporaryDirectory(prefix="offload-soak-") as name:
        model = with_template(setting.target, Path(name) / setting.target.name)
        with bench.screen:
            soaked = soak(setting, model, seconds, seed, Path(name), bench)
        if soaked.errors:
            raise RunError(f"{len(soaked.errors)} failures, the first: {soaked.errors[0]}")
        proof = prove(bench, setting, model, soaked)
    rows = [_row(process, samples) for process, samples in soaked.samples.items()]
    say_table(HEAD, map(_cells, rows))
    print(_count(soaked))
    settings = {**setting.as_dict(), "seconds": seconds, "seed": seed}
    if picture is not None:
        draw_hours(soaked.samples, settings, picture)
    bench.finish(
        rows, settings=settings, ceiling={"bytes_per_s": ceiling}, guards=_guards(rows), proof=proof
    )


def _row(process: str, samples: Sequence[Sample]) -> Row:
    last = samples[-1]
    return {
        "process": process,
        "num_looks": len(samples),
        "rss_bytes": last.rss_bytes,
        "drift": drift(samples),
        **{f"more_{name.removeprefix('num_')}": more for name, more in growth(samples).items()},
        "tokens_per_s": sum(speeds(samples)) / max(1, len(samples) - 1),
        "speed_kept": speed_kept(samples),
    }


def _cells(row: Row) -> list[str]:
    counts = [f"{row[name]:+d}" for name in ("more_descriptors", "more_threads", "more_files")]
    memory = [f"{row['rss_bytes'] / 2**20:.0f} MiB", f"{100 * row['drift']:+.2f} %"]
    speed = [f"{row['tokens_per_s']:.2f}", f"{row['speed_kept']:.3f}"]
    return [row["process"], str(row["num_looks"]), *memory, *counts, *speed]


def _count(soaked: Soaked) -> str:
    num_whole = sum(answer.is_whole for answer in soaked.answers)
    answers = f"{num_whole} whole answers, {len(soaked.answers) - num_whole} left, {soaked.num_refused} refused"
    return f"{len(soaked.texts)} texts of the library; of the server {answers}"


def _guards(rows: Sequence[Row]) -> dict[str, Guard]:
    found = {f"{row['process']}: speed kept": Guard([row["speed_kept"]], "higher") for row in rows}
    return found | {f"{row['process']}: memory": Guard([1 + row["drift"]], "lower") for row in rows}


def _least_ram(setting: Setting) -> int:
    """Return the least budget for the largest of what is opened, so that nearly all is streamed."""
    assert setting.draft is not None
    files = ModelFiles(open_headers(setting.target), open_headers(setting.draft))
    plan = partial(
        plan_memory, files, dtype="auto", context=CONTEXT, num_nodes=_MOST_NODES, parallel=PARALLEL
    )
    return least_budget(lambda size: plan(ram=size))


def _start(what: Sequence[str], temporary: Path, **pipes: Any) -> subprocess.Popen[str]:
    env = {**environment(), "TMPDIR": str(temporary), "XDG_CACHE_HOME": str(temporary / "cache")}
    return subprocess.Popen([sys.executable, "-m", *what], env=env, text=True, **pipes)


def _tail(folder: Path, process: str) -> str:
    """Return the end of a process's standard error."""
    return " ".join((folder / f"{process}.log").read_text(errors="replace").split())[-300:]


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _wait_until(holds: Any, process: subprocess.Popen[str], folder: Path) -> None:
    limit_s = time.monotonic() + _START_S
    while True:
        try:
            holds()
            return
        except (OSError, URLError):
            if process.poll() is not None or time.monotonic() > limit_s:
                raise RunError(f"the server has ended: {_tail(folder, SERVER)}") from None
            time.sleep(0.2)


def _figure(metrics: str, name: str) -> float:
    return next(
        float(line.split()[1])
        for line in metrics.splitlines()
        if line.startswith(f"offload_{name} ")
    )
