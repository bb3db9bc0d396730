"""The original model in float32, whose draws are right: resident where that fits, else streamed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from offload.checkpoint.hub import open_headers
from offload.engine.build import resident_model
from offload.engine.decoder import Decoder
from offload.engine.load import load
from offload.machine import available_ram_bytes
from offload.model.streamed import StreamedModel
from offload.model.target import BatchEntry
from offload.reports.proof import chain_logits
from offload.sampling_options import Sampling
from offload.trees.token_tree import TokenTree
from offload.trees.topology import chain

# prompt, new ids -> logits (T, V) that predicted each new id
Score = Callable[[Sequence[int], Sequence[int]], Tensor]


@contextmanager
def reference(target: Path, draft: Path | None, ram: int | str | None) -> Iterator[Score]:
    """Return a `Score` of the original model in float32: resident where that fits, else streamed.

    Args:
        target: the model itself, or the small one that an inflated target was made from.
    """
    checkpoint = open_headers(target)
    num_bytes = sum(path.stat().st_size for path in checkpoint.shards)
    # stored in 16 bits it doubles, and some is left
    if draft is None or 3 * num_bytes < available_ram_bytes():
        model = resident_model(checkpoint, "float32")
        try:
            yield lambda prompt_ids, new_ids: _resident_scores(
                model, [*prompt_ids, *new_ids], len(prompt_ids)
            )
        finally:
            model.close()
        return
    with load(
        target, draft, ram, "chain:511", device="cpu", dtype="float32", profile="none"
    ) as decoder:
        yield lambda prompt_ids, new_ids: _streamed_scores(decoder, prompt_ids, new_ids)


def _resident_scores(model: StreamedModel, ids: list[int], start: int) -> Tensor:
    return chain_logits(model, ids)[start - len(ids) - 1 : -1]


def _streamed_scores(decoder: Decoder, prompt_ids: Sequence[int], new_ids: Sequence[int]) -> Tensor:
    ids = [*prompt_ids, *new_ids]
    rows = []
    cache = decoder.begin(ids, Sampling()).caches.target
    for lo in range(len(prompt_ids), len(ids), decoder.plan.num_nodes):
        path_N = torch.tensor(ids[lo - 1 : min(lo - 1 + decoder.plan.num_nodes, len(ids) - 1)])
        entry = BatchEntry.whole(ids[:lo], cache, TokenTree(chain(len(path_N) - 1), path_N))
        rows.append(decoder.target.score([entry])[0].whole())
        decoder.target.commit(range(len(path_N)), lo, cache)
    return torch.cat(rows)
