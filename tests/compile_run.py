"""What a run compiles that its comparisons have not, for a GPU that need not be there: the last line is a list in JSON.

    python tests/compile_run.py 86 FOLDER        # compute capability 8.6; FOLDER takes the compiler's cache

Kernels are compiled and not started, so whatever comes out of them means nothing.
"""

import json
import math
import os
import sys
from itertools import product
from typing import Any

os.environ["TRITON_CACHE_DIR"] = sys.argv[2]

import torch
from no_gpu import tell_compiled

from offload.calibration.kernel_selection import Shapes, comparisons
from offload.kernels import tree_attention
from offload.kernels.kv_commit import kv_commit_kernel
from offload.kernels.match_rows import match_rows_kernel
from offload.kernels.tree_attention import Sight, pack_bits, tree_attention_kernel

NUM_HEADS, NUM_GROUPS, WIDTH, NUM_NODES, NUM_SLOTS, NUM_PROCESSORS = 4, 1, 16, 64, 2101, 132
DTYPE = torch.bfloat16
SHAPES = Shapes(
    num_heads=NUM_HEADS, num_groups=NUM_GROUPS, width=WIDTH, num_layers=1, num_slots=64, num_nodes=(NUM_NODES,),
    num_scored=(3,), num_prefix=(600,), vocab_sizes=(4096,), temperatures=(0.7,), level_sizes=(4,), path_lengths=(7,),
    dtype=DTYPE, caches=((WIDTH, DTYPE),),
)  # fmt: skip
compiled: list[str] = []


def tell(done: Any, is_new: bool) -> None:
    if is_new:
        compiled.append(done.metadata.name)


def choose_splits(num_blocks: int, num_keys: int, device: torch.device) -> int:
    """As on a GPU."""
    return max(1, min(2 * NUM_PROCESSORS // num_blocks, math.ceil(num_keys / 256)))


def attend(num_prefix: int, num_rows: int) -> None:
    """A tree with some committed tokens before it, behind a prefix in the cache."""
    query = torch.zeros(num_rows, NUM_HEADS, WIDTH, dtype=DTYPE).transpose(0, 1)
    keys, values = torch.zeros(2, NUM_GROUPS, NUM_SLOTS, WIDTH, dtype=DTYPE)[:, :, : num_prefix + num_rows]
    sight = Sight(pack_bits(torch.eye(num_rows, dtype=torch.bool)), num_prefix, torch.arange(num_rows))
    tree_attention_kernel(query, keys, values, sight, scaling=0.125)


tell_compiled(tell, int(sys.argv[1]))
tree_attention._choose_splits = choose_splits
for comparison in comparisons(SHAPES, "cpu"):
    comparison.agrees()
num_before = len(compiled)
for num_prefix, num_pending in product((0, 1, 100, 192, 193, 500, 1000, 2000), (0, 1, 32)):
    attend(num_prefix, num_pending + NUM_NODES)
cache = [torch.zeros(1, NUM_GROUPS, NUM_SLOTS, WIDTH, dtype=DTYPE)] * 2
for num_rows in (*range(1, 40), 64, 100, 128, 200, 256, 300):
    kv_commit_kernel(cache, 3 * num_rows, torch.arange(num_rows))
for temperature in (0.0, 1.0, 0.3):
    match_rows_kernel(torch.zeros(2, 4096, dtype=DTYPE), torch.arange(2), 7, temperature=temperature)
print(json.dumps({"duels": compiled[:num_before], "run": compiled[num_before:]}))
