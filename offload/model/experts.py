"""Experts that come when a router asks for them: each by itself, in any order of arrival.

transformers multiplies with all experts of a layer as one stack. Here its module is asked for the
same sums, expert by expert, with weights that are brought for this pass alone.

Invariant: what experts contribute is added in their order, so that bits do not depend on what was
there already; they are those of transformers' own loop over experts.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from offload.checkpoint.layout import SlabLayout, Stack, split_experts
from offload.errors import HostFault
from offload.model.parameters import below
from offload.sampling.sampler import NOT_NUMBERS

# one expert's weights, by the names that their stacks have
Weights = Mapping[str, Tensor]
# Takes a layout, returns what is `sent` of its slab.
Fetch = Callable[[SlabLayout], np.ndarray]
# Takes a layer, its experts, rising, and how many rows want each; yields each with its layout and
# its slab as it is `sent`, valid until the next is asked for.
Bring = Callable[[int, Sequence[int], Sequence[int]], Iterator[tuple[int, SlabLayout, Tensor]]]
# Takes a record and its slab; returns the numbers, valid until it is called again.
Open = Callable[[SlabLayout, Tensor], Weights]
# more than processors cache, so that numbers come from memory as in a pass
_SAMPLE_BYTES = 64 << 20
_FLAGS = ("is_transposed", "has_bias", "has_gate", "num_experts", "_apply_gate")


def let_experts_choose_rows(meta_model: nn.Module) -> None:
    """Let a family whose experts multiply all rows multiply their own alone.

    Llama 4 gives every expert all rows, of which those of others are zeros. With the same products
    for what comes whole and for what comes one by one, both have the same bits.
    """
    block: Any
    for block in meta_model.modules():
        if type(block).__name__ == "Llama4TextMoe":
            experts = block.experts
            # what transformers tells of experts of other families
            experts.is_transposed = experts.has_gate = experts.scales_rows = True
            experts.has_bias = False
            experts._apply_gate = partial(_gated, experts)
            block.forward = partial(_choose, block)
            experts.forward = partial(_forward, experts, partial(_own, experts))
        elif type(block).__name__ == "Step3p7Experts":
            block.is_transposed = block.has_bias = False
            block.has_gate = True


def _gated(experts: Any, gate_up_RF: Tensor) -> Tensor:
    gate_RF, up_RF = gate_up_RF.chunk(2, dim=-1)
    return up_RF * experts.act_fn(gate_RF)


def _choose(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Do what Llama 4's mixture does to rows, with the scores of its router."""
    hidden_ND = hidden_states.reshape(-1, block.hidden_dim)
    score_NE, logits_NE = block.router(hidden_ND)
    share_NK, expert_NK = score_NE.topk(block.top_k, dim=1)
    out_ND = block.shared_expert(hidden_ND)
    return out_ND.add_(block.experts(hidden_ND, expert_NK, share_NK)), logits_NE


def _own(experts: Any, needed: Sequence[int], _: Sequence[int]) -> Iterator[tuple[int, Weights]]:
    """Yield the weights of experts that are there."""
    for expert in needed:
        names = ("gate_up_proj", "down_proj")
        yield expert, {name: getattr(experts, name)[expert] for name in names}


class RoutedExperts(NamedTuple):
    """The experts of one layer."""

    module: nn.Module
    # by expert
    records: list[SlabLayout]

    @property
    def num_experts(self) -> int:
        return len(self.records)


def find_experts(
    block: nn.Module, stored: Mapping[str, Stack]
) -> tuple[RoutedExperts | None, set[str]]:
    """Return a layer's experts, None where it has none, and the names of their stacks."""
    for name, module in block.named_modules():
        if not all(hasattr(module, flag) for flag in _FLAGS):
            continue
        prefix = f"{name}."
        stacks = below(stored, prefix)
        count = int(module.num_experts)
        # transformers 5.17 does not have the second flag
        is_known = not getattr(module, "has_post_expert_norm", False)
        is_known = is_known and all(shape[0] == count for shape, _ in stacks.values())
        assert is_known, "a family that was tried"
        return RoutedExperts(module, split_experts(stacks, count)), {prefix + one for one in stacks}
    return None, set()


def sample_of(records: Sequence[SlabLayout], fetch: Fetch, device: torch.device) -> Bring:
    """Let a few of these stand for all experts, to try and to time before all have room."""
    num_slabs = min(len(records), max(2, _SAMPLE_BYTES // records[0].slab_bytes))
    slabs = [(record, torch.from_numpy(fetch(record)).to(device)) for record in records[:num_slabs]]

    return lambda _, experts, __: ((expert, *slabs[expert % num_slabs]) for expert in experts)


def bring_to(experts: RoutedExperts, layer: int, bring: Bring, open_record: Open) -> None:
    """Let the module get its weights by `bring` from now on, which calls the layer `layer`."""

    def weights(needed: Sequence[int], num_rows: Sequence[int]) -> Iterator[tuple[int, Weights]]:
        for expert, record, sent in bring(layer, needed, num_rows):
            yield expert, open_record(record, sent)

    experts.module.forward = partial(_forward, experts.module, weights)


def _forward(
    module: Any,
    weights: Callable[[Sequence[int], Sequence[int]], Iterator[tuple[int, Weights]]],
    hidden_ND: Tensor,
    expert_NK: Tensor,
    share_NK: Tensor,
) -> Tensor:
    """Compute what transformers' own loop over experts does; each row meets K experts.

    A device is waited for once: choices are sorted on it, so that nothing has to be sent back.
    """
    # rows of an expert come in the order of that loop
    num_rows = len(hidden_ND)
    by_expert = expert_NK.T.flatten()
    sorted_C, order_C = by_expert.sort(stable=True)
    is_finite_1 = share_NK.isfinite().all()[None].to(sorted_C.dtype)
    is_finite, *chosen = torch.cat([is_finite_1, sorted_C]).tolist()
    if not is_finite:
        # here they are a router's scores
        raise HostFault(NOT_NUMBERS)
    row_C = order_C % num_rows
    share_C = share_NK.T.flatten()[order_C]
    # an index of `num_experts` stands for no expert
    uses = Counter(expert for expert in chosen if expert < module.num_experts)
    ends = dict(zip(uses, accumulate(uses.values()), strict=True))
    parts = dict[int, tuple[Tensor, Tensor]]()
    for expert, own in weights([*uses], [*uses.values()]):
        span = slice(ends[expert] - uses[expert], ends[expert])
        row_R = row_C[span]
        out_RD = _multiply(module, hidden_ND[row_R], own, share_C[span, None])
        parts[expert] = row_R, out_RD.to(hidden_ND.dtype)
        # its numbers may be copies, and memory is planned for those of one expert
        del own
    out_ND = torch.zeros_like(hidden_ND)
    for expert in uses:
        out_ND.index_add_(0, *parts[expert])
    return out_ND


def _multiply(module: Any, row_RD: Tensor, own: Weights, share_R1: Tensor) -> Tensor:
    """Return what an expert adds to rows; Llama 4 weighs what comes in, others what goes out."""
    scales_rows = getattr(module, "scales_rows", False)
    row_RD = row_RD * share_R1 if scales_rows else row_RD
    if module.has_gate:
        gated = module._apply_gate(_linear(module, row_RD, own, "gate_up_proj"))
    else:
        gated = module.act_fn(_linear(module, row_RD, own, "up_proj"))
    out_RD = _linear(module, gated, own, "down_proj")
    return out_RD if scales_rows else out_RD * share_R1


def _linear(module: Any, row_RD: Tensor, own: Weights, name: str) -> Tensor:
    if module.is_transposed:
        out = row_RD @ own[name]
        return out + own[f"{name}_bias"] if module.has_bias else out
    return functional.linear(row_RD, own[name], own[f"{name}_bias"] if module.has_bias else None)
