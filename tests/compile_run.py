"""What a run compiles that its comparisons have not, for a GPU that need not be there: the last line is a list in JSON.

    python tests/compile_run.py 86 FOLDER        # compute capability 8.6; FOLDER takes the compiler's cache

Kernels are compiled and not started, so whatever comes out of them means nothing.
"""

import json
import os
import sys
from typing import Any

os.environ["TRITON_CACHE_DIR"] = sys.argv[2]

import torch
from no_gpu import tell_compiled

from offload.calibration.kernels import Heads, Shapes, comparisons
from offload.kernels.kv_commit import kv_commit_kernel
from offload.kernels.match_rows import match_rows_kernel
from offload.kernels.path_attention import PathRows, ScoreTerms, path_attention_kernel
from offload.model.cuda_graphs import _INPUTS, _MOST_COLUMNS
from offload.model.path_attention import path_rows

NUM_HEADS, NUM_GROUPS, WIDTH, NUM_NODES, NUM_SLOTS = 4, 1, 16, 64, 2101
DTYPE = torch.bfloat16
SHAPES = Shapes(
    heads=(Heads(NUM_HEADS, NUM_GROUPS, WIDTH, WIDTH, DTYPE),), num_layers=1, num_slots=64, num_nodes=(40,),
    num_scored=(3,), num_prefix=(100,), vocab_sizes=(4096,), temperatures=(0.7,), level_sizes=(4,), path_lengths=(7,),
)  # fmt: skip
compiled: list[str] = []


def tell(done: Any, is_new: bool) -> None:
    if is_new:
        compiled.append(done.metadata.name)


def attend(walk_TL: torch.Tensor) -> None:
    """In a cache of many slots, as a slice of it or whole."""
    query = torch.zeros(len(walk_TL), NUM_HEADS, WIDTH, dtype=DTYPE).transpose(0, 1)
    keys, values = torch.zeros(2, NUM_GROUPS, NUM_SLOTS, WIDTH, dtype=DTYPE)
    rows = PathRows(walk_TL, None, path_attention_kernel)
    path_attention_kernel(query, keys, values, rows, ScoreTerms(0.125))


def tree_behind(num_prefix: int, num_pending: int) -> torch.Tensor:
    """The walks of a tree with some committed tokens before it."""
    seen_UU = torch.eye(num_pending + NUM_NODES, dtype=torch.bool)
    seen_UU[:, :num_pending] = torch.ones(num_pending + NUM_NODES, num_pending, dtype=torch.bool).tril()
    return path_rows(num_prefix, seen_UU, path_attention_kernel).walk_TL


tell_compiled(tell, int(sys.argv[1]))
for comparison in comparisons(SHAPES, "cpu"):
    comparison.agrees()
num_before = len(compiled)
for num_prefix in (0, 1, 100, 192, 193, 500, 1000, 2000):
    for num_pending in (0, 1, 32):
        attend(tree_behind(num_prefix, num_pending))
for width in (1, 2, 128):
    attend(torch.zeros(width, _INPUTS + 2 + _MOST_COLUMNS, dtype=torch.int32)[:, _INPUTS:])  # of a recording
cache = [torch.zeros(1, NUM_GROUPS, NUM_SLOTS, WIDTH, dtype=DTYPE)] * 2
for num_rows in (*range(1, 40), 64, 100, 128, 200, 256, 300):
    kv_commit_kernel(cache, 3 * num_rows, torch.arange(num_rows))
for temperature in (0.0, 1.0, 0.3):
    match_rows_kernel(torch.zeros(2, 4096, dtype=DTYPE), torch.arange(2), 7, temperature=temperature)
print(json.dumps({"duels": compiled[:num_before], "run": compiled[num_before:]}))
