"""Coded weights: expanded just before their module runs, dropped after it.

Modules run one after another, so they share one scratch buffer, as large as the largest module's
weights. Streamed and resident weights keep their stored words; companions are prepared once.

Invariant: a parameter has numbers only while its module runs, and they are those of the bound
layer.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from offload.checkpoint.layout import SlabLayout, TensorPart, slab_layout
from offload.checkpoint.tensors import Coded
from offload.encoding.base import Coding
from offload.encoding.residuals import Residual
from offload.errors import UserError
from offload.kernels.expansion import REFERENCE, Expansion
from offload.model.linear import Linear, Products
from offload.model.parameters import ParameterPlace, view_of
from offload.units import rounded_up

_ALIGN_BYTES = 256
# rows that are expanded at once before they are placed between others
_WOVEN_ROWS = 64
Companions = Mapping[str, Tensor]
# the parts of one parameter, each with its place in the sent part of a slab
_Placed = Sequence[tuple[TensorPart, slice]]


class _Parameter(NamedTuple):
    """A parameter of a module, and the place of its words in its layer's slab."""

    place: ParameterPlace
    parts: _Placed
    scratch_lo: int
    # also in use while inner modules are expanded, so it is placed after theirs
    is_around: bool = False


class CodedWeight(NamedTuple):
    """A coded weight to be expanded: a parameter, or one part of it."""

    coding: Coding
    stored_B: Tensor
    companions: Companions
    shape: tuple[int, ...]
    # the type to expand into
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
        blocks: the layers.
        device: on which the model computes.
        dtype: the type in which it computes.
        records: slabs of experts that come one by one, expanded by `numbers`.

    Attributes:
        hooks: to remove when the model is closed.
    """

    def __init__(
        self,
        layouts: Sequence[SlabLayout],
        places: Sequence[Mapping[str, ParameterPlace]],
        blocks: Sequence[nn.Module],
        device: torch.device,
        dtype: torch.dtype,
        records: Sequence[SlabLayout] = (),
    ) -> None:
        self._device = device
        self._scratch_B = torch.zeros(0, dtype=torch.uint8)
        self._dtype = dtype
        self._sent: dict[int, Tensor] = {}
        coded = [words for layout in (*layouts, *records) for words in layout.coded.values()]
        self._parts = {word.part for words in coded for word in words}
        # a layer without coded weights is in no slab for `keep`
        bare = [part for part in self._parts if not _coded(part).companions]
        self._companions: dict[TensorPart, Companions] = {
            part: _coded(part).coding.prepare({}, part.entry.shape) for part in bare
        }
        self._expansion = REFERENCE
        self.hooks: list[Any] = []
        self._owned: dict[nn.Module, tuple[Callable[[], None], list[Any]]] = {}
        self._inner_bytes = max((self._end_of(record) for record in records), default=0)
        self._around_bytes = 0
        for layer, (layout, layer_places, block) in enumerate(
            zip(layouts, places, blocks, strict=True)
        ):
            self._hook_modules(layer, layout, layer_places, block)

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes of the largest module, and of the largest one around others."""
        return self._inner_bytes + self._around_bytes

    def set_expansion(self, expansion: Expansion) -> None:
        """Expand by these functions from now on."""
        self._expansion = expansion

    def keep(self, companions_of: Mapping[TensorPart, Companions]) -> None:
        """Keep those of these prepared companions that layers use, on the device that computes."""
        for part, companions in companions_of.items():
            if part in self._parts:
                sent = {name: tensor.to(self._device) for name, tensor in companions.items()}
                self._companions[part] = sent

    def allocate(self) -> None:
        """Allocate the scratch."""
        self._scratch_B = torch.zeros(self.scratch_bytes, dtype=torch.uint8, device=self._device)

    def has(self, part: TensorPart) -> bool:
        """Return True if a part's companions are kept."""
        return part in self._companions

    def companions(self, part: TensorPart) -> Companions:
        """Return a part's companions."""
        return self._companions[part]

    def bind(self, layer: int, sent: Tensor) -> None:
        """Let modules of `layer` expand from this slab until it is unbound."""
        self._sent[layer] = sent

    def unbind(self, layer: int) -> None:
        """Release the slab."""
        self._sent.pop(layer, None)

    def words(self, layout: SlabLayout, slab: np.ndarray) -> list[CodedWeight]:
        """Return all coded weights in a slab, for trials; nothing is bound."""
        sent = torch.from_numpy(slab).to(self._device)
        return [
            CodedWeight(
                _coded(part).coding,
                sent[words],
                self._companions[part],
                part.entry.shape,
                self._dtype,
            )
            for name in layout.coded
            for part, words in _placed(layout, name)
        ]

    def numbers(self, record: SlabLayout, sent: Tensor) -> dict[str, Tensor]:
        """Return all parameters of a record, valid until anything else is expanded."""
        plain = record.parameters
        weights = {name: view_of(sent, record, name).to(self._dtype) for name in plain}
        lo = 0
        for name in record.coded:
            parts = _placed(record, name)
            num_bytes = self._dtype.itemsize * _num_weights(parts)
            out = self._scratch_B[lo : lo + num_bytes].view(self._dtype)
            weights[name] = _expanded(parts, sent, self._companions, out, self._expansion)
            lo += rounded_up(num_bytes, _ALIGN_BYTES)
        return weights

    def _end_of(self, record: SlabLayout) -> int:
        nums = (_num_weights(_placed(record, name)) for name in record.coded)
        return sum(rounded_up(self._dtype.itemsize * num, _ALIGN_BYTES) for num in nums)

    def release(self, module: nn.Module) -> None:
        """Expand a module's parameters a last time, and remove its hooks.

        Their numbers are valid until another module's are expanded.
        """
        if module in self._owned:
            fill, hooks = self._owned.pop(module)
            fill()
            if isinstance(module, Linear):
                module.stored = None
            for hook in hooks:
                hook.remove()

    def settle(self) -> None:
        """Free companions and scratch once every module was released."""
        if not self._owned:
            self._companions = {}
            self._scratch_B = torch.empty(0, dtype=torch.uint8)

    def _hook_modules(
        self,
        layer: int,
        layout: SlabLayout,
        places: Mapping[str, ParameterPlace],
        block: nn.Module,
    ) -> None:
        """Make each module of a layer expand its coded weights just before it runs, by hooks.

        A plain `Linear` gets a `CodedMatrix` instead, which may multiply without expanding. Weights
        of modules that run around others have a scratch of their own, behind that of inner ones.
        """
        owned = defaultdict[nn.Module, list[tuple[str, ParameterPlace]]](list)
        for name in layout.coded:
            place = places[name]
            owned[_runs_with(name, place, block)].append((name, place))
        for module, named in owned.items():
            parameters = []
            end = 0
            is_around = any(inner in owned for inner in module.modules() if inner is not module)
            for name, place in named:
                parameters.append(_Parameter(place, _placed(layout, name), end, is_around))
                end += rounded_up(place.empty.nbytes, _ALIGN_BYTES)
            if is_around:
                self._around_bytes = max(self._around_bytes, end)
            else:
                self._inner_bytes = max(self._inner_bytes, end)
            if isinstance(module, Linear) and [place.key for _, place in named] == ["weight"]:
                module.stored = CodedMatrix(self, layer, parameters[0])
                self._owned[module] = partial(self._fill, layer, parameters), []
                continue
            fill = partial(self._fill, layer, parameters)
            clear = partial(self._clear, parameters)
            hooks = [
                module.register_forward_pre_hook(fill),
                module.register_forward_hook(clear, always_call=True),
            ]
            self.hooks += hooks
            self._owned[module] = fill, hooks

    def _fill(self, layer: int, parameters: Sequence[_Parameter], *_: Any) -> None:
        for parameter in parameters:
            place = parameter.place
            place.table[place.key] = self.expanded(layer, parameter)

    def expanded(self, layer: int, parameter: _Parameter) -> Tensor:
        """Return a parameter's numbers, valid until another module's are expanded."""
        place, parts, lo, is_around = parameter
        lo += self._inner_bytes if is_around else 0
        out = self._scratch_B[lo : lo + place.empty.nbytes].view(place.empty.dtype)
        shape = tuple(place.empty.shape)
        sent = self._sent[layer]
        return _expanded(parts, sent, self._companions, out, self._expansion, shape)

    def _clear(self, parameters: Sequence[_Parameter], *_: Any) -> None:
        for place, *_rest in parameters:
            place.table[place.key] = place.empty


class CodedMatrix(NamedTuple):
    """A coded matrix in place of a module's weight; see `StoredMatrix`."""

    weights: ExpandedWeights
    layer: int
    parameter: _Parameter

    def matmul(self, rows: Tensor, products: Products, bias: Tensor | None) -> Tensor:
        """See `StoredMatrix`."""
        return products.linear(rows, self.weights.expanded(self.layer, self.parameter), bias)


def companion_slabs(
    where: str,
    rest: Mapping[str, Sequence[TensorPart]],
    layouts: Mapping[str, SlabLayout],
) -> list["CompanionSlab"]:
    """Return slabs for all companions: one for each 4-bit copy, which is large, and one other.

    See `CompanionSlab`; `layouts` are of the slabs of layers, by what stands before the names in
    each, such as `model.layers.3.`.
    """
    layered = [
        (prefix + name, word.part)
        for prefix, layout in layouts.items()
        for name, words in layout.coded.items()
        for word in words
    ]
    others = [named for named in layered if not isinstance(_coded(named[1]).coding, Residual)]
    slabs = [CompanionSlab(where, rest, others)]
    slabs += [CompanionSlab(where, {}, [named]) for named in layered if named not in others]
    # empty if codings have no companions
    return [slab for slab in slabs if slab.layout.coded or slab.layout.parameters]


class CompanionSlab:
    """A slab that is read once: companions, and coded weights outside the layers.

    Args:
        where: the model, for messages.
        rest: the coded weights outside the layers, by name.
        layered: the coded weights of layers, by name.

    Attributes:
        layout: of all of it.
    """

    def __init__(
        self,
        where: str,
        rest: Mapping[str, Sequence[TensorPart]],
        layered: Sequence[tuple[str, TensorPart]],
    ) -> None:
        self._where = where
        self._rest = rest
        self._parts = [(name, part) for name, parts in rest.items() for part in parts]
        self._parts += layered
        companions = {
            f"{index}{suffix}": (entry.shape, [TensorPart(entry)])
            for index, (_, part) in enumerate(self._parts)
            for suffix, entry in _coded(part).companions
        }
        shapes = {name: (parts[0].entry.shape, parts) for name, parts in rest.items()}
        self.layout = slab_layout({**companions, **shapes})

    def companions(self, slab: np.ndarray) -> dict[TensorPart, Companions]:
        """Return all companions, prepared. Raises `UserError` for impossible ones."""
        flat = torch.from_numpy(slab)
        companions = dict[TensorPart, Companions]()
        for index, (name, part) in enumerate(self._parts):
            stored = {
                suffix: view_of(flat, self.layout, f"{index}{suffix}")
                for suffix, _ in _coded(part).companions
            }
            try:
                ready = _coded(part).coding.prepare(stored, part.entry.shape)
            except ValueError as error:
                raise UserError(f"{self._where}: {name}: {error}") from None
            # the slab can be freed
            companions[part] = {suffix: tensor.clone() for suffix, tensor in ready.items()}
        return companions

    def expanded(
        self,
        slab: np.ndarray,
        companions_of: Mapping[TensorPart, Companions],
        dtypes: Mapping[str, torch.dtype],
    ) -> dict[str, Tensor]:
        """Return the weights outside the layers in these types."""
        flat = torch.from_numpy(slab)
        weights = {}
        for name in self._rest:
            parts = _placed(self.layout, name)
            out = torch.empty(_num_weights(parts), dtype=dtypes[name])
            weights[name] = _expanded(parts, flat, companions_of, out, REFERENCE)
        return weights


def _runs_with(name: str, place: ParameterPlace, block: nn.Module) -> nn.Module:
    """Return the module whose pass uses a parameter of a layer.

    For parameters that a mixer reads without calling their module, such as its convolution, it is
    the mixer.
    """
    around = block
    for inner in name.split(".")[:-1]:
        if inner in getattr(around, "READ", ()):
            return around
        around = around.get_submodule(inner)
    return place.module


def _placed(layout: SlabLayout, name: str) -> _Placed:
    return [(words.part, layout.within_sent(words)) for words in layout.coded[name]]


def _num_weights(parts: _Placed) -> int:
    return sum(math.prod(part.entry.shape) for part, _ in parts)


def _coded(part: TensorPart) -> Coded:
    assert part.entry.coded is not None, "others are views"
    return part.entry.coded


def _expanded(
    parts: _Placed,
    sent: Tensor,
    companions_of: Mapping[TensorPart, Companions],
    out: Tensor,
    expansion: Expansion,
    shape: tuple[int, ...] | None = None,
) -> Tensor:
    """Return a parameter of this shape over the numbers in `out`; by default it has all rows."""
    for part, words in parts:
        _expand(part, sent[words], companions_of[part], out, expansion)
    first = parts[0][0]
    is_transposed = _coded(first).coding.is_transposed
    if shape is None:
        shape = (-1, *first.entry.shape[1:])
    elif is_transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    matrix = out.view(shape)
    return matrix.transpose(-1, -2) if is_transposed else matrix


def _expand(
    part: TensorPart, stored_B: Tensor, companions: Companions, flat: Tensor, expansion: Expansion
) -> None:
    """Fill one part of a parameter; `flat` holds the numbers of all parts."""
    shape = part.entry.shape
    coding, _, turn, num_woven = _coded(part)
    size = math.prod(shape)
    first = part.first - turn * size
    part_numbers = flat[first : first + num_woven * size]
    if num_woven == 1:
        coding.expand(stored_B, companions, part_numbers.view(shape), expansion)
        return
    row_RB = stored_B.view(shape[0], -1)
    own_RC = part_numbers.view(shape[0], num_woven, -1)[:, turn]
    for lo in range(0, shape[0], _WOVEN_ROWS):
        some = own_RC[lo : lo + _WOVEN_ROWS]
        numbers = some.new_empty((len(some), *shape[1:]))
        coding.expand(row_RB[lo : lo + _WOVEN_ROWS].flatten(), companions, numbers, expansion)
        some.copy_(numbers.view(some.shape))
