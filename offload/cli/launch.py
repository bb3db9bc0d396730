"""Many ranks of one command on this host, by torchrun's own launcher, which is called in this process.

Standard streams are the ranks' own; the launcher only starts them, hands on Ctrl-C, and makes one
exit code of theirs. Invariant: no rank outlives the launcher, however it ends.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, NamedTuple

import typer

from offload.cli.app import app
from offload.cli.console import Console
from offload.cli.flags import ask_for_silence, grouped
from offload.cli.rank_process import (
    COMMANDS,
    EXIT_HEAD_SILENT,
    EXIT_UNSAID,
    LAUNCHER,
    names_ranks,
    takes_ranks,
)
from offload.cli.terminal import print_error
from offload.errors import UserError, reason, require
from offload.options import OutputOptions
from offload.rank_roles import cards_of, require_no_launcher
from offload.units import plural

_MEET_S = 120
_HOST_REQUIREMENT = "--hosts must name this host once"
# there the second ends the program in order; elsewhere two are enough
_KILLING_PRESSES = {"chat": 3}
_PRESSES_WITHIN_S = 10.0
_COMMAND_HELP = "generate, chat or bench decode, with their flags"
_RANKS_HELP = "number of ranks on all hosts together; see docs/ranks.md"
_HOSTS_HELP = "hosts, on each of which the same command is started; rank 0 is on the first"
_INDEX_HELP = "which of the hosts this is; default: found by its name"
_PORT_HELP = "port at which hosts meet; default: 29500, or any on one host"


@app.command(
    cls=grouped({}),
    context_settings={"allow_interspersed_args": False},
    epilog="""Examples:

    offload launch -n 2 -- generate -m big -p "Once upon a time" --ranks shards

    offload launch -n 4 -- chat -m big -d small --ranks stages:0-2,draft:3

    offload launch -n 2 --hosts alpha,beta -- generate -m big -p Hello""",
)
def launch(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help=_COMMAND_HELP)],
    num_ranks: Annotated[int, typer.Option("-n", metavar="N", min=1, help=_RANKS_HELP)],
    hosts: Annotated[str | None, typer.Option(metavar="A,B", help=_HOSTS_HELP)] = None,
    host_index: Annotated[int | None, typer.Option(metavar="I", min=0, help=_INDEX_HELP)] = None,
    port: Annotated[
        int | None, typer.Option(metavar="PORT", min=1, max=65535, help=_PORT_HELP)
    ] = None,
) -> None:
    """Run a command on many ranks, by torchrun's launcher; rank 0 reads and writes here."""
    code, lines = run_ranks(plan_launch(num_ranks, hosts, host_index, port, command))
    for line in lines:
        print_error(line)
    raise typer.Exit(code)


def _value_of(flag: str, command: Sequence[str]) -> str | None:
    """Return the last value of a flag in a command line; None without the flag."""
    words = zip(command, [*command[1:], ""], strict=True)
    given = [
        behind if word == flag else word.partition("=")[2]
        for word, behind in words
        if word.split("=")[0] == flag
    ]
    return given[-1] if given else None


class Launch(NamedTuple):
    """What to start here."""

    num_here: int
    hosts: list[str]
    host_index: int
    port: int
    command: list[str]

    @property
    def address(self) -> str:
        return self.hosts[0]


def plan_launch(
    num_ranks: int, hosts: str | None, host_index: int | None, port: int | None, command: list[str]
) -> Launch:
    """Return the launch that the flags ask for. Raises `UserError`."""
    requirement = f"offload launch starts one of {', '.join(COMMANDS)}"
    named = command[: 1 + (command[0] == "bench")]
    require(
        takes_ranks(command), requirement, " ".join(named), "offload launch -n 2 -- generate ..."
    )
    device = _value_of("--device", command)
    if device is not None and cards_of(device):
        require_no_launcher(device, "offload launch")
    if hosts is None:
        requirement = "--host-index is a place in --hosts"
        require(host_index is None, requirement, host_index, "give --hosts, or leave it out")
        return Launch(num_ranks, ["127.0.0.1"], 0, port or free_port(), command)
    names = hosts.split(",")
    num_hosts = len(names)
    requirement = "--hosts must be names or addresses, with commas between them"
    require(all(names), requirement, hosts, "such as alpha,beta")
    requirement = f"-n must be a multiple of {num_hosts}, the number of hosts"
    require(num_ranks % num_hosts == 0, requirement, num_ranks, f"try {num_hosts}")
    if host_index is None:
        host_index = _find_host(names)
    requirement = f"--host-index must be less than {num_hosts}"
    require(host_index < num_hosts, requirement, host_index, "the first is 0")
    return Launch(num_ranks // num_hosts, names, host_index, port or 29500, command)


def run_ranks(plan: Launch) -> tuple[int, list[str]]:
    """Start the ranks and wait; return an exit code, and lines for ranks that printed none."""
    # what torchrun would log stands in the code and lines that are returned
    import logging

    logging.disable(logging.CRITICAL)
    os.environ.update({LAUNCHER: str(os.getpid()), "TORCH_ELASTIC_WORKER_IDENTICAL": "1"})
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not names_ranks(plan.command):
        os.environ.setdefault("OFFLOAD_RANKS", "shards")
    presses = _Presses(_KILLING_PRESSES.get(plan.command[0], 2))
    signal.signal(signal.SIGINT, presses.hear)
    with _announced(plan):
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=len(plan.hosts),
        max_nodes=len(plan.hosts),
        nproc_per_node=plan.num_here,
        run_id="offload",
        rdzv_backend="static",
        rdzv_endpoint=f"{plan.address}:{plan.port}",
        max_restarts=0,
        local_addr=plan.address,
        rdzv_configs={"rank": plan.host_index, "timeout": _MEET_S},
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    # as the interpreter was told to run this program
    is_module = os.path.basename(sys.argv[0]) == "__main__.py"
    program = ["-m", "offload"] if is_module else [sys.argv[0]]
    words = [word.replace("$", "$$") for word in plan.command]
    try:
        elastic_launch(config, sys.executable)(*program, *words)
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        exit_codes = {rank: failure.exitcode for rank, failure in failures}
        return verdict(exit_codes, has_head=plan.host_index == 0, is_interrupted=presses.has_killed)
    except SignalException as error:
        return 128 + error.sigval, []
    except (RuntimeError, OSError, TimeoutError) as error:
        requirement = f"all hosts must meet at {plan.address}:{plan.port} within {_MEET_S} s"
        remedy = "start the command on every host; the port must be free on the first, and open to the others"
        raise UserError(f"{requirement}, got {reason(error).rstrip('.')}: {remedy}") from None
    return 0, []


@contextmanager
def _announced(plan: Launch) -> Iterator[None]:
    """Show a line until ranks do: torch's launcher is slow, and hosts wait for others."""
    with Console(OutputOptions(quiet=ask_for_silence(plan.command))) as console:
        console.wait(f"starting {plural(plan.num_here, 'rank')}")
        yield
        console.clear()
        if len(plan.hosts) > 1:
            meeting = f"{plan.address}:{plan.port}, for {_MEET_S} s at most"
            place = f"this is host {plan.host_index} of {len(plan.hosts)}, from 0 on"
            console.say(f"{place}; hosts meet at {meeting}")


def verdict(
    exit_codes: Mapping[int, int], *, has_head: bool = True, is_interrupted: bool = False
) -> tuple[int, list[str]]:
    """Return the exit code and lines of ranks that failed: rank 0's own code is the command's.

    Args:
        exit_codes: by rank, of those that did not end with 0, the first to fail first; a signal's
            is negative.
        has_head: whether rank 0 is among these; if it ended well, others have no more to lose.
    """
    if is_interrupted:
        return 128 + signal.SIGINT, []
    if has_head and 0 not in exit_codes:
        return 0, []
    code_here = exit_codes.get(0, 0)
    silent = (EXIT_UNSAID, EXIT_HEAD_SILENT, 128 + signal.SIGTERM)
    if EXIT_HEAD_SILENT in exit_codes.values() and (code_here < 0 or code_here in silent):
        return 1, ["rank 0 has been silent for too long"]
    in_order = sorted(exit_codes.items())
    killed = [rank for rank, code in in_order if code < 0 and -code != signal.SIGTERM]
    if code_here == EXIT_UNSAID:
        killed = killed or [rank for rank in exit_codes if rank][:1]
    elif code_here > 0 and code_here not in silent:
        killed = []  # it has said why, and ranks that were slow to end were killed
    lines = list[str]()
    for rank in killed:
        code = exit_codes[rank]
        ending = f"was killed (signal {-code})" if code < 0 else f"is gone (exit code {code})"
        lines.append(f"rank {rank} {ending}")
    failed = [code for _, code in in_order if code > 0 and code not in silent]
    return failed[0] if failed and code_here != EXIT_UNSAID else 1, lines


class _Presses:
    """Counts Ctrl-C: the first is passed to the ranks, a few more in a row kill them."""

    def __init__(self, num_killing: int) -> None:
        self._num_killing = num_killing
        self._times_s = list[float]()
        self.has_killed = False

    def hear(self, number: int, _: FrameType | None) -> None:
        now_s = time.monotonic()
        self._times_s = [
            pressed_s for pressed_s in self._times_s if now_s - pressed_s < _PRESSES_WITHIN_S
        ] + [now_s]
        self.has_killed |= len(self._times_s) >= self._num_killing
        for child in _children():
            if self.has_killed:
                os.kill(child, signal.SIGKILL)
            elif os.getpgid(child) != os.getpgrp():  # those of this group have it from the terminal
                os.kill(child, number)


def _children() -> Iterator[int]:
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                yield int(status.parent.name)


def _find_host(names: Sequence[str]) -> int:
    """Return which of these this host is. Raises `UserError` where that is not certain."""
    here = [index for index, name in enumerate(names) if _is_here(name)]
    host_name = socket.gethostname()
    places = f"0 to {len(names) - 1}"
    remedy = f"name it as others reach it, or say which it is with --host-index {places}"
    require(len(here) == 1, f"{_HOST_REQUIREMENT}, which is {host_name}", ",".join(names), remedy)
    return here[0]


def _is_here(name: str) -> bool:
    """Return True if that is what this host calls itself, or an address of its own."""
    if name.lower() in (socket.gethostname().lower(), socket.getfqdn().lower()):
        return True
    try:
        family, kind, _, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def free_port() -> int:
    """Return a port that is not listened at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
