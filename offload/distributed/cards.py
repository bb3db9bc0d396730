"""Several cards of one machine: the process that loads is rank 0, and starts one more for each other card.

They meet at a port that is listened at before any is started, so no other program takes it. What a
process is to load comes over its standard input, which stays open: its end is the end of rank 0,
whatever ended that. Ctrl-C and SIGTERM are for rank 0 alone, which ends the others in order.

Invariant: no process outlives rank 0, and one that ends before ranks have met is told of at once.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from offload.distributed.join import leave_death, leave_reason
from offload.errors import TOLD, RunError, UserError, reason
from offload.planning.load_options import LoadOptions
from offload.rank_roles import RankInfo, placed

_HERE = "127.0.0.1"
_END_S = 5.0  # for a process to end by itself, once rank 0 has told it to
_MEET_S = 10.0
_HEARD_S = 3.0
_STORE_LIMIT = timedelta(seconds=10)
# What is said of ranks in the environment is of the process that started this one. The folder that
# one is in is not searched for modules.
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_PROGRAM = (
    "import sys; sys.path[:] = {!r}; from offload.distributed.cards import serve_card; serve_card()"
)


@contextmanager
def started_cards(options: LoadOptions) -> Iterator[RankInfo]:
    """Start the other cards' processes; give the place of this one. They end with the body."""
    num_ranks = len(options.cards)
    # kept meanwhile: rank 0 meets the others at this same one
    store = dist.TCPStore(_HERE, 0, None, True, _STORE_LIMIT, False, multi_tenant=True)
    places = [
        RankInfo(rank, num_ranks, 0, rank, num_ranks, _HERE, store.port)
        for rank in range(num_ranks)
    ]
    processes = list[subprocess.Popen[bytes]]()
    is_over = threading.Event()
    try:
        for place in places[1:]:
            processes.append(_start(options, place))
            watch = (processes[-1], place, is_over)
            threading.Thread(target=_watch, args=watch, name="offload-card", daemon=True).start()
        yield places[0]
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        is_over.set()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
            process.wait()
            assert process.stdin is not None, "it is a pipe"
            process.stdin.close()


def _start(options: LoadOptions, place: RankInfo) -> "subprocess.Popen[bytes]":
    """Start the process of one card, which reads its place and options from a pipe."""
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    environment |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM.format(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment,
    )
    assert process.stdin is not None, "it is a pipe"
    with suppress(BrokenPipeError):  # it has ended, which is told by its watch
        process.stdin.write(_orders(options, place))
        process.stdin.flush()
    return process


def _orders(options: LoadOptions, place: RankInfo) -> bytes:
    """Return the line that a process reads: its place, and options that LoadOptions makes of it."""
    given = {field.name: getattr(options, field.name) for field in fields(options)}
    # as it is free now: what the first processes take is not taken off again
    given["ram"] = int(options.machine_ram_bytes)
    return json.dumps({"place": place, "options": given}, default=str).encode() + b"\n"


def _watch(process: "subprocess.Popen[bytes]", place: RankInfo, is_over: threading.Event) -> None:
    """Tell rank 0, while it waits for the process, that it has ended."""
    code = process.wait()
    if not is_over.is_set() and code:
        with suppress(UserError, RuntimeError):  # rank 0 has ended as well
            leave_death(
                place, f"was killed (signal {-code})" if code < 0 else f"is gone (exit code {code})"
            )


def serve_card() -> None:
    """Run as one card's process: load the options from standard input, serve until rank 0 ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # without a buffer, whose lock a thread would hold at the interpreter's end
    with open(0, "rb", buffering=0, closefd=False) as given:
        asked = json.loads(given.readline())
    threading.Thread(target=_end_with_head, name="offload-head", daemon=True).start()
    place = RankInfo(*asked["place"])
    sys.exit(_serve(place, asked["options"]))


def _serve(place: RankInfo, given: dict[str, Any]) -> int:
    """Serve to the end; return an exit code. An error is reported to rank 0."""
    from offload.engine.load import open_decoder, warned

    notes = list[str]()
    try:
        with placed(place), warned(notes):
            open_decoder(LoadOptions(**given))
    except SystemExit as ended:
        return int(ended.code or 0)
    except Exception as error:
        # the transport has reported failures after loading
        if TOLD not in getattr(error, "__notes__", ()) and not isinstance(error, RunError):
            with suppress(UserError):
                leave_reason(place, reason(error), meet_s=_MEET_S, heard_s=_HEARD_S)
        if isinstance(error, UserError | RunError):
            return 1
        raise
    return 0


def _end_with_head() -> None:
    """End at once where standard input does, which rank 0 holds open as long as it lives."""
    while os.read(0, 1):
        pass
    os._exit(1)
