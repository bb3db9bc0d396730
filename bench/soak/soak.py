"""Hours: a server with clients, every text proved.

A quarter of all answers is left. Now and then everything stops and the server is looked at: nothing
is under way then, so that all that is there is kept. Texts are proved at the end, so that the
proof's memory and time are in no figure.
"""

import os
import tempfile
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple
from urllib.request import urlopen

from offload.bench.harness.command import Bench, Findings, command, flag
from offload.bench.harness.gate import Written
from offload.bench.harness.process import free_port, start
from offload.bench.harness.setting import Setting, least_ram
from offload.bench.harness.tables import Column, Guard, Row, WrongTokenError
from offload.bench.soak.clients import CONTEXT, Answer, Clients, wishes, with_template
from offload.engine.scheduler import in_order
from offload.errors import RunError
from offload.machine import rss_bytes
from offload.units import parse_size

# share of a soak in which caches fill, and libraries are imported when they are first needed
_WARM_UP = 1 / 6

PARALLEL = 3
QUEUE = 3
_LOOKS = 120
_LEAST_LOOKS = 4
_LEAST_PERIOD_S = 5.0
_START_S = 300.0
_END_S = 60.0
# nodes of all trees of a pass
_MOST_NODES = 96
_PROMPT_CACHE = "8MiB"
SERVER = "server"


class Sample(NamedTuple):
    time_s: float
    rss_bytes: int
    num_descriptors: int
    num_threads: int
    # files in the folder for temporary ones
    num_files: int
    # processor time that it has used so far
    cpu_s: float
    # tokens that it has written so far
    num_tokens: int


def look(process: int, temporary: Path, time_s: float, num_tokens: int) -> Sample:
    folder = Path(f"/proc/{process}")
    user, system = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    return Sample(
        time_s,
        rss_bytes(process),
        len(os.listdir(folder / "fd")),
        len(os.listdir(folder / "task")),
        sum(1 for _ in temporary.rglob("*")),
        (int(user) + int(system)) / os.sysconf("SC_CLK_TCK"),
        num_tokens,
    )


def row_of(process: str, samples: Sequence[Sample]) -> Row:
    first = samples[0]
    last = samples[-1]
    head = {"process": process, "num_looks": len(samples), "rss_bytes": last.rss_bytes}
    rate = (last.num_tokens - first.num_tokens) / max(1e-9, last.time_s - first.time_s)
    counts = growth(samples)
    speed = {"tokens_per_s": rate, "speed_kept": speed_kept(samples)}
    return {**head, "drift": drift(samples), **counts, **speed}


def settled(samples: Sequence[Sample]) -> Sequence[Sample]:
    start_s = samples[0].time_s + _WARM_UP * (samples[-1].time_s - samples[0].time_s)
    return [sample for sample in samples if sample.time_s >= start_s]


def drift(samples: Sequence[Sample]) -> float:
    """Return memory's growth behind the warm-up by the median slope: no single look moves it."""
    kept = settled(samples)
    slopes = [
        (later.rss_bytes - earlier.rss_bytes) / (later.time_s - earlier.time_s)
        for earlier, later in combinations(kept, 2)
        if later.time_s > earlier.time_s
    ]
    middle = median(sample.rss_bytes for sample in kept)
    return median(slopes) * (kept[-1].time_s - kept[0].time_s) / middle if slopes else 0.0


def growth(samples: Sequence[Sample]) -> dict[str, int]:
    """Return by how much constant counts have grown from the first half behind the warm-up on."""
    kept = settled(samples)
    half = max(1, len(kept) // 2)
    growths = {}
    for name in ("descriptors", "threads", "files"):
        counts = [getattr(sample, f"num_{name}") for sample in kept]
        growths[f"more_{name}"] = max(counts[half:], default=0) - max(counts[:half])
    return growths


def speed_kept(samples: Sequence[Sample]) -> float:
    """Return tokens per CPU second in the second half over those in the first; neighbours
    change the time on the clock far more.
    """
    kept = settled(samples)
    half = len(kept) // 2

    def speed(first: Sample, last: Sample) -> float:
        return max(1, last.num_tokens - first.num_tokens) / max(1e-9, last.cpu_s - first.cpu_s)

    return speed(kept[half], kept[-1]) / speed(kept[0], kept[half])


class Server:
    def __init__(self, setting: Setting, model: Path, seed: int, folder: Path) -> None:
        self.temporary = folder / "server-tmp"
        self.temporary.mkdir()
        cache = str(self.temporary / "cache")
        self._place = {"TMPDIR": str(self.temporary), "XDG_CACHE_HOME": cache}
        self._port = free_port()
        self._log = folder / "server.log"
        words = (
            f"--ram {setting.ram_bytes} --context {CONTEXT} --profile none --parallel {PARALLEL}"
        )
        words += f" --queue {QUEUE} --port {self._port}"
        kept = ["--prompt-cache", str(folder / "prompts"), "--prompt-cache-ram", _PROMPT_CACHE]
        models = ["-m", str(model), "-d", str(setting.draft)]
        self._command = ["offload", "serve", *models, *words.split(), *kept]
        self._start()
        self.clients = Clients(self._port, wishes(), seed)

    def restart(self, *, is_killed: bool) -> str:
        """End the server, by SIGKILL or as usual, and start another; return the failure, if any."""
        if is_killed:
            self.process.kill()
            self.process.wait(_END_S)
        failed = "" if is_killed else self.close()
        self._start()
        return failed

    def _start(self) -> None:
        with self._log.open("w") as log:
            self.process = start(self._command, self._place, stdout=log, stderr=log)
        give_up_s = time.monotonic() + _START_S
        while not self._is_up():
            if self.process.poll() is not None or time.monotonic() > give_up_s:
                self.process.kill()
                raise RunError(f"the server has ended: {self._said()}")
            time.sleep(0.2)

    def _is_up(self) -> bool:
        try:
            return bool(self._get("/health"))
        # `URLError` is one, too
        except OSError:
            return False

    def look(self, time_s: float) -> Sample:
        while self._figure("requests_active"):  # of those who have left
            time.sleep(0.05)
        num_tokens = int(self._figure("tokens_total"))
        return look(self.process.pid, self.temporary, time_s, num_tokens)

    def close(self) -> str:
        """End the server; return why it has failed, if it has."""
        self.process.terminate()
        try:
            status = self.process.wait(_END_S)
        finally:
            self.process.kill()
        return f"server ended with {status}: {self._said()}" if status else ""

    def _get(self, path: str) -> str:
        with urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=_END_S) as response:
            return str(response.read().decode())

    def _figure(self, name: str) -> float:
        lines = self._get("/metrics").splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"offload_{name} "))

    def _said(self) -> str:
        return " ".join(self._log.read_text(errors="replace").split())[-300:]


class SoakSettings(NamedTuple):
    """How a soak goes: its length, what its chances are drawn by, and restarts of the server."""

    seconds: float
    seed: int
    restarts: int


def soak(
    bench: Bench, setting: Setting, model: Path, settings: SoakSettings, folder: Path
) -> tuple[dict[str, list[Sample]], Clients]:
    """Run the server to the end; return looks at it, and at each behind a restart.

    Raises `RunError` where one fails.
    """
    seconds, seed, restarts = settings
    period_s = max(_LEAST_PERIOD_S, seconds / _LOOKS)
    life = SERVER
    samples: dict[str, list[Sample]] = {life: []}
    failures = list[str]()
    server = Server(setting, model, seed, folder)
    try:
        started = time.monotonic()
        passed_s = 0.0
        while passed_s < seconds or len(samples[life]) < _LEAST_LOOKS:
            num_lives = len(samples)
            if num_lives <= restarts and passed_s > seconds * num_lives / (restarts + 1):
                failures.append(server.restart(is_killed=num_lives % 2 == 1))
                life = f"{SERVER} {num_lives + 1}"
                samples[life] = []
            server.clients.ask_for(min(period_s, seconds - passed_s))
            samples[life].append(server.look(time.monotonic() - started))
            bench.row({"process": life, **samples[life][-1]._asdict()})
            passed_s = time.monotonic() - started
            minutes = f"{passed_s / 60:.0f} of {seconds / 60:.0f} minutes"
            bench.screen.wait(f"{minutes}, {len(server.clients.answers)} answers")
    finally:
        failures.append(server.close())
    if errors := [*server.clients.errors, *filter(None, failures)]:
        raise RunError(f"{len(errors)} failures, the first: {errors[0]}")
    return samples, server.clients


def texts_of(setting: Setting, model: Path, answers: Sequence[Answer]) -> list[Written]:
    """Return all texts to be proved. Raises `WrongTokenError` for one of the server."""
    table = wishes()
    numbers = sorted({answer.wish for answer in answers})
    with setting._replace(target=model).open("none", context=CONTEXT) as decoder:
        ids = [table[number].ids(decoder) for number in numbers]
        results = in_order(decoder, [table[number].request(decoder) for number in numbers])
    right = dict(zip(numbers, results, strict=True))
    for answer in answers:
        require_right(answer, right[answer.wish].text)
    return [
        Written.from_result(text_ids, result) for text_ids, result in zip(ids, results, strict=True)
    ]


def require_right(answer: Answer, right: str) -> None:
    """Raise `WrongTokenError` for a wrong text; one that was left may lack its end."""
    is_right = answer.text == right if answer.is_whole else right.startswith(answer.text)
    if not is_right:
        complaint = f"text {answer.wish} of the server is wrong"
        raise WrongTokenError(f"{complaint}: {answer.text!r:.80} instead of {right!r:.80}")


COLUMNS = (
    Column("process", "process"),
    Column("looks", "num_looks"),
    Column("MiB", "rss_bytes", ".0f", 2**20),
    Column("drift", "drift", "+.2%"),
    Column("descriptors", "more_descriptors", "+d"),
    Column("threads", "more_threads", "+d"),
    Column("files", "more_files", "+d"),
    Column("tokens/s", "tokens_per_s", ".2f"),
    Column("kept", "speed_kept", ".3f"),
)


@command("soak", "quick", examples=["offload bench soak --hours 2"])
def main(
    bench: Bench,
    hours: Annotated[float, flag("H", "for how long", min=0.001)] = 2.0,
    size: Annotated[str, flag("SIZE", "of the target that is streamed")] = "200MB",
    seed: Annotated[int, flag("N", "of what is asked, and how")] = 0,
    restarts: Annotated[int, flag("N", "of the server, by SIGKILL and as usual", min=0)] = 2,
) -> Findings:
    """Does anything drift in hours of clients, cancelled answers and restarts?"""
    setting = bench.setting(size=size)
    # for the largest of what is opened, so that nearly all is streamed
    ram_bytes = least_ram(setting.files, _MOST_NODES, context=CONTEXT, parallel=PARALLEL)
    setting = setting._replace(
        ram_bytes=ram_bytes + parse_size(_PROMPT_CACHE, "--prompt-cache-ram")
    )
    seconds = bench.effort(3600 * hours, 180.0)
    bench.begin(setting, seconds=seconds, seed=seed)
    with tempfile.TemporaryDirectory(prefix="offload-soak-") as name, bench.screen:
        model = with_template(setting.target, Path(name) / setting.target.name)
        samples, clients = soak(
            bench, setting, model, SoakSettings(seconds, seed, restarts), Path(name)
        )
        written = texts_of(setting, model, clients.answers)
    rows = [row_of(process, process_samples) for process, process_samples in samples.items()]
    guards = dict[str, Guard]()
    for row in rows:
        guards[f"{row['process']}: speed kept"] = Guard([row["speed_kept"]], "higher")
        guards[f"{row['process']}: memory"] = Guard([1 + row["drift"]], "lower")
    whole = sum(answer.is_whole for answer in clients.answers)
    answers = f"{whole} whole answers, {len(clients.answers) - whole} left"
    return Findings(
        rows=rows,
        tables=[(COLUMNS, rows)],
        written=written,
        notes=[f"{answers}, {clients.num_refused} refused"],
        guards=guards,
    )
