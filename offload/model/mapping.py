"""Maps each parameter to the tensors of a checkpoint that make it up.

Mostly each is one tensor. Where transformers fuses tensors of the file (experts), its conversion
table says how. Stacking and joining rows can be streamed; anything that needs computing is refused.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NoReturn

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.layout import TensorPart, slice_of
from offload.checkpoint.small_files import is_wrapper
from offload.checkpoint.tensors import ROWS, TensorEntry
from offload.encoding.base import AGAIN, ENCODINGS
from offload.errors import UserError
from offload.model.library import (
    Concatenate,
    MergeModulelist,
    PreTrainedModel,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
    rename_source_key,
)

_COMPUTED = "in a form that must be computed, which cannot be streamed"
_UNKNOWN = "use another checkpoint of this model"
_EXPERT = re.compile(r"\bexperts\.(\d{1,9})\.")
_RESAVE = "save the model once with save_pretrained"
Shape = tuple[int, ...]
# (pattern of the converter, name in the file, entry in the file)
_Found = list[tuple[str | None, str, TensorEntry]]


def sources_of_parameters(
    checkpoint: Checkpoint, model: PreTrainedModel, shapes: dict[str, Shape]
) -> tuple[dict[str, tuple[Shape, list[TensorPart]]], dict[str, str]]:
    """Return the tensors of every parameter; `shapes` are by the model's names.

    Return shape and parts of each stored parameter, and for each tied one the stored one that it
    shares. Each parameter is in exactly one of the two.

    Raises:
        UserError: a tensor is missing, of another shape or type than bf16, fp16 or fp32, or would
        need computing.
    """
    table = _Table(get_model_conversion_mapping(model))
    # an inner model has a table of its own
    kind = checkpoint.config["model_type"] if is_wrapper(checkpoint.config) else None
    whole = _Table((get_checkpoint_conversion_mapping(kind) if kind else None) or [])
    by_pattern = {**whole.by_pattern, **table.by_pattern}
    entries_of: dict[str, _Found] = defaultdict(list)
    for full, entry in checkpoint.tensors.items():
        name, rows, _ = full.partition(ROWS)
        name = _EXPERT.sub("experts.", name) if rows else name
        renamed, pattern = table.renamed(name, model.base_model_prefix, shapes)
        if renamed not in shapes:
            inner, inner_pattern = whole.renamed(name, model.base_model_prefix, shapes)
            inner = inner.replace("language_model.", "", 1)
            renamed, pattern = (inner, inner_pattern) if inner in shapes else (renamed, pattern)
        entries_of[renamed].append((rows or pattern, full, entry))
    shared = _shared(entries_of, model.all_tied_weights_keys)
    where = checkpoint.name
    for name in shapes:
        if name not in shared and not entries_of[name]:
            _refuse_missing(name, checkpoint)
    stored = {
        name: (shape, _parts(where, name, shape, entries_of[name], by_pattern))
        for name, shape in shapes.items()
        if name not in shared
    }
    return stored, shared


def _refuse_missing(parameter: str, checkpoint: Checkpoint) -> NoReturn:
    """Raise `UserError` for a parameter that the file lacks, with what it has in its place."""
    lacking = f"{checkpoint.name}: tensor {parameter} is missing"
    other = next((name for name in checkpoint.tensors if name.endswith(f".{parameter}")), None)
    # as `torch.compile` and wrappers for training name it
    if other is not None:
        raise UserError(f"{lacking}, the file has {other}: {_RESAVE}, from inside of its wrapper")
    if parameter == "lm_head.weight":
        without = "a model that embeds or classifies has none, take one that writes"
        raise UserError(f"{lacking}: {without}, or {AGAIN}")
    raise UserError(f"{lacking}: {AGAIN}")


class _Table:
    """transformers' renamings and conversions of a file's tensors."""

    def __init__(self, transforms: Sequence[WeightTransform]) -> None:
        self._renamings = [
            transform for transform in transforms if isinstance(transform, WeightRenaming)
        ]
        self._converters = [
            transform for transform in transforms if isinstance(transform, WeightConverter)
        ]
        self.by_pattern = {
            name: converter for converter in self._converters for name in converter.source_patterns
        }

    def renamed(self, name: str, prefix: str, shapes: dict[str, Shape]) -> tuple[str, str | None]:
        """Return a tensor's parameter, and the pattern of its converter.

        A renaming to no parameter is undone, as in transformers.
        """
        renamed = rename_source_key(name, self._renamings, self._converters, prefix, shapes)
        return (name, None) if renamed[0] not in shapes and name in shapes else renamed


def _shared(entries_of: Mapping[str, _Found], tied: Mapping[str, str]) -> dict[str, str]:
    """Return tied parameters that the file lacks, and the stored one of their group.

    As in transformers, the file decides: what it stores separately is not tied, whatever the config
    says.
    """
    groups: dict[str, list[str]] = {}
    for name, source in tied.items():
        groups.setdefault(source, [source]).append(name)
    shared: dict[str, str] = {}
    for group in groups.values():
        stored = [name for name in group if name in entries_of]
        shared |= {name: stored[0] for name in group if stored and name not in entries_of}
    return shared


def _parts(
    where: str,
    parameter: str,
    shape: Shape,
    sources: _Found,
    by_pattern: Mapping[str, WeightConverter],
) -> list[TensorPart]:
    """Return the tensors that make up a parameter. Raises `UserError` for contradictions."""
    for _, name, entry in sources:
        if entry.coded is None and entry.dtype not in ENCODINGS:
            requirement = f"{where}: weights must be bf16, fp16, fp32 or quantised"
            raise UserError(f"{requirement}, {name} is {entry.dtype}: {_UNKNOWN}")
    pattern = sources[0][0]
    is_converted = {of_converter is not None for of_converter, _, _ in sources}
    if len(is_converted) > 1 or (pattern is None and len(sources) > 1):
        names = " and ".join(name for _, name, _ in sources[:2])
        raise UserError(f"{where}: {names} are both stored for {parameter}: {_RESAVE}")
    if pattern is None:
        entries = [sources[0][2]]
    elif pattern == ROWS:
        entries = [*_natural_order(sources, ROWS)]
    else:
        entries = _fused(where, parameter, sources, by_pattern[pattern])
    parts = _placed(shape, entries, is_whole=pattern is None)
    if parts is not None:
        return parts
    # a stack's experts, or one of them, transposed
    turned = (*shape[:-2], *shape[:-3:-1])
    if len(shape) == 3 and entries[0].shape in (turned, turned[1:]):
        raise UserError(f"{where}: {parameter} is stored transposed, {_COMPUTED}: {_RESAVE}")
    shapes = " and ".join(sorted({str(list(entry.shape)) for entry in entries}))
    complaint = f"{where}: {parameter} must have shape {list(shape)}, the file has {shapes}"
    raise UserError(f"{complaint}: config.json and weights do not belong together")


def _placed(
    shape: Shape, entries: Sequence[TensorEntry], *, is_whole: bool
) -> list[TensorPart] | None:
    """Place the tensors one after the other; None if they do not fill the parameter."""
    parts = []
    first = 0
    for entry in entries:
        coding = None if entry.coded is None else entry.coded.coding
        stored_shape = shape
        if coding is not None and coding.is_transposed:
            stored_shape = (*shape[:-2], shape[-1], shape[-2])
        # rows of the parameter; headers may not give a coded one's width
        if entry.coded is not None and entry.coded.num_woven > 1:
            width = (
                stored_shape[-1] if len(stored_shape) > 2 else shape[-1] // entry.coded.num_woven
            )
            stored_shape = (*entry.shape[:-1], width)
        elif not is_whole:
            rows = entry.shape[:-1] or (entry.shape[0] // shape[-1],)
            stored_shape = (*rows, shape[-1])
        # Columns of coded weights may be padded, so bytes decide; some headers only have counts.
        fits = entry.shape == stored_shape
        if coding is not None:
            fits = len(entry.shape) < 2 or entry.shape[:-1] == stored_shape[:-1]
        if (
            not fits
            or (coding or ENCODINGS[entry.dtype]).stored_bytes(stored_shape) != entry.num_bytes
        ):
            return None
        parts.append(TensorPart(entry._replace(shape=stored_shape), first))
        first += math.prod(stored_shape)
    return parts if first == math.prod(shape) else None


def _fused(
    where: str, parameter: str, sources: _Found, converter: WeightConverter
) -> list[TensorEntry]:
    """Return the tensors of a fused parameter: expert by expert, in the converter's order."""
    merged = (MergeModulelist, 0)
    kinds = [(type(step), getattr(step, "dim", None)) for step in converter.operations]
    known = ([merged], [merged, (Concatenate, 1)], [(Concatenate, 0)], [(Concatenate, 1)])
    if kinds not in known:
        raise UserError(f"{where}: {parameter} is stored {_COMPUTED}: {_RESAVE}")
    dtypes = sorted({entry.dtype for _, _, entry in sources})
    if len(dtypes) > 1 and any(entry.coded is None for _, _, entry in sources):
        complaint = f"{where}: {parameter} is made of tensors in {' and '.join(dtypes)}"
        raise UserError(f"{complaint}: {_RESAVE}")
    if kinds[0] == merged:
        _check_numbers(where, parameter, sources)
    columns = [_natural_order(sources, pattern) for pattern in converter.source_patterns]
    columns = [column for column in columns if column]
    if len({len(column) for column in columns}) > 1:
        raise UserError(f"{where}: a tensor that {parameter} is made of is missing: {AGAIN}")
    for column in columns:
        shapes = sorted({str(list(entry.shape)) for entry in column})
        if len(shapes) > 1:
            complaint = f"{where}: all experts of {parameter} must have one shape, the file has"
            raise UserError(f"{complaint} {shapes[0]} and {shapes[-1]}: {AGAIN}")
    # within an expert the rows of two stacks alternate
    if kinds == [(Concatenate, 1)]:
        stacks = [stack for (stack,) in columns]
        for stack in stacks:
            if len(stack.shape) != 3 or not stack.shape[0] or stack.num_bytes % stack.shape[0]:
                raise UserError(f"{where}: {parameter} is stored {_COMPUTED}: {_RESAVE}")
        columns = [
            [slice_of(stack, expert, stack.shape[0]) for expert in range(stack.shape[0])]
            for stack in stacks
        ]
    return [entry for experts in zip(*columns, strict=True) for entry in experts]


def _check_numbers(where: str, parameter: str, sources: _Found) -> None:
    """Require experts 0, 1, 2, ... of each pattern: after a gap all would be misplaced."""
    numbers = defaultdict[str | None, list[int]](list)
    for pattern, name, _ in sources:
        numbers[pattern] += map(int, _EXPERT.findall(name)[-1:])
    for places in numbers.values():
        lost = min({*range(len(places))} - {*places}, default=None)
        if lost is not None:
            complaint = f"{where}: {parameter} must be made of experts 0 to {len(places) - 1}"
            raise UserError(f"{complaint}, the file has {max(places)} and not {lost}: {AGAIN}")


def _natural_order(sources: _Found, pattern: str) -> Sequence[TensorEntry]:
    """Return the tensors of one pattern, expert 2 before expert 10."""
    rows = [
        (re.sub(r"\d+", lambda m: m[0].zfill(8), name), entry)
        for source_pattern, name, entry in sources
        if source_pattern == pattern
    ]
    return [entry for _, entry in sorted(rows)]
