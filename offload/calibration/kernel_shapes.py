"""Shapes of a run's own models at which kernels are compared with their references."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from offload.checkpoint.sizes import config_sizes, head_dim
from offload.kernels.int4_blocks import BLOCK_ROWS
from offload.kernels.multiply_int4 import MOST_ROWS
from offload.kernels.path_attention import Window
from offload.kernels.rms_norm import FORMS, NormForm
from offload.memory.plan import MemoryPlan
from offload.model.norms import find_norms
from offload.model.tree_model import TreeModel
from offload.sampling_options import Sampling

# rows of an attention that is compared: other sizes run the same code
_COMPARED_NODES = 40
_COMPARED_PREFIX = 100
# columns of a product that is compared, an odd number of blocks: more run the same code
_COMPARED_COLUMNS = 7 * BLOCK_ROWS
# slots of a cache: a commit of a path touches no more of them
_NUM_SLOTS = 64
# rows that a walk looks at in a step that yields seven tokens
VISITED = 7


class Heads(NamedTuple):
    """The attention of one model and its cache, as far as they change a kernel's code."""

    num_heads: int = 64
    num_groups: int = 8
    width: int = 128
    value_width: int = 128
    dtype: torch.dtype = torch.bfloat16
    windows: tuple[Window, ...] = (None,)
    cap: float | None = None
    has_sinks: bool = False


class Norm(NamedTuple):
    """One kind of norm that a model has."""

    width: int
    form: NormForm = FORMS[0]
    dtype: torch.dtype = torch.bfloat16
    has_weight: bool = True


class Int4Shape(NamedTuple):
    """One kind of matrix that a draft holds at 4 bits."""

    num_columns: int = 28672  # of the product
    width: int = 8192
    group: int = 64
    block_rows: int = BLOCK_ROWS
    dtype: torch.dtype = torch.bfloat16


class Shapes(NamedTuple):
    """The shapes that are compared; the defaults are those of a 70B model."""

    # both models' heads, the target's first
    heads: tuple[Heads, ...] = (Heads(),)
    num_layers: int = 80
    num_slots: int = 2048
    num_nodes: tuple[int, ...] = (1, 64, 768)
    # rows whose logits are there at once
    num_scored: tuple[int, ...] = (1, 16, 64, 128)
    num_prefix: tuple[int, ...] = (128, 1024)
    vocab_sizes: tuple[int, ...] = (32_000, 128_256)
    temperatures: tuple[float, ...] = (0.0, 0.7)
    # nodes whose children are drawn together
    level_sizes: tuple[int, ...] = (1, 32)
    path_lengths: tuple[int, ...] = (2, 6, 20)
    # both models' norms
    norms: tuple[Norm, ...] = (Norm(8192),)
    # the draft's matrices at 4 bits, and rows of a pass that multiplies with them
    int4_shapes: tuple[Int4Shape, ...] = (
        Int4Shape(),
        Int4Shape(8192, 28672),
        Int4Shape(8192, 8192),
        Int4Shape(1024, 8192),
    )
    num_drafted: tuple[int, ...] = (1, 4, 8, MOST_ROWS)


def shapes_of(
    model: TreeModel, plan: MemoryPlan, sampling: Sampling, draft: TreeModel | None = None
) -> Shapes:
    """Return the shapes of these models, and of the logits that memory was planned for."""
    models = [candidate for candidate in (model, draft) if candidate is not None]
    return Shapes(
        heads=tuple(dict.fromkeys(map(_heads_of, models))),
        num_layers=model.num_layers,
        num_slots=_NUM_SLOTS,
        num_nodes=(_COMPARED_NODES,),
        num_scored=(plan.num_logits_rows,),
        num_prefix=(_COMPARED_PREFIX,),
        vocab_sizes=(model.vocab_size,),
        temperatures=(sampling.temperature,),
        level_sizes=(min(32, plan.num_nodes),),
        path_lengths=(VISITED,),
        norms=tuple(dict.fromkeys(norm for each_model in models for norm in _norms_of(each_model))),
        int4_shapes=tuple(dict.fromkeys(_int4_shapes_of(draft, model.torch_device.type))),
        num_drafted=(MOST_ROWS,),
    )


def _int4_shapes_of(draft: TreeModel | None, place: str) -> Iterator[Int4Shape]:
    if draft is not None and draft.held is not None and draft.torch_device.type == place:
        for matrix in draft.held.for_kernel():
            width = matrix.shape[1]
            group = width // len(matrix.scale)
            block_rows = matrix.layout.block_rows
            yield Int4Shape(_COMPARED_COLUMNS, width, group, block_rows, matrix.scale.dtype)


def _heads_of(model: TreeModel) -> Heads:
    sizes = config_sizes(model.checkpoint)
    config = model.meta_model.config
    num_heads = sizes.get("num_attention_heads", 1)
    width = head_dim(sizes)
    # latent attention: queries have a part that turns and one that does not
    if "v_head_dim" in sizes:
        width = sizes.get("qk_nope_head_dim", 0) + sizes.get("qk_rope_head_dim", 0) or width
    return Heads(
        num_heads,
        num_heads if "v_head_dim" in sizes else sizes.get("num_key_value_heads", num_heads),
        width,
        sizes.get("v_head_dim", width),
        model.dtype,
        tuple(model.windows),
        getattr(config, "attn_logit_softcapping", None),
        any(name.endswith("sinks") for name, _ in model.meta_model.named_parameters()),
    )


def _norms_of(model: TreeModel) -> Iterator[Norm]:
    for module, form in find_norms(model.meta_model):
        # norms without a weight are those of queries and keys
        weight = getattr(module, "weight", None)
        width = _heads_of(model).width if weight is None else weight.shape[0]
        yield Norm(width, form, model.dtype, weight is not None)
