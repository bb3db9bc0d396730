"""Compile every kernel for a GPU that need not be there, through the code that launches it; a line of JSON for each.

    python tests/compile_kernels.py 86 FOLDER        # compute capability 8.6; FOLDER takes the compiler's cache

Each is asked for a second time with other sizes and numbers, which must not compile it again.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["TRITON_CACHE_DIR"] = sys.argv[2]

import torch
from no_gpu import tell_compiled
from torch import Tensor

from offload.bench.harness.expansions import samples
from offload.kernels.draw_without_replacement import draw_without_replacement_kernel
from offload.kernels.encode_exponents import encode_exponents_reference
from offload.kernels.expand_exponents import expand_exponents_kernel
from offload.kernels.expansion import KERNELS
from offload.kernels.keyed_gumbel import keyed_gumbel_kernel
from offload.kernels.kv_commit import kv_commit_kernel
from offload.kernels.match_rows import match_rows_kernel
from offload.kernels.tree_attention import MAX_WIDTH, Sight, pack_bits, tree_attention_kernel


class CompiledError(Exception):
    """Ends a launch: there is no result to go on with."""


def tell(done: Any, is_new: bool) -> None:
    row = {"kernel": done.metadata.name, "shared_bytes": done.metadata.shared, "is_new": is_new}
    row["has_tensor_cores"] = any(name in done.asm["ptx"] for name in ("mma.sync", "wgmma"))
    row |= {"is_repeated": is_repeated, "is_float32": torch.float32 in call}
    print(json.dumps(row))
    raise CompiledError


def attention(
    num_heads: int, num_prefix: int, num_rows: int, window: int | None, width: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    query = torch.zeros(num_rows, num_heads, width, dtype=dtype).transpose(0, 1)
    keys = torch.zeros(8, 512, width, dtype=dtype)[:, : num_prefix + num_rows]
    seen_TW, position_T = pack_bits(torch.eye(num_rows, dtype=torch.bool)), torch.arange(num_rows)
    options = {"scaling": 0.1, "num_splits": 2 if window else 1}
    tree_attention_kernel(query, keys, keys, Sight(seen_TW, num_prefix, position_T, window), **options)


def commit(length: int, num_rows: int) -> None:
    kv_commit_kernel([torch.zeros(1, 8, 300, 128, dtype=torch.bfloat16)] * 2, length, torch.arange(num_rows))


def match(seed: int, temperature: float) -> None:
    logits_NV: Tensor = torch.zeros(3, 32000, dtype=torch.bfloat16)
    match_rows_kernel(logits_NV, torch.arange(3), seed, temperature=temperature)


def expand(index: int, num_rows: int, num_columns: int, dtype: torch.dtype) -> None:
    """Of the kind of words with this number."""
    sample = samples(num_rows, num_columns)[index]
    sample.expand(KERNELS, torch.empty(sample.out_shape, dtype=dtype))


def exponents(num_weights: int, width: int, dtype: torch.dtype, source: torch.dtype = torch.bfloat16) -> None:
    words = encode_exponents_reference(torch.zeros(num_weights, dtype=source), 120, width)
    start_C = torch.zeros(len(words.count_C) + 1, dtype=torch.int64)
    expand_exponents_kernel(*words[:3], start_C, torch.tensor([120]), torch.zeros(num_weights, dtype=dtype))


NUM_SAMPLES = len(samples(256, 256))
DISTRIBUTION = torch.zeros(2, 32000)
# What is compiled, and what then must come from the cache: other lengths, seeds, positions, 1 and multiples of 16.
ROUNDS: list[tuple[Callable[..., None], list[tuple[Any, ...]]]] = [
    (keyed_gumbel_kernel, [(3, 7, 32000), (4, 1, 32000), (5, 16, 32000)]),
    (match, [(3, 0.7), (4, 1.0), (2**62, 16.0)]),
    (match, [(3, 0.0)]),
    (draw_without_replacement_kernel, [(DISTRIBUTION, 20, 3, 100), (DISTRIBUTION, 1, 4, 0), (DISTRIBUTION, 16, 5, 16)]),
    (commit, [(7, 5), (16, 7), (1, 8)]),
    (attention, [(64, 300, 77, None), (64, 320, 64, None), (64, 1, 160, None), (64, 0, 90, None)]),
    (attention, [(64, 300, 77, 50), (64, 320, 64, 64)]),
    (attention, [(8, 300, 1, None), (8, 1, 1, None)]),
    (attention, [(64, 300, 77, None, MAX_WIDTH)]),
    *((expand, [(index, 256, 768, torch.bfloat16), (index, 768, 256, torch.bfloat16)]) for index in range(NUM_SAMPLES)),
    (attention, [(64, 300, 77, None, MAX_WIDTH, torch.float32)]),
    (exponents, [(5000, 4, torch.bfloat16), (4096, 4, torch.bfloat16), (1, 4, torch.bfloat16)]),
    (exponents, [(5000, 3, torch.float16), (4096, 3, torch.float16), (1, 3, torch.float16)]),
    *(
        (exponents, [(num, 3, dtype, torch.float16) for num in (5000, 4096, 1)])
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
    ),
]

is_repeated = False
tell_compiled(tell, int(sys.argv[1]))
for launch, calls in ROUNDS:
    for index, call in enumerate(calls):
        is_repeated = index > 0
        try:
            launch(*call)
        except CompiledError:
            continue
        raise AssertionError(f"{launch} started no kernel")
