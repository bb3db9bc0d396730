"""Ranks that are processes of this machine, each forked from one that has imported everything, see `forked.py`.

What a rank does is a function of a file of tests, which comes to it by its standard input; what it reports leaves by
its standard output.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from forked import popen

from offload.cli.launch import free_port
from offload.rank_roles import RankInfo

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as the command line has it


class Ranks:
    """Processes that run `work(place, report, *args)`; what they `report` is found by rank."""

    def __init__(self, num_ranks: int, work: Callable[..., None], *args: Any, absent: tuple[int, ...] = ()) -> None:
        port, pipe = free_port(), subprocess.PIPE
        self.by_rank: dict[int, subprocess.Popen[Any]] = {}
        self._told: dict[Connection, int] = {}
        for rank in range(num_ranks):
            if rank in absent:
                continue
            running = popen([sys.executable, __file__], stdin=pipe, stdout=pipe, env=dict(os.environ))
            assert running.stdin and running.stdout
            asked = Connection(os.dup(running.stdin.fileno()), readable=False)
            asked.send(sys.path)
            asked.send((work, RankInfo(rank, num_ranks, 0, rank, num_ranks, "127.0.0.1", port), args))
            asked.close()
            self._told[Connection(os.dup(running.stdout.fileno()), writable=False)] = rank
            self.by_rank[rank] = running
            running.stdin.close()
            running.stdout.close()

    def reports(self, within_s: float = 60.0) -> dict[int, list[Any]]:
        """Wait for the end of all, and return what each has reported. Kills what does not end in time."""
        reports: dict[int, list[Any]] = {rank: [] for rank in self.by_rank}
        late = []
        for rank, running in self.by_rank.items():
            try:
                running.wait(within_s)
            except subprocess.TimeoutExpired:
                late.append(rank)
        self.kill(*late)
        for channel, rank in self._told.items():
            while channel.poll():
                try:
                    reports[rank].append(channel.recv())
                except EOFError:
                    break
            channel.close()
        assert not late, f"ranks {late} do not end; reported so far: {reports}"
        return reports

    def next_report(self) -> tuple[int, Any]:
        """Return (rank, what) of the first that reports."""
        while True:
            for channel in wait(list(self._told)):
                assert isinstance(channel, Connection)
                try:
                    return self._told[channel], channel.recv()
                except EOFError:  # this one has ended
                    del self._told[channel]
                    channel.close()

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            self.by_rank[rank].kill()
            self.by_rank[rank].wait()


def _main() -> None:
    """Be a rank: do what standard input asks for. What is printed goes where errors go."""
    answers, asked = Connection(os.dup(1), readable=False), Connection(os.dup(0), writable=False)
    os.dup2(2, 1)
    sys.path[:] = asked.recv()
    work, place, args = asked.recv()
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    work(place, answers.send, *args)


if __name__ == "__main__":
    _main()
