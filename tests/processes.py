"""Ranks that are processes of this machine, for tests: torch is imported once, and every rank is forked from there."""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from offload.cli.launch import free_port
from offload.rank_roles import RankInfo

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as the command line has it
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["offload.distributed.join", "offload.engine.load"])


class Ranks:
    """Processes that run `work(place, report, *args)`; what they `report` is found by rank."""

    def __init__(self, num_ranks: int, work: Callable[..., None], *args: Any, absent: tuple[int, ...] = ()) -> None:
        port = free_port()
        self._told = _CONTEXT.SimpleQueue()
        self.by_rank = {
            rank: _CONTEXT.Process(target=_run, args=(work, self._told, place, *args))
            for rank in range(num_ranks)
            if rank not in absent
            for place in [RankInfo(rank, num_ranks, 0, rank, num_ranks, "127.0.0.1", port)]
        }
        for process in self.by_rank.values():
            process.start()

    def reports(self, within_s: float = 60.0) -> dict[int, list[Any]]:
        """Wait for the end of all, and return what each has reported. Kills what does not end in time."""
        reports: dict[int, list[Any]] = {rank: [] for rank in self.by_rank}
        for process in self.by_rank.values():
            process.join(within_s)
        late = [rank for rank, process in self.by_rank.items() if process.is_alive()]
        self.kill(*late)
        while not self._told.empty():
            rank, what = self._told.get()
            reports[rank].append(what)
        assert not late, f"ranks {late} do not end; reported so far: {reports}"
        return reports

    def next_report(self) -> tuple[int, Any]:
        """(rank, what) of whoever reports first."""
        return self._told.get()

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            self.by_rank[rank].kill()
            self.by_rank[rank].join()


def _run(work: Callable[..., None], told: Any, place: RankInfo, *args: Any) -> None:
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    work(place, lambda what: told.put((place.rank, what)), *args)
