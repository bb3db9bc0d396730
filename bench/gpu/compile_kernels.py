"""Compile every kernel at the sizes that later steps ask for, by several processes: the compiler's cache keeps them.

Run beside the gate, which times nothing. What fails here fails again where it is reported.
"""

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context

from offload.calibration.kernel_comparison import Comparison
from offload.calibration.kernel_selection import Shapes, comparisons

_SPARED_CORES, _MOST_WORKERS = 4, 6
_SYNTHETIC = Shapes(  # the packaged pair's heads, as many as make the hidden size of a 70B
    num_heads=384, num_groups=3, width=32, num_nodes=(64, 4096), vocab_sizes=(4096,), num_prefix=(384,),
    caches=((32, Shapes().dtype),),
)  # fmt: skip


def compile_share(index: int, count: int) -> None:
    """Every `count`-th comparison, of which only whether both sides agree is asked."""
    for shapes in (_SYNTHETIC, Shapes()):
        for comparison in islice(comparisons(shapes, "cuda"), index, None, count):
            _try(comparison)


def _try(comparison: Comparison) -> None:
    try:
        comparison.agrees()
    except Exception as error:
        print(f"{comparison.kernel} at {comparison.shape}: {error!r}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    num_workers = min(_MOST_WORKERS, len(os.sched_getaffinity(0)) - _SPARED_CORES)
    if num_workers > 0:
        with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
            list(pool.map(compile_share, range(num_workers), [num_workers] * num_workers))
