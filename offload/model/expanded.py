"""Weights that are stored coded: expanded just before their module runs, gone after it.

Modules run one after another, so one scratch serves all of them: it is as large as what the largest
module owns. What is streamed and what stays are words as they are stored; companions are prepared
once.

Invariant: a parameter has numbers only while its module runs, and these are those of the layer that
is bound.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from offload.checkpoint.layout import SlabLayout, TensorPart, Words, slab_layout
from offload.checkpoint.tensors import Coded
from offload.encoding.base import Coding
from offload.errors import UserError
from offload.kernels.expansion import REFERENCE, Expansion
from offload.model.mapping import ParameterSlot, view_of

_ALIGN_BYTES = 256
# Rows that are expanded at once before they are laid between others.
_WOVEN_ROWS = 64
Companions = Mapping[str, Tensor]


class _Parameter(NamedTuple):
    """A parameter of a module, and where its words lie in the slab of its layer."""

    place: ParameterSlot
    # each with its place in what was sent of the slab
    parts: Sequence[tuple[TensorPart, slice]]
    scratch_lo: int
    # in use while modules inside of its own are expanded, and so behind what those take
    is_around: bool = False


class CodedWeight(NamedTuple):
    """Coded weights where they are expanded: a parameter, or one part of it."""

    coding: Coding
    stored_B: Tensor
    companions: Companions
    shape: tuple[int, ...]
    # the type that is expanded into
    dtype: torch.dtype

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape)

    def expand(self, out: Tensor, expansion: Expansion) -> None:
        """Fill `out` with the numbers."""
        self.coding.expand(self.stored_B, self.companions, out, expansion)


class ExpandedWeights:
    """The coded parameters of a model's layers.

    Args:
        layouts: of the slabs of all layers, by number.
        places: of their parameters, by name within the layer.
        where: the device on which the model computes.
        dtype: the type in which it computes.
        records: slabs of what comes by itself, and is expanded by `numbers`.

    Attributes:
        hooks: what has to be taken off when the model is closed.
    """

    def __init__(
        self,
        layouts: Sequence[SlabLayout],
        places: Sequence[Mapping[str, ParameterSlot]],
        where: torch.device,
        dtype: torch.dtype,
        records: Sequence[SlabLayout] = (),
    ) -> None:
        self._where = where
        self._scratch_B = torch.zeros(0, dtype=torch.uint8)
        self._dtype = dtype
        self._sent: dict[int, Tensor] = {}
        coded = [words for layout in (*layouts, *records) for words in layout.coded.values()]
        self._parts = [one.part for words in coded for one in words]
        self._companions: Mapping[TensorPart, Companions] = {}
        self._expansion = REFERENCE
        self.hooks: list[Any] = []
        self._owned: dict[nn.Module, tuple[Callable[[], None], list[Any]]] = {}
        self._inner_bytes = max((self._end_of(record) for record in records), default=0)
        self._around_bytes = 0
        for layer, (layout, own) in enumerate(zip(layouts, places, strict=True)):
            self._hook_modules(layer, layout, own)

    @property
    def scratch_bytes(self) -> int:
        """Return what the largest module needs, and the largest around others."""
        return self._inner_bytes + self._around_bytes

    def expand_with(self, expansion: Expansion) -> None:
        """Expand by these functions from now on."""
        self._expansion = expansion

    def keep(self, companions_of: Mapping[TensorPart, Companions]) -> None:
        """Keep prepared companions of the layers' words where the model computes.

        Also allocates the scratch to expand into.
        """
        self._companions = {
            part: {name: tensor.to(self._where) for name, tensor in companions_of[part].items()}
            for part in self._parts
        }
        self._scratch_B = torch.zeros(self.scratch_bytes, dtype=torch.uint8, device=self._where)

    def bind(self, layer: int, sent: Tensor) -> None:
        """Let modules of `layer` expand from this slab until it is unbound."""
        self._sent[layer] = sent

    def unbind(self, layer: int) -> None:
        """Let go of the slab."""
        self._sent.pop(layer, None)

    def words(self, layout: SlabLayout, slab: np.ndarray) -> list[CodedWeight]:
        """Return all that is expanded of a slab, to try functions on; nothing is bound."""
        sent = torch.from_numpy(slab[layout.sent]).to(self._where)
        return [
            CodedWeight(
                _coded(one.part).coding,
                sent[_within(layout, one.part, one.slab_lo)],
                self._companions[one.part],
                one.part.entry.shape,
                self._dtype,
            )
            for several in layout.coded.values()
            for one in several
        ]

    def numbers(self, record: SlabLayout, sent: Tensor) -> dict[str, Tensor]:
        """Return all parameters of a record.

        What was coded is valid until anything else is expanded.
        """
        # none of this is a product for a torch-function mode to watch
        with torch._C.DisableTorchFunction():
            weights = {
                name: view_of(sent, record, name).to(self._dtype) for name in record.parameters
            }
            lo = 0
            for name, several in record.coded.items():
                num_bytes = self._dtype.itemsize * _num_weights(several)
                out = self._scratch_B[lo : lo + num_bytes].view(self._dtype)
                for one in several:
                    words = sent[_within(record, one.part, one.slab_lo)]
                    _expand(one.part, words, self._companions[one.part], out, self._expansion)
                shape = several[0].part.entry.shape
                if len(several) > 1:
                    shape = (-1, *shape[1:])
                weights[name] = _as_in_model(several[0].part, out, shape)
                lo += _up(num_bytes)
        return weights

    def _end_of(self, record: SlabLayout) -> int:
        return sum(
            _up(self._dtype.itemsize * _num_weights(several)) for several in record.coded.values()
        )

    def release(self, module: nn.Module) -> None:
        """Expand a module's parameters a last time, and take its hooks off.

        Their numbers are valid until those of another module are expanded.
        """
        if module in self._owned:
            fill, hooks = self._owned.pop(module)
            fill()
            for hook in hooks:
                hook.remove()

    def settle(self) -> None:
        """Drop companions and scratch once every module was released."""
        if not self._owned:
            self._companions = {}
            self._scratch_B = torch.empty(0, dtype=torch.uint8)

    def _hook_modules(
        self, layer: int, layout: SlabLayout, places: Mapping[str, ParameterSlot]
    ) -> None:
        owned = defaultdict[nn.Module, list[tuple[str, ParameterSlot]]](list)
        for name in layout.coded:
            owned[_runs_with(name, places)].append((name, places[name]))
        for module, named in owned.items():
            parameters = []
            end = 0
            is_around = any(inner in owned for inner in module.modules() if inner is not module)
            for name, place in named:
                parts = [
                    (one.part, _within(layout, one.part, one.slab_lo)) for one in layout.coded[name]
                ]
                parameters.append(_Parameter(place, parts, end, is_around))
                end += _up(place.empty.numel() * place.empty.element_size())
            if is_around:
                self._around_bytes = max(self._around_bytes, end)
            else:
                self._inner_bytes = max(self._inner_bytes, end)
            fill = partial(self._fill, layer, parameters)
            hooks = [module.register_forward_pre_hook(fill)]
            hooks.append(
                module.register_forward_hook(partial(self._clear, parameters), always_call=True)
            )
            self.hooks += hooks
            self._owned[module] = fill, hooks

    def _fill(self, layer: int, parameters: Sequence[_Parameter], *_: Any) -> None:
        sent = self._sent[layer]
        # none of this is a product for a torch-function mode to watch
        with torch._C.DisableTorchFunction():
            for place, parts, lo, is_around in parameters:
                lo += self._inner_bytes if is_around else 0
                out = self._scratch_B[lo : lo + place.empty.numel() * place.empty.element_size()]
                out = out.view(place.empty.dtype)
                for part, words in parts:
                    _expand(part, sent[words], self._companions[part], out, self._expansion)
                first = parts[0][0]
                shape = first.entry.shape if len(parts) == 1 else _stored_shape(first, place)
                place.table[place.key] = _as_in_model(first, out, shape)

    def _clear(self, parameters: Sequence[_Parameter], *_: Any) -> None:
        for place, *_rest in parameters:
            place.table[place.key] = place.empty


class CompanionScratch:
    """What is read once, transformed and let go: companions, and coded weights around the layers.

    Args:
        where: names the model.
        rest: the coded weights around the layers, by name.
        layouts: of the slabs of layers, by what stands before the names in each, such as
            `model.layers.3.`.

    Attributes:
        layout: of all of it.
    """

    def __init__(
        self,
        where: str,
        rest: Mapping[str, Sequence[TensorPart]],
        layouts: Mapping[str, SlabLayout],
    ) -> None:
        self._where = where
        self._rest = rest
        layers = [
            {prefix + name: [one.part for one in words] for name, words in layout.coded.items()}
            for prefix, layout in layouts.items()
        ]
        self._parts = [
            (name, part) for own in (rest, *layers) for name, parts in own.items() for part in parts
        ]
        companions = {
            f"{index}{suffix}": (entry.shape, [TensorPart(entry)])
            for index, (_, part) in enumerate(self._parts)
            for suffix, entry in _coded(part).companions
        }
        shapes = {name: (parts[0].entry.shape, parts) for name, parts in rest.items()}
        self.layout = slab_layout({**companions, **shapes})

    def companions(self, slab: np.ndarray) -> dict[TensorPart, Companions]:
        """Return the companions of all coded weights, prepared.

        Raises `UserError` where they cannot be right.
        """
        flat = torch.from_numpy(slab[self.layout.sent])
        found = dict[TensorPart, Companions]()
        for index, (name, part) in enumerate(self._parts):
            own = {
                suffix: view_of(flat, self.layout, f"{index}{suffix}")
                for suffix, _ in _coded(part).companions
            }
            try:
                ready = _coded(part).coding.prepare(own, part.entry.shape)
            except ValueError as error:
                raise UserError(f"{self._where}: {name}: {error}") from None
            # the slab can go
            found[part] = {suffix: tensor.clone() for suffix, tensor in ready.items()}
        return found

    def expanded(
        self,
        slab: np.ndarray,
        companions_of: Mapping[TensorPart, Companions],
        dtypes: Mapping[str, torch.dtype],
    ) -> dict[str, Tensor]:
        """Return the weights around the layers, in these types."""
        flat = torch.from_numpy(slab[self.layout.sent])
        weights = {}
        for name, parts in self._rest.items():
            out = torch.empty(
                sum(math.prod(part.entry.shape) for part in parts), dtype=dtypes[name]
            )
            for one in self.layout.coded[name]:
                words = flat[_within(self.layout, one.part, one.slab_lo)]
                _expand(one.part, words, companions_of[one.part], out, REFERENCE)
            weights[name] = _as_in_model(parts[0], out, parts[0].entry.shape)
        return weights


def _runs_with(name: str, places: Mapping[str, ParameterSlot]) -> nn.Module:
    """Return the module whose pass uses a parameter: of a convolution in a recurrent layer that is
    the one around it, which takes its weights and never calls it.
    """
    own = places[name].module
    around = name.rpartition(".")[0].rpartition(".")[0]
    if not isinstance(own, nn.Conv1d):
        return own
    return next(
        (slot.module for other, slot in places.items() if other.rpartition(".")[0] == around), own
    )


def _num_weights(several: Sequence[Words]) -> int:
    return sum(math.prod(one.part.entry.shape) for one in several)


def _up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _coded(part: TensorPart) -> Coded:
    assert part.entry.coded is not None, "others are views"
    return part.entry.coded


def _expand(
    part: TensorPart, stored_B: Tensor, companions: Companions, flat: Tensor, expansion: Expansion
) -> None:
    """Fill one part of a parameter; `flat` has the numbers of all parts."""
    shape = part.entry.shape
    coding, _, turn, num_woven = _coded(part)
    size = math.prod(shape)
    first = part.first - turn * size
    own = flat[first : first + num_woven * size]
    if num_woven == 1:
        coding.expand(stored_B, companions, own.view(shape), expansion)
        return
    row_RB = stored_B.view(shape[0], -1)
    own_RC = own.view(shape[0], num_woven, -1)[:, turn]
    for lo in range(0, shape[0], _WOVEN_ROWS):
        some = own_RC[lo : lo + _WOVEN_ROWS]
        numbers = some.new_empty((len(some), *shape[1:]))
        coding.expand(row_RB[lo : lo + _WOVEN_ROWS].flatten(), companions, numbers, expansion)
        some.copy_(numbers.view(some.shape))


def _stored_shape(part: TensorPart, place: ParameterSlot) -> tuple[int, ...]:
    """Return the shape in which all parts of a parameter lie behind each other."""
    shape = tuple(place.empty.shape)
    is_transposed = _coded(part).coding.is_transposed
    return (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape


def _as_in_model(part: TensorPart, flat: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a matrix of this shape as stored, transposed where its coding is."""
    matrix = flat.view(tuple(shape))
    return matrix.transpose(-1, -2) if _coded(part).coding.is_transposed else matrix


def _within(layout: SlabLayout, part: TensorPart, slab_lo: int) -> slice:
    lo = slab_lo - layout.lead_bytes
    return slice(lo, lo + part.entry.num_bytes)
