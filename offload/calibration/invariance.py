"""Whether a row has the same bits on this machine whatever stands beside it.

No library promises that. Row sizes of products are found by trial (`model/invariant.py`); here one
layer is run with its real weights, once with all rows and in parts, and what it computes number by
number is repeated for fewer rows. Of a model with recurrent layers, or layers that choose by an index,
one of each kind is run, with a tree as well.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from offload.checkpoint.layout import SlabLayout
from offload.errors import UserError
from offload.kernels.machine_code import ORDER, emulates_bfloat16, fused_lanes
from offload.kernels.path_attention_cpu import compile_for
from offload.machine import cpu_name, num_cores
from offload.memory.plan import MemoryPlan
from offload.model.invariant import BatchInvariantProducts
from offload.model.kv_cache import KEYS, VALUES, KVCache
from offload.model.mixers.selection import selecting_few
from offload.model.path_attention import try_scores
from offload.model.tree_model import TreeModel
from offload.model.wide_products import widens_products
from offload.planning.load_options import LoadOptions
from offload.streaming.device import Device
from offload.threads import ThreadPolicy, thread_ladder

# of the longest pass: of its first 64 positions the keys lie in a block that rows share
_NUM_ROWS = 72
# other ways to take in the first rows, which then have these keys for themselves
_CUTS = ((1, 1, 5), (12,))
# of trees, two rows each; of the smaller one even large states take steps together
_NUM_LEVELS = (12, 2)
_NUM_KEYS = 2  # of an index: so few that rows of a trial choose
# what torch computes otherwise for the last numbers of many, or adds up by how many rows there are
_BY_ROW = {f"aten::{name}" for name in ("silu", "gelu", "sigmoid", "tanh", "softplus", "mish", "elu", "exp", "mean",
                                        "sum", "var", "log_sigmoid_forward", "mm", "addmm", "bmm")}  # fmt: skip
_FEWER_ROWS = ((0, 1), (1, 5), (69, 72))  # of the longest pass


class Invariance(NamedTuple):
    """Whether tokens have the same bits in any tree, and why not."""

    # with which it holds
    thread_counts: tuple[int, ...] = ()
    # why it does not
    reason: str = ""
    # that make it so; they refuse a product where no number of rows helps
    rows: BatchInvariantProducts | None = None
    was_tried: bool = False

    @property
    def holds(self) -> bool:
        """Return True if it holds so far: a later layer may have a product that is refused."""
        return self.rows is not None and not self.rows.num_refused

    def arithmetic(self, device: str) -> str:
        """Return the settings that decide bits of keys and values; empty where rows beside do, too."""
        if not self.holds:
            return ""
        # row sizes are those that hold with all of them
        counts = ", ".join(map(str, self.thread_counts))
        # a GPU runs none of it, and asking takes a moment
        code = f", registers of {fused_lanes()}, order {ORDER}" if device == "cpu" else ""
        code += ", bfloat16 widened" if device == "cpu" and emulates_bfloat16() else ""
        return f"{cpu_name()}{code}, torch {torch.__version__}, {device}, {counts} threads"

    @property
    def notes(self) -> list[str]:
        """Return a line for the user where it was tried and does not hold."""
        if not self.was_tried or self.holds:
            return []
        return [f"a tree may swap two tokens that lie closer than rounding ({self.reason})"]


class _DifferError(Exception):
    """Two ways to compute a row gave different bits; the message says of what."""


def _why_not(
    model: TreeModel,
    options: LoadOptions,
    plan: MemoryPlan,
    *,
    device: Device,
    is_alone: bool,
) -> str:
    """Return why the same bits are not asked for, or nothing."""
    if not is_alone:
        return "several ranks share its rows"
    if options.invariant is False:
        return "it is not wanted"
    is_widened = not device.has_own_memory and model.has_rows_alone and widens_products(model.dtype)
    if options.invariant is None and not plan.is_streamed and not is_widened:
        return "nothing is streamed, so that it would take time"
    return ""


def prepare_invariance(
    model: TreeModel,
    options: LoadOptions,
    plan: MemoryPlan,
    *,
    device: Device,
    is_alone: bool,
) -> None:
    """Compile what gives a row the same bits on a CPU, before weights lie beside the compiler."""
    if device.has_own_memory:
        return
    if not _why_not(model, options, plan, device=device, is_alone=is_alone):
        compile_for(model.dtype)


def settle_invariance(
    model: TreeModel,
    fetch: Callable[[SlabLayout], np.ndarray],
    options: LoadOptions,
    threads: ThreadPolicy,
    plan: MemoryPlan,
    on_phase: Callable[[str], None],
    *,
    device: Device,
    is_alone: bool,
) -> Invariance:
    """Make `model` invariant where that is wanted, and where it can be had.

    It is asked by the least plan, and again where only the chosen tree has brought it to stream.

    Args:
        device: that computes; a CPU may do so with several counts of threads.
        is_alone: no other rank computes rows of the model.
    """
    if reason := _why_not(model, options, plan, device=device, is_alone=is_alone):
        return Invariance(reason=reason)
    if model.torch_device.type != "cpu" and model.attend is None:
        return Invariance(reason="the kernel of its attention does not run here")
    on_phase("checking that all trees give the same bits")
    counts = [torch.get_num_threads()]
    if not device.has_own_memory:
        counts = sorted({*thread_ladder(num_cores()), threads.start.sweep.num_threads})
    invariance = make_invariant(model, fetch, counts, plan.context)
    # it may hold with these alone
    if not invariance.holds and options.threads is not None and len(counts) > 1:
        invariance = make_invariant(model, fetch, [options.threads], plan.context)
    return invariance._replace(was_tried=True)


def make_invariant(
    model: TreeModel,
    fetch: Callable[[SlabLayout], np.ndarray],
    thread_counts: Sequence[int],
    context: int,
) -> Invariance:
    """Make `model` invariant, or leave it as it was where that does not hold here.

    Args:
        fetch: reads layers, none of which is bound yet; embeddings and head are.
        thread_counts: that passes may be computed with.
        context: the longest text.
    """
    if _turns_by_length(model, context):
        return Invariance(reason="its rotary embeddings depend on the length of the text")
    invariance = Invariance()
    rows = BatchInvariantProducts(thread_counts)
    try:
        for layer in model.layers_to_try:
            _try_layer(model, fetch, rows, layer)
        invariance = Invariance(tuple(thread_counts), rows=rows)
    except (_DifferError, UserError, torch.OutOfMemoryError) as error:
        invariance = Invariance(reason=str(error).partition("\n")[0])
    finally:
        if not invariance.holds:
            model.set_batch_invariant(None)
    return invariance


def _try_layer(
    model: TreeModel,
    fetch: Callable[[SlabLayout], np.ndarray],
    rows: BatchInvariantProducts,
    layer: int,
) -> None:
    """Raises `_DifferError`."""
    model.bind_layer(layer, fetch(model.layer_layouts[layer]))
    try:
        with model.cut_to(slice(layer, layer + 1)), selecting_few(_NUM_KEYS):
            _require_invariance(model, rows)
    finally:
        model.unbind_layer(layer)


def _turns_by_length(model: TreeModel, context: int) -> bool:
    return any(context > length for length in _trained_lengths(model, "dynamic"))


def _trained_lengths(model: TreeModel, rope_type: str) -> list[int]:
    """Return up to which lengths of a text such rotary embeddings stay as they are."""
    config = model.meta_model.config
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = [rope for rope in (ropes, *ropes.values()) if isinstance(rope, dict)]
    names = ("original_max_position_embeddings", "max_position_embeddings")
    trained = next(
        (length for name in names if (length := _length(getattr(config, name, None)))), 0
    )
    return [
        _length(rope.get(names[0])) or trained
        for rope in kinds
        if rope.get("rope_type") == rope_type
    ]


def _length(stated: Any) -> int:
    """Return a length of config.json, 0 for none: transformers does not check all of them."""
    return stated if type(stated) is int else 0


def _require_invariance(model: TreeModel, rows: BatchInvariantProducts) -> None:
    """Make the model invariant from now on, by `rows`. Raises `_DifferError`."""
    lengths = [_length(getattr(model.meta_model.config, "max_position_embeddings", None))]
    lengths += _trained_lengths(model, "longrope")
    num_rows = min(length for length in (_NUM_ROWS, *lengths) if length)
    generator = torch.Generator().manual_seed(0)
    token_T = torch.randint(model.vocab_size, (num_rows,), generator=generator)
    model.set_batch_invariant(rows)
    cache = model.new_cache(len(token_T))
    with _ByFewerRows(len(token_T)) if len(token_T) == _NUM_ROWS else nullcontext():
        wanted_TV = _logits(model, token_T, (len(token_T),), cache)
    filled = [held for held in cache.states(cache.length).values() if KEYS in held]
    if filled and model.kernel is None:
        try_scores(rows.multiply, filled[-1][KEYS][0], filled[-1][VALUES][0])
    if rows.num_refused:
        counts = ", ".join(map(str, rows.thread_counts))
        raise _DifferError(
            f"a product has other bits for each number of rows, with {counts} threads"
        )
    for cut in _CUTS:
        if sum(cut) <= len(token_T):
            logits = _logits(model, token_T[: sum(cut)], cut, model.new_cache(sum(cut)))
            if not torch.equal(logits, wanted_TV[: len(logits)]):
                raise _DifferError(
                    "a layer gives other bits when a text is taken in at once than in parts"
                )
    for num_levels in _NUM_LEVELS if model.has_states or model.has_index else ():
        if 2 * num_levels <= len(token_T):
            got = _logits_by_tree(model, token_T, num_levels)
            if not torch.equal(got, wanted_TV[: len(got)]):
                raise _DifferError("a layer gives other bits in a tree than to a text by itself")


def _logits_by_tree(model: TreeModel, token_T: Tensor, num_levels: int) -> Tensor:
    """Return scores of the first rows of a chain, each beside a sibling, and of as many behind them."""
    cache = model.new_cache(4 * num_levels)
    level_N = torch.arange(2 * num_levels) // 2
    is_beside_N = torch.arange(2 * num_levels) % 2 == 1
    token_N = torch.where(is_beside_N, token_T.flip(0)[level_N], token_T[level_N])
    sees_NN = (level_N[:, None] > level_N) & ~is_beside_N | torch.eye(
        len(level_N), dtype=torch.bool
    )
    logits_NV = model.forward(token_N, level_N, sees_NN, cache)
    cache.commit(range(0, 2 * num_levels, 2))
    behind = _logits(model, token_T[num_levels : 2 * num_levels], (1, num_levels - 1), cache)
    return torch.cat([logits_NV[::2], behind])


def _logits(model: TreeModel, token_T: Tensor, cut: Sequence[int], cache: KVCache) -> Tensor:
    """Return scores of all rows of a chain, taken in by passes of this many rows."""
    parts = []
    for part_T in token_T.split(list(cut)):
        parts.append(model.forward_chain(part_T, cache))
        cache.commit(range(len(part_T)))
    return torch.cat(parts)


class _ByFewerRows(TorchDispatchMode):
    """Repeats what is computed number by number, or added up, for fewer of the rows.

    Before anything is rounded: in 16 bits one row in hundreds would show another order.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._num_rows = num_rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket._qualified_op_name
        factors = args[1:] if name == "aten::addmm" else args
        if name in _BY_ROW and isinstance(out, Tensor):
            rows = factors[0]
            # what is made in parts, or padded, has other numbers of rows
            dims = [dim for dim, size in enumerate(rows.shape[:-1]) if size == self._num_rows]
            is_by_row = dims and out.shape[: dims[0] + 1] == rows.shape[: dims[0] + 1]
            for lo, hi in _FEWER_ROWS if is_by_row else ():
                span = (dims[0], lo, hi - lo)
                given = [
                    arg.narrow(*span)
                    if isinstance(arg, Tensor) and _goes_with(arg, rows, dims[0])
                    else arg
                    for arg in args
                ]
                _require_equal(func(*given, **kwargs), out.narrow(*span))
        return out


def _goes_with(tensor: Tensor, rows: Tensor, dim: int) -> bool:
    """Tell whether a tensor has the same rows: as many in that place, or a factor for each."""
    is_stack_of_rows = dim < rows.ndim - 2 and tensor.ndim == rows.ndim
    return tensor.shape == rows.shape or (is_stack_of_rows and tensor.shape[dim] == rows.shape[dim])


def _require_equal(few: Tensor, many: Tensor) -> None:
    if not torch.equal(few, many):
        shape = "x".join(map(str, many.shape))
        raise _DifferError(f"an activation of {shape} numbers has other bits beside other rows")
