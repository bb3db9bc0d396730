"""Our own decoder as one of the compared programs.

Options: `tree` and `experts` are those of `load`, and so is `ram`, which is what the cap leaves
where it is not given; `lookup` leaves the draft out; `trees` has another tree for each run.
"""

from itertools import takewhile
from time import perf_counter
from typing import Any

import torch
import transformers

from offload.bench.peers.child import Emit, Order, free_bytes
from offload.engine.load import load
from offload.sampling_options import Sampling

_MARGIN_BYTES = 96 << 20  # libraries that the first run imports, tables of the kernel


class Ours:
    """A decoder whose budget is what the cap leaves beside the imported libraries."""

    def __init__(self, order: Order) -> None:
        # imported lazily: now, so that it is counted
        _ = torch.__version__, transformers.AutoModelForCausalLM
        ram_bytes = order.options.get("ram") or free_bytes(order) - _MARGIN_BYTES
        how: dict[str, Any] = {"device": "cpu", "context": 512}  # the others have no device either
        how["experts"], self._trees = (
            order.options.get("experts", "auto"),
            iter(order.options.get("trees", ())),
        )
        draft = None if "lookup" in order.options else order.draft
        self._decoder = load(order.target, draft, ram=ram_bytes, tree=order.options["tree"], **how)

    def use_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def generate(self, prompt_ids: list[int], num_tokens: int, limit_s: float, emit: Emit) -> None:
        run = self._decoder.run(
            prompt_ids, Sampling(), max_new_tokens=num_tokens, tree=next(self._trees, None)
        )
        num_seen = 0
        stop = perf_counter() + limit_s
        for _ in takewhile(lambda _: perf_counter() < stop, run):
            token_ids = run.result().token_ids
            if len(token_ids) > num_seen:
                emit(token_ids[num_seen:])
            num_seen = len(token_ids)


def open_peer(order: Order) -> Ours:
    return Ours(order)
