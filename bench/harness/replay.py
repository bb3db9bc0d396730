"""How many experts each way of keeping them would have to read for the same passes.

`ours` is the product's own bookkeeping. `recent` drops what was used longest ago. `optimal` knows
the future: it drops what is needed last, or reads past the pool what is needed later still
(Belady), and nothing can miss less. `expected` is the planner's formula: the most popular are kept
for ever, and a pass needs of the others what its rows draw.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from offload.bench.harness.routing import Pass
from offload.streaming.expert_cache import ExpertCache


def ours(passes: Iterable[Pass], num_blocks: int, num_slots: int) -> int:
    """Count misses of `ExpertCache`."""
    cache = ExpertCache(num_blocks, num_slots)
    misses = 0
    for one in passes:
        cache.begin_pass(one.num_rows)
        for blocks, rows in zip(one.blocks, one.rows, strict=True):
            cache.use(blocks, rows)
            misses += serve(cache, blocks.tolist())
    return misses


def serve(cache: ExpertCache, blocks: Sequence[int]) -> int:
    """Serve one layer of a pass; return how many miss.

    Hits are held first, and released where a miss finds no slot.
    """
    hits = list[int]()
    missing = list[int]()
    waiting = list[int]()
    for block in blocks:
        (missing if cache.hold(block) is None else hits).append(block)
    for block in missing:
        while cache.place(block) is None:
            cache.release((waiting or hits).pop(0))
        waiting.append(block)
    for block in (*hits, *waiting):
        cache.release(block)
    return len(missing)


def recent(passes: Iterable[Pass], num_slots: int) -> int:
    """Count misses where the least recently used gives way; a layer's hits precede its misses."""
    kept = OrderedDict[int, None]()
    misses = 0
    for one in passes:
        for blocks in one.blocks:
            missing = [block for block in blocks.tolist() if block not in kept]
            for block in blocks.tolist():
                kept[block] = None
                kept.move_to_end(block)
            while len(kept) > num_slots:
                kept.popitem(last=False)
            misses += len(missing)
    return misses


def optimal(passes: Iterable[Pass], num_slots: int) -> int:
    """Count misses with knowledge of the future. A layer's needs are one moment."""
    moments = [blocks.tolist() for one in passes for blocks in one.blocks]
    coming: defaultdict[int, list[int]] = defaultdict(list)
    for moment in range(len(moments) - 1, -1, -1):
        for block in moments[moment]:
            coming[block].append(moment)
    kept = dict[int, int]()
    misses = 0
    never = len(moments)
    for blocks in moments:
        misses += sum(block not in kept for block in blocks)
        for block in blocks:
            coming[block].pop()
            kept[block] = coming[block][-1] if coming[block] else never
        if len(kept) > num_slots:
            last = sorted(kept, key=kept.__getitem__)[num_slots:]
            for block in last:
                del kept[block]
    return misses


def expected(passes: Sequence[Pass], num_blocks: int, num_slots: int, num_rows: int) -> float:
    """Count misses by popularity alone, which is counted over all passes."""
    uses_B = np.zeros(num_blocks)
    all_rows = 0
    for one in passes:
        all_rows += num_rows
        for blocks, rows in zip(one.blocks, one.rows, strict=True):
            uses_B[blocks] += rows
    needed_B = np.sort(1 - (1 - np.minimum(uses_B / all_rows, 1.0)) ** num_rows)
    return float(needed_B[: max(0, num_blocks - num_slots)].sum()) * len(passes)
