"""Routed experts, each multiplied by itself: those of whole layers, and those that come on demand.

transformers has several ways to multiply rows with a layer's experts, and finds ours by name
(`ExpertsInterface`). Invariant: experts' contributions are added in a fixed order, so that bits do
not depend on which experts were cached; they are those of transformers' own loop over experts.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from offload.checkpoint.layout import SlabLayout, Stack, split_experts
from offload.errors import HostFault
from offload.model import library
from offload.model.linear import PLAIN, Products, replace_child
from offload.model.parameters import below
from offload.sampling.sampler import NOT_NUMBERS

# one expert's weights, by the names of their stacks
Weights = Mapping[str, Tensor]
# Takes a layout, returns the `sent` part of its slab.
Fetch = Callable[[SlabLayout], np.ndarray]
# Takes a layer, its experts in rising order, and how many rows want each; yields each one's layout
# and `sent` slab, valid until the next is asked for.
Bring = Callable[[int, Sequence[int], Sequence[int]], Iterator[tuple[int, SlabLayout, Tensor]]]
# Takes a record and its slab; returns the numbers, valid until the next call.
Open = Callable[[SlabLayout, Tensor], Weights]
# Takes experts in rising order, and how many rows want each; yields each one's weights.
Source = Callable[[Sequence[int], Sequence[int]], Iterator[tuple[int, Weights]]]
# more bytes than processors cache, so that numbers come from memory as in a pass
_SAMPLE_BYTES = 64 << 20
_FLAGS = ("is_transposed", "has_bias", "has_gate", "num_experts", "_apply_gate")
# families that sum in the type of the router's shares, and round once
_SUMS_BY_SHARES = ("nemotron_h",)


class StackedExperts(nn.Module):
    """Experts of a family that ignores transformers' interface for experts.

    Parameters and gate are those of the replaced module.
    """

    def __init__(
        self, theirs: Any, *, is_transposed: bool, apply_gate: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.num_experts = theirs.num_experts
        self.is_transposed = self.scales_rows = is_transposed
        self.has_bias = False
        self.has_gate = True
        self._apply_gate = apply_gate
        for name, parameter in theirs.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    def forward(self, hidden_ND: Tensor, expert_NK: Tensor, share_NK: Tensor) -> Tensor:
        """See `multiply_experts`."""
        return multiply_experts(self, hidden_ND, expert_NK, share_NK)


class ChosenRows(nn.Module):
    """Llama 4's mixture, whose experts multiply only the rows that chose them.

    transformers gives every expert all rows, with zeros for the rows of others. The same products
    for whole layers and for experts on demand give both the same bits.
    """

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.top_k = theirs.top_k
        self.hidden_dim = theirs.hidden_dim
        activate = theirs.experts.act_fn

        def apply_gate(gate_up_RF: Tensor) -> Tensor:
            gate_RF, up_RF = gate_up_RF.chunk(2, dim=-1)
            return up_RF * activate(gate_RF)

        self.experts = StackedExperts(theirs.experts, is_transposed=True, apply_gate=apply_gate)
        self.router = theirs.router
        self.shared_expert = theirs.shared_expert

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of transformers' module, with the router's scores."""
        hidden_ND = hidden_states.reshape(-1, self.hidden_dim)
        score_NE, logits_NE = self.router(hidden_ND)
        share_NK, expert_NK = score_NE.topk(self.top_k, dim=1)
        out_ND = self.shared_expert(hidden_ND)
        return out_ND.add_(self.experts(hidden_ND, expert_NK, share_NK)), logits_NE


class ParallelExperts(nn.Module):
    """JetMoe's matrices, one for each expert, which multiply its rows in turn."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.weight = theirs.weight
        self.products: Products = PLAIN

    def forward(self, rows: Tensor, num_rows_E: Sequence[int]) -> Tensor:
        """Return the products of rows that are sorted by their experts."""
        parts = rows.split([*num_rows_E], dim=0)
        outs = (
            self.products.linear(part, weight)
            for part, weight in zip(parts, self.weight, strict=True)
            if len(part)
        )
        return torch.cat([*outs], dim=0)


def prepare_experts(meta_model: nn.Module) -> None:
    """Let all experts multiply as a model is asked to, see `choose_products`.

    Experts outside transformers' interface are replaced by modules of ours.
    """
    replaced: Any
    for name, replaced in [*meta_model.named_modules()]:
        kind = type(replaced).__name__
        if kind == "Llama4TextMoe":
            replace_child(meta_model, name, ChosenRows(replaced))
        elif kind == "Step3p7Experts":
            gate = replaced._apply_gate
            experts = StackedExperts(replaced, is_transposed=False, apply_gate=gate)
            replace_child(meta_model, name, experts)
        elif kind == "JetMoeParallelExperts":
            replace_child(meta_model, name, ParallelExperts(replaced))
    for module in meta_model.modules():
        if _are_experts(module):
            module.products = PLAIN  # type: ignore[assignment]


def _are_experts(module: nn.Module) -> bool:
    return all(hasattr(module, flag) for flag in _FLAGS)


def experts_of(block: nn.Module) -> tuple[int, int]:
    """Count a layer's experts, and those that a row meets, by a pass without numbers.

    Zeros for a layer without experts, or one whose rows are multiplied with all of them.
    """
    experts: Any = next(filter(_are_experts, block.modules()), None)
    if experts is None:
        return 0, 0
    return int(experts.num_experts), int(vars(experts).get("num_chosen", 0))


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
    """Return a layer's module of experts (None if it has none) and the names of their stacks."""
    for name, module in block.named_modules():
        if not _are_experts(module):
            continue
        prefix = f"{name}."
        stacks = below(stored, prefix)
        count = int(module.num_experts)
        # transformers 5.17 does not have the second flag
        is_known = not getattr(module, "has_post_expert_norm", False)
        is_known = is_known and all(shape[0] == count for shape, _ in stacks.values())
        assert is_known, "a family that was tried"
        return RoutedExperts(module, split_experts(stacks, count)), {
            prefix + stack for stack in stacks
        }
    return None, set()


def sample_of(records: Sequence[SlabLayout], fetch: Fetch, device: torch.device) -> Bring:
    """Make a few experts stand for all, for trials and timing before all have room."""
    num_slabs = min(len(records), max(2, _SAMPLE_BYTES // records[0].slab_bytes))
    slabs = [(record, torch.from_numpy(fetch(record)).to(device)) for record in records[:num_slabs]]

    return lambda _, experts, __: ((expert, *slabs[expert % num_slabs]) for expert in experts)


def bring_to(experts: RoutedExperts, layer: int, bring: Bring, open_record: Open) -> None:
    """Get the module's weights from `bring` from now on, which numbers it `layer`."""

    def weights(needed: Sequence[int], num_rows: Sequence[int]) -> Iterator[tuple[int, Weights]]:
        for expert, record, sent in bring(layer, needed, num_rows):
            yield expert, open_record(record, sent)

    experts.module.weight_source = weights  # type: ignore[assignment]


def drop_source(experts: RoutedExperts) -> None:
    """Release the source of experts: without another one their layer cannot run."""
    vars(experts.module).pop("weight_source", None)


def _stacked(module: Any) -> Source:
    """Return the weights of experts that are present as one stack."""
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    names += [f"{name}_bias" for name in names if module.has_bias]

    def weights(needed: Sequence[int], _: Sequence[int]) -> Iterator[tuple[int, Weights]]:
        stacks = {name: getattr(module, name) for name in names}
        for expert in needed:
            yield expert, {name: stack[expert] for name, stack in stacks.items()}

    return weights


def multiply_experts(module: Any, hidden_ND: Tensor, expert_NK: Tensor, share_NK: Tensor) -> Tensor:
    """Compute what transformers' own loop over experts does; each row meets K experts.

    The device is waited for once: choices are sorted on it, so nothing has to be sent back.
    """
    if hidden_ND.is_meta:
        module.num_chosen = expert_NK.shape[1]
        return hidden_ND
    # an expert's rows are in the order of that loop
    num_rows = len(hidden_ND)
    by_expert = expert_NK.T.flatten()
    sorted_C, order_C = by_expert.sort(stable=True)
    is_finite_1 = share_NK.isfinite().all()[None].to(sorted_C.dtype)
    is_finite, *chosen = torch.cat([is_finite_1, sorted_C]).tolist()
    if not is_finite:
        # in this family they are a router's scores
        raise HostFault(NOT_NUMBERS)
    share_C1 = share_NK.T.flatten()[order_C, None]
    # the index `num_experts` stands for no expert
    uses = Counter(expert for expert in chosen if expert < module.num_experts)
    scales_rows = getattr(module, "scales_rows", False)
    # the rows as each of their experts reads them, later replaced by its output
    part_CD = hidden_ND[order_C % num_rows]
    if scales_rows:
        part_CD = part_CD * share_C1
    num_used = uses.total()
    part_CD[num_used:] = 0
    part_of_expert = dict(zip(uses, part_CD[:num_used].split([*uses.values()]), strict=True))
    weights = vars(module).get("weight_source") or _stacked(module)
    for expert, matrices in weights([*uses], [*uses.values()]):
        part_RD = part_of_expert[expert]
        part_RD.copy_(_multiply(module, part_RD, matrices))
        # its numbers may be copies, and memory is planned for one expert's
        del matrices
    config = getattr(module, "config", None)
    is_by_shares = getattr(config, "model_type", None) in _SUMS_BY_SHARES
    out_ND = torch.zeros_like(hidden_ND, dtype=share_NK.dtype if is_by_shares else None)
    for place_N in _places_by_expert(order_C, num_rows):
        part_ND = part_CD[place_N]
        out_ND += part_ND if scales_rows else (part_ND * share_C1[place_N]).to(out_ND.dtype)
    return out_ND.to(hidden_ND.dtype)


def _places_by_expert(order_C: Tensor, num_rows: int) -> Tensor:
    """Return (K, N): the index of each row's contributions, sorted by expert."""
    place_C = torch.empty_like(order_C)
    place_C[order_C] = torch.arange(len(order_C), device=order_C.device)
    return place_C.view(-1, num_rows).sort(dim=0).values


def _multiply(module: Any, row_RD: Tensor, matrices: Weights) -> Tensor:
    """Return the output of an expert for rows."""
    if module.has_gate:
        gated = module._apply_gate(_linear(module, row_RD, matrices, "gate_up_proj"))
    else:
        gated = module.act_fn(_linear(module, row_RD, matrices, "up_proj"))
    out_RD = _linear(module, gated, matrices, "down_proj")
    if getattr(module, "has_post_expert_norm", False):
        out_RD = module.post_expert_norm(out_RD)
    return out_RD


def _linear(module: Any, row_RD: Tensor, matrices: Weights, name: str) -> Tensor:
    products: Products = module.products
    bias = matrices[f"{name}_bias"] if module.has_bias else None
    if module.is_transposed:
        out = products.multiply(torch.matmul, row_RD, matrices[name])
        return out if bias is None else out + bias
    return products.linear(row_RD, matrices[name], bias)


library.register_experts(multiply_experts)
