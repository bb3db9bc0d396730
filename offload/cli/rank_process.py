"""What the command line does otherwise in a process that is one of many ranks.

Rank 0 owns standard input and output. The others read and write nothing, leave Ctrl-C to rank 0,
and tell it why they fail; only where it does not hear that, they print the line themselves.
"""

import os
import signal
from collections.abc import Mapping, Sequence

from offload.cli.terminal import print_error
from offload.errors import TOLD, RankError, UserError
from offload.rank_roles import RankInfo, find_place

# the process that the ranks' parent must be; variables that set flags begin with OFFLOAD_
LAUNCHER = "_OFFLOAD_LAUNCHER"
EXIT_UNSAID = 3  # of rank 0: another rank has died, and the launcher says how
# of others: they have not heard of rank 0 for too long, and the launcher says so
EXIT_HEAD_SILENT = 4
COMMANDS = ("generate", "chat", "bench decode")
_PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
_MEET_HEAD_S = 5.0
_HEARD_S = 3.0


def takes_ranks(command: Sequence[str]) -> bool:
    """Return True if it is a command that runs on many ranks."""
    return any(list(command[: len(name.split())]) == name.split() for name in COMMANDS)


def names_ranks(command: Sequence[str]) -> bool:
    """Return True if the command says which rank does what."""
    return any(word.split("=")[0] == "--ranks" for word in command)


def begin(command: Sequence[str], settings: Mapping[str, object]) -> RankInfo | None:
    """Take this process's place, if the command is for many ranks and a launcher started it.

    `own` is what is set for it elsewhere, by parameter. Raises `UserError`.
    """
    # of benches the last
    is_told = names_ranks(command) or settings.get("ranks") or os.environ.get("OFFLOAD_RANKS")
    place = find_place() if is_told and takes_ranks(command) else None
    if place is None or "TORCHELASTIC_RUN_ID" not in os.environ:
        return place
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what is lost is said in a line of ours
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
    """Return the exit code of a rank that has failed, and print its line if no other can.

    That is rank 0, and of the death of a rank the launcher, if all ranks are its own. Of the
    silence of rank 0 it is the launcher beside it, which will have to kill it.
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
    """Leave the line where rank 0 looks while it waits for this one; return whether it heard."""
    from offload.distributed.join import leave_reason

    try:
        return leave_reason(place, line, meet_s=_MEET_HEAD_S, heard_s=_HEARD_S)
    except UserError:  # no rank is there
        return False


def _end_with_parent(number: int) -> None:
    """Have a signal sent here when the launcher ends, or now if it has ended already."""
    import ctypes

    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, number)
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None and os.getppid() != int(launcher):
        os.kill(os.getpid(), signal.SIGKILL)
