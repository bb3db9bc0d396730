"""Routed experts one by one: what of a stack's tensors belongs to each of them.

Files hold experts as tensors of their own or as one stack of all; models have stacks. Invariant: an expert's parts are
bytes of its own alone, and together they are the stack's.
"""

import math
from collections.abc import Mapping, Sequence

from offload.checkpoint.layout import Part, SlabLayout, slab_layout
from offload.checkpoint.tensors import Coded, TensorEntry

Stack = tuple[tuple[int, ...], Sequence[Part]]  # its shape, (E, ...), and what it is made of

# Model types whose experts transformers dispatches one by one; others multiply every row with every expert.
ON_DEMAND = frozenset((
    "afmoe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe",
    "glm4_moe_lite", "gpt_oss", "hunyuan_v1_moe", "mellum", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe",
    "qwen3_moe", "solar_open",
    "glm4v_moe_text", "minimax_m3_vl_text", "qwen3_vl_moe_text",
))  # fmt: skip


def split_experts(stacks: Mapping[str, Stack], num_experts: int) -> list[SlabLayout]:
    """One layout for each expert of these stacks, by name; what they have is without the first dimension."""
    split = {name: _split(stack) for name, stack in stacks.items()}
    return [slab_layout({name: own[expert] for name, own in split.items()}) for expert in range(num_experts)]


def _split(stack: Stack) -> list[Stack]:
    """Shape and parts of each expert."""
    (num_experts, *rest), parts = stack
    if len(parts) == 1 and len(parts[0].entry.shape) > len(rest):  # of a single expert the only part may be its own
        slices = (slice_of(parts[0].entry, expert, num_experts) for expert in range(num_experts))
        return [(tuple(rest), [Part(one)]) for one in slices]
    size, own = math.prod(rest), [list[Part]() for _ in range(num_experts)]
    for part in parts:
        expert, first = divmod(part.first, size)
        assert first + math.prod(part.entry.shape) <= size, "parts of one expert"
        own[expert].append(part._replace(first=first))
    return [(tuple(rest), parts) for parts in own]


def slice_of(entry: TensorEntry, expert: int, num_experts: int) -> TensorEntry:
    """Of a stack's tensor, coded or not, the part of one expert."""
    size = entry.num_bytes // num_experts
    assert size * num_experts == entry.num_bytes and entry.shape[0] == num_experts, "stacks begin with experts"
    coded = entry.coded
    if coded is not None:
        companions = ((name, slice_of(one, expert, num_experts)) for name, one in coded.companions)
        coded = Coded(coded.coding, tuple(companions))
    lo = entry.lo + expert * size
    return entry._replace(shape=entry.shape[1:], lo=lo, hi=lo + size, coded=coded)
