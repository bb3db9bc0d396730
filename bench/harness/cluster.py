"""Processes of this machine that run one model together: started once, told texts, timed there.

They are started as `offload launch` starts them, but each with its own budget and, if asked for, on
a host of its own.

Invariant: when a cluster is closed, or this process dies, none of its processes runs any more.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from offload.bench.gpu.child import die_with_parent
from offload.bench.harness.gate import Written
from offload.bench.harness.metrics import Burst
from offload.bench.harness.network import Host
from offload.bench.peers.run import environment, last_line
from offload.checkpoint.safetensors import open_checkpoint
from offload.cli.launch import free_port
from offload.distributed.layout import shard_files, share_layers
from offload.errors import UserError
from offload.machine import peak_rss_bytes
from offload.memory.plan import PROMPT_ROWS, MemoryPlan
from offload.memory.planner import ModelFiles, least_budget, plan_memory
from offload.stats import RankFigures
from offload.units import Sampling

_END_S = 15.0
_SPARE_SHARE = 1.05  # shares follow from links that are measured, so they are not quite even
_ANY_PORT_OF_A_HOST = 29_400


class Order(NamedTuple):
    """One text to be written."""

    prompt_ids: list[int]
    num_tokens: int
    tree: str = "none"
    temperature: float = 0.0
    seed: int = 0

    @property
    def sampling(self) -> Sampling:
        """How its tokens are drawn."""
        return Sampling(temperature=self.temperature, seed=self.seed)

    def written(self, new_ids: list[int]) -> Written:
        """The run to be proved; in float32 texts must be the same on any cluster."""
        return Written(self.prompt_ids, new_ids, self.sampling, "match", is_invariant=True)


class Answer(NamedTuple):
    """A text, and what each rank did for it."""

    new_ids: list[int]
    bursts: list[Burst]
    stats: dict[str, Any]
    # of each rank: before, when the first tokens had come, and at the end
    figures: list[list[RankFigures]]

    @classmethod
    def read(cls, line: str) -> "Answer":
        """Return the answer that `rank.tell` has written."""
        ids, bursts, stats, figures = json.loads(line)
        ranks = [[RankFigures(*one) for one in moment] for moment in figures]
        return cls(ids, [Burst(*one) for one in bursts], stats, ranks)


class Cluster:
    """Ranks that wait for orders, which rank 0 hears and answers. Raises `UserError` if they fail.

    Args:
        options: of each rank, as `LoadOptions` names them; more than one are started as ranks.
        hosts: where each is to run; none is on this one.
    """

    def __init__(
        self,
        target: Path,
        draft: Path | None,
        options: Sequence[dict[str, Any]],
        hosts: Sequence[Host] = (),
    ) -> None:
        self._words = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the cluster)
        self._processes = list[subprocess.Popen[str]]()
        common = {**environment(), "WORLD_SIZE": str(len(options)), "OMP_NUM_THREADS": "1"}
        common |= {"MASTER_ADDR": hosts[0].address if hosts else "127.0.0.1"}
        common |= {"MASTER_PORT": str(_ANY_PORT_OF_A_HOST if hosts else free_port())}
        start = partial(
            subprocess.Popen,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        for rank, own in enumerate(options):
            prefix = hosts[rank].prefix if hosts else []
            job = json.dumps([str(target), draft and str(draft), own])
            command = [*prefix, sys.executable, "-m", "offload.bench.harness.rank", job]
            own_place = {"RANK": str(rank)} if len(options) > 1 else {}
            self._processes.append(start(command, env=common | own_place))

    def opened(self) -> dict[str, Any]:
        """The head's plan, once all have loaded."""
        found: dict[str, Any] = json.loads(self._line())
        return found

    def ask(self, order: Order) -> Answer:
        """Have a text written."""
        head = self._processes[0]
        assert head.stdin is not None
        with suppress(BrokenPipeError):
            print(json.dumps(order), file=head.stdin, flush=True)
        return Answer.read(self._line())

    def peak_rss_bytes(self) -> list[int]:
        """Return the peak resident memory of each rank so far."""
        return [peak_rss_bytes(process.pid) for process in self._processes]

    def close(self) -> None:
        """End all ranks, by force where they do not end."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._words.close()

    def _line(self) -> str:
        stdout = self._processes[0].stdout
        assert stdout is not None
        if line := stdout.readline():
            return line
        self._processes[0].wait(_END_S)
        self._words.seek(0)
        raise UserError(f"rank 0 has ended: {last_line(self._words.read())}")


def shard_budgets(
    target: Path, draft: Path | None, num_ranks: int, num_nodes: int, **how: Any
) -> list[int]:
    """Return the least budgets with which each rank streams nearly all of its share."""
    files = ModelFiles(open_checkpoint(target), None if draft is None else open_checkpoint(draft))
    even = share_layers(files.target, [1 / num_ranks] * num_ranks)
    budgets = list[int]()
    for rank in range(num_ranks):
        own = files if num_ranks == 1 else shard_files(files, even, rank)
        least = least_budget(partial(_with_usual_rows, own, num_nodes, how))
        budgets.append(int(_SPARE_SHARE * least))
    return budgets


def _with_usual_rows(
    files: ModelFiles, num_nodes: int, how: Mapping[str, Any], ram: int
) -> MemoryPlan:
    """Return a plan with prompts in passes of the usual size.

    Raises `UserError` where memory asks for smaller ones.
    """
    plan = plan_memory(files, ram=ram, num_nodes=num_nodes, **how)
    if plan.max_prompt_rows < min(PROMPT_ROWS, plan.context):
        raise UserError("a prompt's passes would be smaller")
    return plan
