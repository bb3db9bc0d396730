"""Processes of this machine that run one model together: started once, told texts, timed there.

They are started as `offload launch` starts them, but each with its own budget. As a program this
file is one of them. Invariant: when a cluster is closed, or this process dies, none of its
processes runs any more.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from offload.bench.harness.gate import Written
from offload.bench.harness.metrics import Burst, followed
from offload.bench.harness.process import Talker, free_port
from offload.bench.harness.setting import Setting, least_ram
from offload.distributed.sharding import shard_files, share_layers
from offload.engine.decoder import Decoder
from offload.engine.load import open_decoder
from offload.machine import peak_rss_bytes, rss_bytes
from offload.memory.sizes import PROMPT_ROWS
from offload.planning.load_options import LoadOptions
from offload.sampling_options import Sampling
from offload.stats import RankFigures

_SPARE_SHARE = 1.05  # shares follow from links that are measured, so they are not quite even


class Order(NamedTuple):
    prompt_ids: list[int]
    num_tokens: int
    tree: str = "none"
    temperature: float = 0.0
    seed: int = 0

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, seed=self.seed)


class Answer(NamedTuple):
    order: Order
    new_ids: list[int]
    bursts: list[Burst]
    stats: dict[str, Any]
    # of each rank: before, when the first tokens had come, and at the end
    figures: list[list[RankFigures]]

    @property
    def written(self) -> Written:
        """The run to be proved; in float32 texts must be the same on any cluster."""
        order = self.order
        return Written(order.prompt_ids, self.new_ids, order.sampling, is_invariant=True)

    @property
    def pass_s(self) -> list[float]:
        """Seconds from burst to burst, drafting included; without the prompt's own pass."""
        return [after.time_s - before.time_s for before, after in pairwise(self.bursts)]

    def moved(self, read: Callable[[RankFigures], float]) -> list[float]:
        """Return the bytes that each rank moved in one pass behind the prompt's."""
        _, first, last = self.figures
        return [
            (read(end) - read(begun)) / max(1, end.num_passes - begun.num_passes)
            for begun, end in zip(first, last, strict=True)
        ]


class Cluster:
    """Ranks that wait for orders, which rank 0 hears and answers.

    Args:
        options: of each rank, as `LoadOptions` names them; more than one are started as ranks.
    """

    def __init__(self, setting: Setting, options: Sequence[dict[str, Any]]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the cluster)
        common = {
            "WORLD_SIZE": str(len(options)),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        self._ranks = list[Talker]()
        for rank, rank_options in enumerate(options):
            draft = setting.draft and str(setting.draft)
            job = json.dumps([str(setting.target), draft, rank_options])
            place = {"RANK": str(rank)} if len(options) > 1 else {}
            words = ["offload.bench.harness.cluster", job]
            self._ranks.append(Talker(words, self._log, common | place))

    def wait(self) -> None:
        """Return once all have loaded. Raises `RunError`."""
        self._ranks[0].hear()

    def ask(self, order: Order) -> Answer:
        """Have a text written. Raises `RunError` where a rank has failed."""
        self._ranks[0].tell(order)
        ids, bursts, stats, figures = self._ranks[0].hear()
        ranks = [[RankFigures(*figure) for figure in moment] for moment in figures]
        return Answer(order, ids, [Burst(*burst) for burst in bursts], stats, ranks)

    def peak_rss_bytes(self) -> list[int]:
        return [peak_rss_bytes(rank.process.pid) for rank in self._ranks]

    def close(self) -> None:
        for rank in self._ranks:
            rank.end_input()
        for rank in self._ranks:
            rank.close()
        self._log.close()


def shard_budgets(setting: Setting, num_ranks: int, num_nodes: int, **budget: Any) -> list[int]:
    """Return the least budgets with which each rank streams most of its share, in usual passes."""
    files = setting.files
    even = share_layers(files.target, [1 / num_ranks] * num_ranks)
    budgets = list[int]()
    for rank in range(num_ranks):
        least = least_ram(
            files if num_ranks == 1 else shard_files(files, even, rank),
            num_nodes,
            lambda plan: plan.max_prompt_rows >= min(PROMPT_ROWS, plan.context),
            **budget,
        )
        budgets.append(int(_SPARE_SHARE * least))
    return budgets


def _run_rank(target: str, draft: str | None, options: dict[str, Any]) -> None:
    """Load, and write a text for each order; any rank but the first follows it to the end."""
    own_bytes = rss_bytes()
    figures = list[list[RankFigures]]()

    def on_burst(number: int) -> None:
        if number == 1:
            figures.append(_figures(decoder, own_bytes, 0))

    with open_decoder(LoadOptions(target, draft, **options)) as decoder:
        print(json.dumps("loaded"), flush=True)
        for line in sys.stdin:
            order = Order(*json.loads(line))
            text_options: Any = {"max_new_tokens": order.num_tokens, "tree": order.tree}
            figures[:] = [_figures(decoder, own_bytes, 0)]
            run = decoder.run(order.prompt_ids, order.sampling, **text_options)
            bursts, result = followed(run, on_burst)
            figures.append(_figures(decoder, own_bytes, result.stats.num_sweeps))
            answer = (result.token_ids, bursts, result.stats.as_dict(), figures)
            print(json.dumps(answer), flush=True)


def _figures(decoder: Decoder, own_bytes: int, num_passes: int) -> list[RankFigures]:
    """Return the figures of all ranks, or of a single process its passes since the first tokens."""
    if figures := decoder.target.figures():
        return figures
    plan = decoder.plan
    # nothing where the target lies on other ranks
    moved = decoder.target.moved
    counts = (num_passes, 0, plan.streamed_bytes, moved.num_bytes, moved.stall_s)
    return [RankFigures(plan.ram_bytes, own_bytes, peak_rss_bytes(), *counts, 0, {}, 0.0)]


if __name__ == "__main__":
    _run_rank(*json.loads(sys.argv[1]))
