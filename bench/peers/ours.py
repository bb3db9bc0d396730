"""Our own decoder as one of the compared programs.

Options: `tree` and `experts` are those of `load`, and so is `ram`, which is what the cap leaves
where it is not given; `lookup` leaves the draft out; `trees` has another tree for each run.
"""

from itertools import takewhile
from time import perf_counter

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
        options = order.options
        self._trees = iter(options.get("trees", ()))
        self._decoder = load(
            order.target,
            None if "lookup" in options else options.get("draft", order.draft),
            ram=options.get("ram") or free_bytes(order) - _MARGIN_BYTES,
            tree=options["tree"],
            experts=options.get("experts", "auto"),
            device="cpu",  # the others have no device either
            context=512,
        )

    def use_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def generate(self, prompt_ids: list[int], num_tokens: int, limit_s: float, emit: Emit) -> None:
        tree = next(self._trees, None)
        run = self._decoder.run(prompt_ids, Sampling(), max_new_tokens=num_tokens, tree=tree)
        num_seen = 0
        stop = perf_counter() + limit_s
        for _ in takewhile(lambda _: perf_counter() < stop, run):
            token_ids = run.result().token_ids
            if len(token_ids) > num_seen:
                emit(token_ids[num_seen:])
            num_seen = len(token_ids)


open_peer = Ours
