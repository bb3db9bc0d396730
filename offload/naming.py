"""Which tensors of a checkpoint make up which parameter of the model.

Mostly they are one and the same. Where transformers fuses what the file keeps apart (the experts of a layer), its own
conversion table says how; stacking and row-wise joining are placements of bytes and can be streamed, anything that
would have to compute is refused.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from offload.checkpoint import ITEM_BYTES, Checkpoint, TensorEntry
from offload.errors import UserError
from offload.layout import Part

Shape = tuple[int, ...]
Sources = dict[str, tuple[Shape, list[Part]]]
_Found = list[tuple[str | None, str, TensorEntry]]  # (pattern of the converter, name in the file, place in the file)


def sources_of_parameters(checkpoint: Checkpoint, model: PreTrainedModel, shapes: Mapping[str, Shape]) -> Sources:
    """Shape and parts of each wanted parameter.

    Args:
        model: the skeleton; its class and type select the conversion table.
        shapes: shape of every parameter to be filled, by its name in the model.

    Raises:
        UserError: a tensor is missing, of another shape or type than bf16, fp16 or fp32, or would need computing.
    """
    transforms = get_model_conversion_mapping(model)
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, _Found] = defaultdict(list)
    for name, entry in checkpoint.tensors.items():
        renamed, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, dict.fromkeys(shapes)
        )
        found[renamed].append((pattern, name, entry))
    return {
        parameter: (shape, _parts(checkpoint, parameter, shape, found.get(parameter, []), by_pattern))
        for parameter, shape in shapes.items()
    }


def _parts(
    checkpoint: Checkpoint, parameter: str, shape: Shape, found: _Found, by_pattern: Mapping[str, WeightConverter]
) -> list[Part]:
    where = checkpoint.directory.name
    if not found:
        raise UserError(f"{where}: tensor {parameter} is missing: download the checkpoint again")
    unknown = next((f"{name} is {e.dtype}" for _, name, e in found if e.dtype not in ITEM_BYTES), None)
    if unknown:
        raise UserError(f"{where}: weights must be bf16, fp16 or fp32, {unknown}: use an unquantised checkpoint")
    pattern = found[0][0]
    if pattern is None:
        parts = [Part(found[0][2])]
        fits = found[0][2].shape == shape
    else:
        parts = _fused(where, parameter, found, by_pattern[pattern])
        fits = all(part.entry.shape[-1] == shape[-1] for part in parts)
    num_bytes = sum(part.entry.hi - part.entry.lo for part in parts)
    if not fits or num_bytes != math.prod(shape) * ITEM_BYTES[parts[0].entry.dtype]:
        shapes = sorted({str(list(part.entry.shape)) for part in parts})
        raise UserError(f"{where}: {parameter} must have shape {list(shape)}, the file has {' and '.join(shapes)}: "
                        "config.json and weights do not belong together")  # fmt: skip
    return parts


def _fused(where: str, parameter: str, found: _Found, converter: WeightConverter) -> list[Part]:
    """Parts of a stack of experts: expert by expert, and within one expert in the order of the converter's patterns."""
    kinds = [(type(step), getattr(step, "dim", None)) for step in converter.operations]
    if kinds not in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)], [(Concatenate, 0)]):
        raise UserError(f"{where}: {parameter} is stored in a form that must be computed, which cannot be streamed: "
                        "save the model once with save_pretrained")  # fmt: skip
    by_pattern = {pattern: _natural_order(found, pattern) for pattern in converter.source_patterns}
    parts, offset_bytes = [], 0
    for experts in zip(*(column for column in by_pattern.values() if column), strict=True):
        for entry in experts:
            parts.append(Part(entry, offset_bytes))
            offset_bytes += entry.hi - entry.lo
    return parts


def _natural_order(found: _Found, pattern: str) -> Sequence[TensorEntry]:
    """Tensors of one pattern with expert 2 before expert 10."""
    rows = [(re.sub(r"\d+", lambda m: m[0].zfill(8), name), entry) for own, name, entry in found if own == pattern]
    return [entry for _, entry in sorted(rows)]
