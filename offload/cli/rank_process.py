"""The command line in a process that is one of many ranks.

Rank 0 owns standard input and output. The others read and write nothing, leave Ctrl-C to rank 0,
and send it the reason why they fail; they print it themselves only if rank 0 does not receive it.
"""

import os
import signal
from collections.abc import Mapping, Sequence

from offload.cli.terminal import print_error
from offload.errors import TOLD, RankError, UserError
from offload.rank_roles import RankInfo, find_place

# the parent process that a rank must have; variables that set flags begin with OFFLOAD_
LAUNCHER = "_OFFLOAD_LAUNCHER"
EXIT_UNSAID = 3  # rank 0's exit code if another rank died, which the launcher explains
# other ranks' exit code if rank 0 was silent too long, which the launcher explains
EXIT_HEAD_SILENT = 4
COMMANDS = ("generate", "chat", "bench decode")
_PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
_MEET_HEAD_S = 5.0
_HEARD_S = 3.0


def takes_ranks(command: Sequence[str]) -> bool:
    """Return True for a command that runs on many ranks."""
    return any(list(command[: len(name.split())]) == name.split() for name in COMMANDS)


def names_ranks(command: Sequence[str]) -> bool:
    """Return True if the command has `--ranks`."""
    return any(word.split("=")[0] == "--ranks" for word in command)


def begin(command: Sequence[str], settings: Mapping[str, object]) -> RankInfo | None:
    """Become a rank, if the command is for many ranks and a launcher started this process.

    `settings` come from the environment and config.toml, by parameter. Raises `UserError`.
    """
    # for a bench, the last argument
    is_told = names_ranks(command) or settings.get("ranks") or os.environ.get("OFFLOAD_RANKS")
    place = find_place() if is_told and takes_ranks(command) else None
    if place is None or "TORCHELASTIC_RUN_ID" not in os.environ:
        return place
    # a lost rank is reported in a line of ours
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _end_with_parent(signal.SIGKILL if place.rank else signal.SIGTERM)
    if place.rank:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
    return place


def leave(place: RankInfo, error: Exception, line: str, code: int) -> int:
    """Return the exit code of a failed rank; print its line if no other process can.

    Rank 0 prints it. The launcher reports a dead rank if it started them all, and a silent rank 0,
    which it will have to kill.
    """
    if place.rank == 0:
        are_all_here = LAUNCHER in os.environ and place.num_on_host == place.num_ranks
        if are_all_here and getattr(error, "is_death", False):
            return EXIT_UNSAID
        print_error(line)
        return code
    if isinstance(error, RankError):
        is_known = error.is_head_silent and LAUNCHER in os.environ and not place.host_index
        if (place.host_index and not error.is_head_told) or (error.is_head_silent and not is_known):
            print_error(f"rank {place.rank}: {line}")
        return 0 if error.is_head_told else EXIT_HEAD_SILENT if is_known else code
    if TOLD not in getattr(error, "__notes__", ()) and not _is_heard(place, line):
        print_error(f"rank {place.rank}: {line}")
    return code


def _is_heard(place: RankInfo, line: str) -> bool:
    """Leave the line where rank 0 looks while it waits for this one; return True if it arrived."""
    from offload.distributed.join import leave_reason

    try:
        return leave_reason(place, line, meet_s=_MEET_HEAD_S, heard_s=_HEARD_S)
    except UserError:  # no rank has that number
        return False


def _end_with_parent(number: int) -> None:
    """Ask for a signal when the launcher ends; send it now if that has happened."""
    import ctypes

    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, number)
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None and os.getppid() != int(launcher):
        os.kill(os.getpid(), signal.SIGKILL)
