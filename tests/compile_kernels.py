"""Compile every kernel for a GPU that need not be there, through the code that launches it; a line of JSON for each.

    python tests/compile_kernels.py 86 FOLDER        # compute capability 8.6; FOLDER takes the compiler's cache

Each is asked for a second time with other sizes and numbers, which must not compile it again.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

os.environ["TRITON_CACHE_DIR"] = sys.argv[2]

import torch
import triton
from no_gpu import tell_compiled
from torch import Tensor

from offload.bench.gpu.samples import samples
from offload.kernels import multiply_int4
from offload.kernels.draw_without_replacement import draw_without_replacement_kernel
from offload.kernels.encode_exponents import encode_exponents_reference
from offload.kernels.expand_exponents import expand_exponents_kernel
from offload.kernels.expansion import EXPANSION_KERNELS
from offload.kernels.int4_blocks import WordLayout
from offload.kernels.keyed_gumbel import keyed_gumbel_kernel
from offload.kernels.kv_commit import kv_commit_kernel
from offload.kernels.match_rows import match_rows_kernel
from offload.kernels.path_attention import PathRows, ScoreTerms, path_attention_kernel
from offload.kernels.rms_norm import FORMS, rms_norm_kernel


class CompiledError(Exception):
    """Ends a launch: there is no result to go on with."""


def tell(done: Any, is_new: bool) -> None:
    row = {"kernel": done.metadata.name, "shared_bytes": done.metadata.shared, "is_new": is_new}
    row["has_tensor_cores"] = any(name in done.asm["ptx"] for name in ("mma.sync", "wgmma"))
    row |= {"is_repeated": is_repeated, "is_float32": torch.float32 in call}
    row["width"] = call[4] if launch is attention and len(call) > 4 else 128
    row["stack_bytes"] = stack_bytes(done.asm["cubin"]) if is_new else 0
    print(json.dumps(row))
    raise CompiledError


def stack_bytes(cubin: bytes) -> int:
    """Memory that a thread takes beside its registers: what the compiler has spilled."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return max(map(int, re.findall(r"STACK:(\d+)", said)))


def attention(
    num_heads: int, num_rows: int, num_columns: int, window: int | None, width: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    """Sliding layers here cap their scores and have sinks."""
    query = torch.zeros(num_rows, num_heads, width, dtype=dtype).transpose(0, 1)
    keys = torch.zeros(8, 512, width, dtype=dtype)
    terms = ScoreTerms(0.1, 50.0 if window else None, torch.zeros(num_heads) if window else None)
    walk_TL = torch.zeros(num_rows, 2 + num_columns, dtype=torch.int32)
    path_attention_kernel(query, keys, keys, PathRows(walk_TL, window, path_attention_kernel), terms)


def norm(num_rows: int, width: int) -> None:
    rms_norm_kernel(torch.zeros(num_rows, width, dtype=torch.bfloat16), torch.zeros(width).bfloat16(), 1e-6, FORMS[0])


def commit(length: int, num_rows: int) -> None:
    kv_commit_kernel([torch.zeros(1, 8, 300, 128, dtype=torch.bfloat16)] * 2, length, torch.arange(num_rows))


def product(num_rows: int, num_columns: int, width: int, group: int, dtype: torch.dtype) -> None:
    scale_GN2 = torch.zeros(width // group, num_columns, 2, dtype=dtype)
    word_NK = torch.zeros(num_columns, width // 2, dtype=torch.uint8)
    layout = WordLayout(64, has_product=False)
    multiply_int4.multiply_int4_kernel(torch.zeros(num_rows, width, dtype=dtype), word_NK, scale_GN2, layout)


def sum_parts(num_rows: int, num_columns: int, num_parts: int, dtype: torch.dtype) -> None:
    """The second kernel of a product, which the first keeps from being started."""
    out_MN = torch.zeros(num_rows, num_columns, dtype=dtype)
    sum_PMN = torch.zeros(num_parts, num_rows, num_columns)
    multiply_int4._sum_parts[(1,)](out_MN, sum_PMN, out_MN.numel(), num_parts, BLOCK=multiply_int4._SUMMED)


def match(seed: int, temperature: float) -> None:
    logits_NV: Tensor = torch.zeros(3, 32000, dtype=torch.bfloat16)
    match_rows_kernel(logits_NV, torch.arange(3), seed, temperature=temperature)


def expand(index: int, num_rows: int, num_columns: int, dtype: torch.dtype) -> None:
    """Expand the kind of words with this number."""
    sample = samples(num_rows, num_columns)[index]
    sample.expand(EXPANSION_KERNELS, torch.empty(sample.out_shape, dtype=dtype))


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
    (norm, [(1, 8192), (768, 8192), (2048, 8192)]),
    (norm, [(1, 128), (6144, 128)]),
    *(
        (product, [(*size, group, dtype) for size in ((16, 8192, 8192), (1, 64, group), (7, 1088, 320))])
        for group, dtype in ((64, torch.bfloat16), (32, torch.bfloat16), (64, torch.float16))
    ),
    *((sum_parts, [(16, 8192, 8, dtype), (1, 64, 1, dtype)]) for dtype in (torch.bfloat16, torch.float16)),
    (commit, [(7, 5), (16, 7), (1, 8)]),
    (attention, [(64, 77, 64, None), (64, 1, 0, None), (64, 16, 128, None), (64, 2048, 192, None)]),
    (attention, [(64, 77, 64, 50), (64, 64, 0, 64)]),
    (attention, [(8, 1, 64, None), (8, 768, 128, None)]),
    (attention, [(64, 77, 64, None, 256)]),
    (attention, [(64, 77, 64, 50, 512)]),
    *((expand, [(index, 256, 768, torch.bfloat16), (index, 768, 256, torch.bfloat16)]) for index in range(NUM_SAMPLES)),
    (attention, [(64, 77, 64, None, 128, torch.float32)]),
    (attention, [(64, 77, 64, 50, 256, torch.float32)]),
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
