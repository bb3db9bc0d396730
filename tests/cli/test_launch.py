"""Many ranks started by one command: one text, one exit code, one reason, and no process left behind.

Processes cost seconds each, so every start asks several things; what needs none is asked of functions.
"""

import os
import signal
import time
from pathlib import Path

import pytest
from launched import FATAL_WORD
from reciting import PROMPT as SAYING
from reciting import SAID, settings
from refusals import assert_refused
from shell import ROOT, Outcome, run_python, shell, start

from offload.cli import launch
from offload.errors import UserError

SCRIPT = (str(Path(__file__).with_name("launched.py")),)
PROMPT = "costs $$5 ${local_rank}"
GENERATE = ("generate", "-m", ROOT / "offload" / "demo_pair" / "target", "-p", PROMPT)
LAUNCH = ("launch", "-n", 2, "--", *GENERATE)
WORDS = "".join(f"word{number} " for number in range(FATAL_WORD))
END_S = 30.0  # for what must end within seconds, on a machine that has other things to do


class Started:
    """A command of many ranks under way; lines `pid RANK PID` are taken out of what it says."""

    def __init__(self, *arguments: object, misfortune: str = "", python: tuple[str, ...] = SCRIPT) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("MISFORTUNE", misfortune)
            self.process = start(*arguments, python=python, is_cold=True)
        self.pids: dict[int, int] = {}

    def join(self, num_ranks: int = 2) -> "Started":
        """Wait until the ranks have found each other."""
        assert self.process.stderr is not None
        while len(self.pids) < num_ranks:
            line = self.process.stderr.readline().decode()
            assert line, "ended before"
            if line.startswith("pid "):
                _, rank, pid = line.split()
                self.pids[int(rank)] = int(pid)
        return self

    def end(self) -> Outcome:
        out, err = self.process.communicate(timeout=300)
        return Outcome(self.process.returncode, out.decode(), err.decode())

    def wait_for_ranks(self, within_s: float = END_S) -> list[int]:
        """Ranks that have not ended in time; they are killed."""
        due_s = time.monotonic() + within_s
        while (alive := [rank for rank, pid in self.pids.items() if _is_alive(pid)]) and time.monotonic() < due_s:
            time.sleep(0.1)
        for rank in alive:
            os.kill(self.pids[rank], signal.SIGKILL)
        return alive


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("misfortune", "line"),
    [
        ("kill:1", "rank 1 was killed (signal 9)"),
        pytest.param("stop:0", "rank 0 has been silent for too long", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_is_killed_or_stops_ends_the_run_with_its_text_and_a_reason(misfortune: str, line: str) -> None:
    started = Started(*LAUNCH, "--ranks", "shards", misfortune=misfortune).join()
    code, out, err = started.end()
    assert code == 1 and err.splitlines() == [f"offload: {line}"]
    assert misfortune != "kill:1" or (out.startswith(WORDS) and out.endswith(f"{PROMPT}\n"))
    assert started.wait_for_ranks() == []


@pytest.mark.full
def test_ctrl_c_ends_the_run_with_its_text() -> None:
    started = Started(*LAUNCH, misfortune="nothing:").join()  # --ranks shards goes without saying
    assert started.process.stdout is not None
    head = started.process.stdout.read(4)
    began_s = time.monotonic()
    started.process.send_signal(signal.SIGINT)
    code, out, err = started.end()
    text = head.decode() + out
    assert code == 130 and text.startswith("word0 ") and text.endswith(f"{PROMPT}\n")
    assert err == "offload: interrupted\n" and time.monotonic() - began_s < END_S
    assert started.wait_for_ranks() == []


@pytest.mark.full
def test_nobody_outlives_a_launcher_that_is_killed() -> None:
    started = Started(*LAUNCH, misfortune="nothing:").join()
    assert started.process.stdout is not None and started.process.stdout.read(4)  # the text has begun
    started.process.kill()
    assert started.wait_for_ranks() == []
    _, out, _ = started.end()
    assert out.endswith(f"{PROMPT}\n"), "rank 0 has told its text to the end"


@pytest.mark.full
def test_torchrun_itself_does_as_well() -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(launch.free_port()))
    started = Started(*GENERATE, "--ranks", "shards", "--ram", "1GiB,2GiB", python=(*torchrun, *SCRIPT))
    code, out, _ = started.end()
    assert code == 0 and out == f"{WORDS}{PROMPT.replace('$$', '$')}\n".replace("${local_rank}", "0")


@pytest.mark.parametrize("misfortune", ["refuse-early:1", "refuse:1"])
def test_what_one_rank_refuses_is_said_once(misfortune: str) -> None:
    started = Started(*LAUNCH, misfortune=misfortune)
    if misfortune == "refuse:1":
        started.join()
    code, out, err = started.end()
    assert code == 2 and "Traceback" not in err
    [line] = [line for line in err.splitlines() if not line.startswith(("pid", "importing"))]
    assert line == "offload: rank 1: --ram 1 is too small here: give more"
    assert out == "" or out.endswith("\n")


@pytest.mark.full
def test_what_all_ranks_refuse_is_said_once() -> None:
    assert_refused(Started(*LAUNCH, "--temp", "-1").end(), "--temp must be 0 or more, got -1.0")


def test_a_job_that_has_ranks_of_its_own_changes_nothing(ender: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `--ranks` no process asks for others, and each reads the prompt that it is given."""
    assert_refused(shell("generate", "-m", ender, "-p", "x", "--ram", "1GiB,2GiB"), "--ram", "'1GiB,2GiB'")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert shell("generate", *settings(ender), "-p", SAYING, "--quiet") == Outcome(0, SAID + "\n", "")
    assert_refused(shell("generate", "-m", ender, "-p", "x", "--ram", "1GiB,2GiB"), "--ram", "'1GiB,2GiB'")
    monkeypatch.setenv("MASTER_PORT", "many")
    assert shell("--help").code == shell("plan", "-m", ender, "--ram", "1GiB", "--device", "cpu").code == 0
    assert_refused(shell(*GENERATE, "--ranks", "shards"), "MASTER_PORT must be a whole number")
    monkeypatch.setenv("OFFLOAD_RANKS", "shards")
    assert_refused(shell(*GENERATE), "MASTER_PORT must be a whole number")


def test_a_host_finds_itself_by_name_or_address(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ("launch", "-n", "2", "--hosts", "127.0.0.1,127.0.0.2", "chat")
    assert_refused(shell(*hosts), "must name this host once", "--host-index 0 to 1")
    monkeypatch.setattr(launch.socket, "gethostname", lambda: "alpha")
    monkeypatch.setattr(launch.socket, "getfqdn", lambda: "alpha.lan")
    for hosts, index in [("alpha,192.0.2.7", 0), ("192.0.2.7,ALPHA.lan", 1), ("192.0.2.7,127.0.0.1", 1)]:
        plan = launch.plan_launch(4, hosts, None, None, ["chat"])
        assert (plan.host_index, plan.num_here, plan.port, plan.address) == (index, 2, 29500, hosts.split(",")[0])
    assert launch.plan_launch(2, "192.0.2.7,192.0.2.8", 1, 1234, ["chat"]).host_index == 1
    with pytest.raises(UserError, match="must name this host once, which is alpha, got 192"):
        launch.plan_launch(2, "192.0.2.7,192.0.2.8", None, None, ["chat"])


KILLED, SILENT = "rank {} was killed (signal {})", ["rank 0 has been silent for too long"]


@pytest.mark.parametrize(
    ("exit_codes", "code", "lines"),
    [
        ({1: -9, 0: launch.EXIT_UNSAID}, 1, [KILLED.format(1, 9)]),
        ({2: -9, 1: 1, 0: 143}, 1, [KILLED.format(2, 9)]),
        ({2: -15, 0: launch.EXIT_UNSAID, 1: -15}, 1, [KILLED.format(2, 15)]),
        ({2: 7, 0: launch.EXIT_UNSAID, 1: 1}, 1, ["rank 2 is gone (exit code 7)"]),
        ({0: 1, 1: -9}, 1, []),
        ({0: 2, 1: -15}, 2, []),
        ({0: 130}, 130, []),
        ({0: -9, 1: 1}, 1, [KILLED.format(0, 9)]),
        ({2: -15, 1: -11}, 1, [KILLED.format(1, 11)]),
        ({3: 2}, 2, []),
        ({0: 143, 1: 1}, 1, []),
        ({1: launch.EXIT_HEAD_SILENT, 0: -9}, 1, SILENT),
        ({2: launch.EXIT_HEAD_SILENT, 1: 0, 0: 143}, 1, SILENT),
        ({1: launch.EXIT_HEAD_SILENT, 0: 2}, 2, []),  # it has come back, and said why it ends
    ],
)
def test_exit_codes_of_ranks_become_one(exit_codes: dict[int, int], code: int, lines: list[str]) -> None:
    assert launch.verdict(exit_codes, has_head=0 in exit_codes) == (code, lines)
    assert launch.verdict({**exit_codes, 0: 1}, is_interrupted=True) == (130, [])
    assert launch.verdict({2: 1, 1: -9}) == (0, []), "what happens after the end of rank 0"


def test_no_torch_before_ranks_are_started() -> None:
    run_python("-c", "import sys, offload.cli.main, offload.planning.load_options; sys.exit('torch' in sys.modules)")
