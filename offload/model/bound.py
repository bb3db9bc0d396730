"""A meta model and its weights: parameters are views of slabs, or expanded from them.

The model is built without storage. A decoder layer's parameters become views of a slab just before
it runs and are taken away right after; embeddings, final norm and head are bound once, as are all
layers of a model that stays. Coded weights have their numbers only while their module runs
(`expanded.py`). Invariant: a parameter is bound to the bytes of its own layer, or is empty.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offload.checkpoint.checkpoint import Checkpoint, compute_dtype_name
from offload.checkpoint.cuts import Section
from offload.checkpoint.layout import SlabLayout, Stack, TensorPart, is_coded, slab_layout
from offload.checkpoint.tensors import MIXTURE
from offload.encoding.base import Coding
from offload.kernels.expansion import Expansion
from offload.model.expanded import CodedWeight, ExpandedWeights, companion_slabs
from offload.model.experts import (
    Bring,
    Fetch,
    RoutedExperts,
    bring_to,
    drop_source,
    find_experts,
    sample_of,
)
from offload.model.layer_stacks import keep_section, layer_stacks
from offload.model.linear import take_rows_in_parts
from offload.model.mapping import sources_of_parameters
from offload.model.meta import build_meta_model, too_old
from offload.model.parameters import below, parameter_places, share, tables_around, view_of
from offload.model.quantised_draft import HeldWeights, require_copies, shared_copies
from offload.streaming.layers import LayerStream

# flat bytes, in host memory or on a device
Slab = np.ndarray | Tensor
_HOST = torch.device("cpu")
_ROUTED = re.compile(MIXTURE)


class BoundModel:
    """The meta model of one checkpoint, and the layouts of the slabs behind its parameters.

    Args:
        has_host_table: embedding tables stay in host memory, and passes send the few rows they
            need.
        adapt: changes the model before its weights are mapped.
        section: of the checkpoint's layers, and of what lies around them; None is the whole. See
            `SectionModel`.
        on_demand: routed experts are not part of their layers' slabs; see `bring_experts`.

    Attributes:
        layer_layouts: one slab per decoder layer.
        rest_layout: the slab of embeddings, final norm and head.
        experts: routed experts by layer, if they come on demand.
        encoder_layouts: one slab per layer that runs once per prompt, numbered behind the decoder.
        dtype: the compute type.
        torch_device: the device that computes.
        vocab_size: V, width of the logits.
        held: matrices of a draft in fewer bits than they are stored in; None where none are.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str,
        torch_device: torch.device,
        *,
        has_host_table: bool = False,
        section: Section | None = None,
        adapt: Callable[[nn.Module], None] | None = None,
        on_demand: bool = False,
    ) -> None:
        self.dtype: torch.dtype = getattr(torch, compute_dtype_name(checkpoint, dtype))
        self.checkpoint = checkpoint
        self.torch_device = torch_device
        self._table_device = _HOST if has_host_table else torch_device
        self.meta_model = build_meta_model(checkpoint, self.dtype)
        if adapt is not None:
            adapt(self.meta_model)

        # each parameter's name in the model, and its tensors in the files
        names = {module: f"{name}." for name, module in self.meta_model.named_modules()}
        inside = tuple(names[block] for stack in layer_stacks(self.meta_model) for block in stack)
        places = parameter_places(self.meta_model)
        wanted = {name: tuple(place.empty.shape) for name, place in places.items()}
        stored, shared = sources_of_parameters(checkpoint, self.meta_model, wanted)
        tied = (*shared, *shared.values())
        assert not any(name.startswith(inside) for name in tied), "layers share weights"
        source_of = {name: name for name in stored if not name.startswith(inside)} | shared
        if section is not None:
            keep_section(checkpoint, self.meta_model, section)
            table = names[self.meta_model.get_input_embeddings()]
            source_of = {
                name: source
                for name, source in source_of.items()
                if (section.has_table if name.startswith(table) else section.has_head)
            }

        # the remaining layers, an encoder's last, and the tables that stay on the host
        self._layers, *others = layer_stacks(self.meta_model)
        self._blocks = [block for stack in (self._layers, *others) for block in stack]
        self._tables = tables_around(self.meta_model, self._blocks) if has_host_table else []
        self._send_buffers()

        # slabs: one for each layer, one for the weights outside them, and one for coded weights
        # there
        self._layer_places = [below(places, names[block]) for block in self._blocks]
        self._rest_places = [(source, places[name]) for name, source in source_of.items()]
        self._lay_out([below(stored, names[block]) for block in self._blocks], on_demand=on_demand)
        coded = self._lay_out_rest({source: stored[source] for source in source_of.values()})
        self._expand_late(names, coded)
        self.held = HeldWeights(checkpoint.held.bits) if checkpoint.held else None
        self.vocab_size = int(self.meta_model.get_output_embeddings().weight.shape[0])
        self._views: dict[tuple[int, int], dict[str, Tensor]] = {}
        # otherwise weights would be expanded once for each part
        is_plain = self.held is None and not any(layout.coded for layout in self._layouts)
        if torch_device.type == "cpu" and is_plain:
            take_rows_in_parts(self._layers)

    def _lay_out_rest(self, rest: Mapping[str, Stack]) -> dict[str, Sequence[TensorPart]]:
        """Lay out the weights outside the layers that are not a target's; return the coded ones."""
        self._borrowed = _shared_sources(self.checkpoint, rest)
        unborrowed = {name: stack for name, stack in rest.items() if name not in self._borrowed}
        coded = {name: parts for name, (_, parts) in unborrowed.items() if is_coded(parts)}
        self.rest_layout = slab_layout(
            {name: stack for name, stack in unborrowed.items() if name not in coded}
        )
        return coded

    def _send_buffers(self) -> None:
        """Move what a family computes at construction (rotary frequencies) to where it is used."""
        for module in self.meta_model.modules():
            where = _HOST if module in self._tables else self.torch_device
            for key, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[key] = buffer.to(where)

    def _expand_late(
        self, names: Mapping[nn.Module, str], coded: Mapping[str, Sequence[TensorPart]]
    ) -> None:
        """Let modules expand coded weights just before they run, and those outside layers once."""
        layouts = dict(zip([names[block] for block in self._blocks], self._layouts, strict=True))
        records = {
            f"{names[routed.module]}{index}.": record
            for routed in self.experts
            for index, record in enumerate(routed.records)
        }
        self._companions = companion_slabs(self.checkpoint.name, coded, layouts | records)
        self._expanded = ExpandedWeights(
            self._layouts,
            self._layer_places,
            self._blocks,
            self.torch_device,
            self.dtype,
            [*records.values()],
        )
        self._expanded_rest: dict[str, Tensor] = {}
        self._hooks: list[Any] = self._expanded.hooks

    def _lay_out(self, stacks_of_blocks: Sequence[Mapping[str, Stack]], *, on_demand: bool) -> None:
        """Lay out the slab of every block from its own parameters, without experts on demand."""
        self._experts_of: dict[int, RoutedExperts] = {}
        self._layouts: list[SlabLayout] = []
        self._copies: list[dict[str, TensorPart]] = []
        self._copied_from: ExpandedWeights | None = None
        for layer, (block, stacks) in enumerate(zip(self._blocks, stacks_of_blocks, strict=True)):
            experts, routed = find_experts(block, stacks) if on_demand else (None, set())
            if experts is not None:
                self._experts_of[layer] = experts
            kept = {name: stack for name, stack in stacks.items() if name not in routed}
            if on_demand and any(map(_ROUTED.search, kept)):
                unknown = "experts that come one by one, which are made otherwise here"
                raise too_old(self.checkpoint, unknown, ", or give --experts layers")
            copies = shared_copies(self.checkpoint, kept)
            self._copies.append(copies)
            kept = {name: stack for name, stack in kept.items() if name not in copies}
            self._layouts.append(slab_layout(kept))
        self.experts = [*self._experts_of.values()]
        self.layer_layouts = self._layouts[: self.num_layers]
        self.encoder_layouts = self._layouts[self.num_layers :]

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def typical_layer(self) -> int:
        """Return a layer like most others: with its experts on demand, and with keys of its own."""
        return next((layer for layer in self._experts_of if not self._borrows_keys(layer)), 0)

    def _borrows_keys(self, layer: int) -> bool:
        attention = getattr(self._layers[layer], "self_attn", None)
        return bool(getattr(attention, "is_kv_shared_layer", False))

    def read_rest(self, fetch: Fetch, target: "BoundModel | None" = None) -> int:
        """Read and bind all but layers, and the layers' companions; return the bytes read.

        A draft's shared weights are its `target`'s. Raises `UserError` for impossible scales and
        the like, and what `fetch` raises.
        """
        dtypes = {source: place.empty.dtype for source, place in self._rest_places}
        for companions in self._companions:
            slab = fetch(companions.layout)
            companions_of = companions.companions(slab)
            self._expanded_rest |= companions.expanded(slab, companions_of, dtypes)
            self._expanded.keep(companions_of)
            # the next reads would else need additional memory
            del slab, companions_of
        self._expanded.allocate()
        if target is not None:
            self._copied_from = target._expanded
            copied = [part for copies in self._copies for part in copies.values()]
            require_copies(self.checkpoint, map(target._expanded.has, copied))
        if self._borrowed:
            assert target is not None, "what it shares is a target's"
            borrowed = [place for place in self._rest_places if place[0] in self._borrowed]
            places = [(self._name_in_target(name), place) for name, place in borrowed]
            share(target._rest_places, places, self.torch_device)
        if len(self._borrowed) < len({name for name, _ in self._rest_places}):
            self.bind_rest(fetch(self.rest_layout))
        return self.rest_bytes

    def _name_in_target(self, name: str) -> str:
        """Return the target's name of a parameter that a draft shares."""
        return name

    @property
    def rest_bytes(self) -> int:
        """Return the bytes that `read_rest` reads."""
        own_bytes = self.rest_layout.slab_bytes if self.rest_layout.parameters else 0
        return sum(slab.layout.slab_bytes for slab in self._companions) + own_bytes

    def bring_samples(self, fetch: Fetch) -> None:
        """Load a few experts of each layer, which stand for all of them in trials and timing."""
        if self.experts:
            self.bring_experts(sample_of(self.experts[0].records, fetch, self.torch_device))

    def bring_experts(self, bring: Bring) -> None:
        """Get routed experts from `bring`, which numbers layers by their places in `experts`."""
        for layer, experts in enumerate(self.experts):
            bring_to(experts, layer, bring, self._expanded.numbers)

    def drop_experts(self) -> None:
        """Release the source of experts: without `bring_experts` their layers cannot run."""
        for experts in self.experts:
            drop_source(experts)

    def set_expansion(self, expansion: Expansion) -> None:
        """Expand layers' coded weights by these functions from now on."""
        self._expanded.set_expansion(expansion)

    def codings_of(self, layer: int) -> list[Coding]:
        """Return the codings of a layer's weights; empty if all are plain."""
        groups = [words for layout in self._parts_of(layer) for words in layout.coded.values()]
        coded = [word.part.entry.coded for words in groups for word in words]
        return [storage.coding for storage in coded if storage is not None]

    def coded_words(self, layer: int, fetch: Fetch) -> list[CodedWeight]:
        """Return the coded weights of a layer, bound or not; for experts, those of the first."""
        parts = self._parts_of(layer)
        return [word for part in parts for word in self._expanded.words(part, fetch(part))]

    def _parts_of(self, layer: int) -> list[SlabLayout]:
        experts = self._experts_of.get(layer)
        return [self._layouts[layer], *(experts.records[:1] if experts else ())]

    @property
    def own_bytes(self) -> int:
        """Return the bytes of memory of bound weights, except for a target's."""
        borrowed = [place for name, place in self._rest_places if name in self._borrowed]
        theirs = {_storage(place.table[place.key]) for place in borrowed}
        bound = (weight for weight in self.meta_model.parameters() if not weight.is_meta)
        storages = {_storage(weight) for weight in bound} - theirs
        held_bytes = 0 if self.held is None else self.held.num_bytes
        return sum(num_bytes for _, num_bytes in storages) + held_bytes

    @property
    def layers_bytes(self) -> int:
        """Return the bytes that `bind_layers` reads."""
        return sum(layout.slab_bytes for layout in self._layouts)

    def bind_layers(self, fetch: Fetch, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Read all layers, one by one, and bind them permanently; a quantised draft rounds each.

        `on_bytes` is called with the bytes of each layer. Raises as `fetch` does.
        """
        for layer, layout in enumerate(self._layouts):
            self.bind_layer(layer, fetch(layout))
            if self.held is not None:
                for name, part in self._copies[layer].items():
                    assert self._copied_from is not None, "what it shares is a target's"
                    companions = self._copied_from.companions(part)
                    linear = self._layer_places[layer][name].module
                    self.held.share(linear, companions, part.entry.shape[0])
                # its slab can be freed then
                places = self._layer_places[layer].values()
                self.held.take_layer(self._blocks[layer], places, self._expanded)
                self._expanded.unbind(layer)
            on_bytes(layout.slab_bytes)
        if self.held is not None:
            self.held.settle()

    def bind_rest(self, slab: np.ndarray) -> None:
        """Bind embeddings, norm and head permanently; tied ones share one tensor."""
        flat = torch.from_numpy(slab)
        # the compute type, or float32 where a family requires it
        places = [(name, place) for name, place in self._rest_places if name not in self._borrowed]
        dtypes = {source: place.empty.dtype for source, place in reversed(places)}
        weights = {
            name: view_of(flat, self.rest_layout, name).to(dtypes[name])
            for name in self.rest_layout.parameters
        }
        weights |= self._expanded_rest
        self._expanded_rest = {}
        sent: dict[tuple[str, bool], Tensor] = {}
        for source, place in places:
            is_table = any(place.table is table._parameters for table in self._tables)
            if (source, is_table) not in sent:
                # A table that stays on the host is copied, so that the rest of its slab can go;
                # expanded, it has none.
                weight = weights[source]
                is_view = source in self.rest_layout.parameters
                kept = weight.clone() if is_table and is_view else weight
                sent[source, is_table] = kept if is_table else weight.to(self.torch_device)
            place.table[place.key] = nn.Parameter(sent[source, is_table], requires_grad=False)

    def bind_layer(self, layer: int, slab: Slab) -> None:
        """Make a layer's parameters views of `slab`, or copies if the types differ.

        Either slab is the part that is `sent`; a numpy array, as fetched, is moved to the device
        that computes. Views are cached by slab: there are few slots.
        """
        if isinstance(slab, np.ndarray):
            sent = torch.from_numpy(slab).to(self.torch_device)
            views = self._views_of(layer, sent)
        else:
            sent = slab
            key = (layer, slab.data_ptr())
            views = self._views[key] = self._views.get(key) or self._views_of(layer, slab)
        for name, view in views.items():
            place = self._layer_places[layer][name]
            # `to` would return the same tensor, but slowly
            is_same = view.dtype == place.empty.dtype
            place.table[place.key] = view if is_same else view.to(place.empty.dtype)
        self._expanded.bind(layer, sent)

    def _views_of(self, layer: int, sent: Tensor) -> dict[str, Tensor]:
        layout = self._layouts[layer]
        return {name: view_of(sent, layout, name) for name in layout.parameters}

    def unbind_layer(self, layer: int) -> None:
        """Release the slab that a layer's parameters are views of."""
        for place in self._layer_places[layer].values():
            place.table[place.key] = place.empty
        self._expanded.unbind(layer)

    def stream_layers(
        self, stream: LayerStream, on_layer: Callable[[int], None] = lambda layer: None
    ) -> None:
        """From now on take each layer's slab just before it runs, and release it afterwards.

        It is released even if the layer fails. Then `on_layer` is called for a decoder's layer; an
        encoder's layers are no part of a sweep.
        """

        def bind(index: int, *_: Any) -> None:
            self.bind_layer(index, stream.acquire(index))

        def give_back(index: int, *_: Any) -> None:
            self.unbind_layer(index)
            stream.release(index)
            if index < self.num_layers:
                on_layer(index)

        for index, layer in enumerate(self._blocks):
            behind = partial(give_back, index)
            self._hooks += [
                layer.register_forward_pre_hook(partial(bind, index)),
                layer.register_forward_hook(behind, always_call=True, prepend=True),
            ]

    def close(self) -> None:
        """Remove the hooks: they refer back to this model, a cycle that would keep weights alive."""
        while self._hooks:
            self._hooks.pop().remove()
        self._views.clear()
        self.drop_experts()


def _shared_sources(checkpoint: Checkpoint, rest: Mapping[str, Stack]) -> set[str]:
    """Return the parameters outside a draft's layers that belong to the target."""
    shared = {
        (entry.shard, entry.lo)
        for name, entry in checkpoint.tensors.items()
        if checkpoint.shares(name)
    }
    return {
        name
        for name, (_, parts) in rest.items()
        if any((part.entry.shard, part.entry.lo) in shared for part in parts)
    }


def _storage(tensor: Tensor | None) -> tuple[int, int]:
    """Return address and bytes of the memory in which a tensor lies."""
    assert tensor is not None, "it is bound"
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
