"""A Hugging Face causal language model whose weights are streamed: its own forward, over bytes that we place.

The model is built without storage. A decoder layer's parameters become views of a slab just before it runs and are
taken away right after; embeddings, final norm and head are bound once. So what is computed is what transformers does.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offload.checkpoint.layout import SlabLayout, is_coded, slab_layout
from offload.checkpoint.safetensors import Checkpoint, compute_dtype_name
from offload.checkpoint.section import Section
from offload.errors import UserError
from offload.kernels.expansion import Expansion
from offload.kernels.kv_commit import kv_commit_reference
from offload.model import attention
from offload.model.expanded import Beside, ExpandedWeights
from offload.model.held import HeldWeights
from offload.model.invariance import InvariantRows
from offload.model.kv_cache import KVCache
from offload.model.mapping import sources_of_parameters
from offload.model.meta import attention_windows, build_meta_model, cut_stack, keep_section, layer_stacks
from offload.model.path_attention import PathRows, path_rows
from offload.model.places import below, parameter_places, share, tables_around, view_of
from offload.sampling.logits import Logits

Slab = np.ndarray | Tensor  # flat bytes, in host memory or on a device
Masks = Mapping[int | None, Tensor | attention.TreeRows | PathRows | None]  # by window; None where nothing is masked
# token_T, position_U, ancestor_TU, cache, num_logits -> logits, or None to decline
Replay = Callable[[Tensor, Tensor, Tensor, KVCache, int], Tensor | None]
_HOST = torch.device("cpu")


class StreamedModel:
    """The meta model of one checkpoint, and the layouts of the slabs that its parameters are views of.

    Args:
        has_host_table: embedding tables stay in host memory; the few rows that a pass needs are sent.
        adapt: changes the model before its weights are looked for.
        section: of the checkpoint's layers, and of what lies around them; None is the whole. See `SectionModel`.

    Attributes:
        layer_layouts: one slab per decoder layer; `rest_layout`: embeddings, final norm, head.
        encoder_layouts: one slab per layer that runs once per prompt; their numbers follow those of the decoder.
        dtype: in which it computes; `place`: where.
        vocab_size: V, width of the logits.
        held: matrices of a draft in fewer bits than they are stored in; None where none are.
        start: ids that stand between a prompt and the new text; an encoder has read the prompt.
    """

    start: tuple[int, ...] = ()

    def __init__(
        self, checkpoint: Checkpoint, dtype: str = "auto", place: torch.device = _HOST, *,
        has_host_table: bool = False, section: Section | None = None,
        adapt: Callable[[nn.Module], None] = lambda meta_model: None,
    ) -> None:  # fmt: skip
        self.dtype: torch.dtype = getattr(torch, compute_dtype_name(checkpoint, dtype))
        self.checkpoint, self.place = checkpoint, place
        self._table_place = _HOST if has_host_table else place
        self._send_by: Callable[[Tensor], Tensor] = lambda tensor: tensor.to(place)
        self.meta_model = build_meta_model(checkpoint, self.dtype)
        adapt(self.meta_model)
        names = {module: f"{name}." for name, module in self.meta_model.named_modules()}
        inside = tuple(names[block] for stack in layer_stacks(self.meta_model) for block in stack)
        places = parameter_places(self.meta_model)
        wanted = {name: tuple(place.empty.shape) for name, place in places.items()}
        stored, shared = sources_of_parameters(checkpoint, self.meta_model, wanted)
        assert not any(name.startswith(inside) for name in (*shared, *shared.values())), "layers share weights"
        source_of = {name: name for name in stored if not name.startswith(inside)} | shared
        if section is not None:
            keep_section(checkpoint, self.meta_model, section)
            ids = names[self.meta_model.get_input_embeddings()]
            held = {name: section.has_table if name.startswith(ids) else section.has_head for name in source_of}
            source_of = {name: source for name, source in source_of.items() if held[name]}
        self._layers, *others = layer_stacks(self.meta_model)
        blocks = self._blocks = [block for stack in (self._layers, *others) for block in stack]
        self._tables = tables_around(self.meta_model, blocks) if has_host_table else []
        self._move_buffers()
        self._windows = attention_windows(self.meta_model.config, len(self._layers))
        self._masks: Masks = {}
        self._replay: Replay | None = None
        self._attend: attention.Attend | None = None
        self._invariant: InvariantRows | None = None
        config = self.meta_model.config
        self._usual_attention = config._attn_implementation
        self._usual_experts = getattr(config, "_experts_implementation", None)
        self._layer_places = [below(places, names[block]) for block in blocks]
        self._rest_places = [(source, places[name]) for name, source in source_of.items()]
        self._layouts = [slab_layout(below(stored, names[block])) for block in blocks]
        self.layer_layouts, self.encoder_layouts = self._layouts[: self.num_layers], self._layouts[self.num_layers :]
        rest = {source: stored[source] for source in source_of.values()}
        coded = {name: parts for name, (_, parts) in rest.items() if is_coded(parts)}
        self.rest_layout = slab_layout({name: one for name, one in rest.items() if name not in coded})
        self._beside = Beside(checkpoint.directory.name, coded, self._layouts)
        self._expanded = ExpandedWeights(self._layouts, self._layer_places, place)
        self._expanded_rest: dict[str, Tensor] = {}
        self.held = HeldWeights(checkpoint.held.bits) if checkpoint.held else None
        self.vocab_size = int(self.meta_model.get_output_embeddings().weight.shape[0])
        self._hooks = [
            layer.register_forward_pre_hook(partial(self._give_mask, self._windows[index]), with_kwargs=True)
            for index, layer in enumerate(self._layers)
        ] + self._expanded.hooks
        for table in self._tables:
            self._hooks.append(table.register_forward_pre_hook(lambda _, args: (args[0].to(_HOST), *args[1:])))
            self._hooks.append(table.register_forward_hook(lambda _, __, rows: self.send(rows)))
        self._views: dict[tuple[int, int], dict[str, Tensor]] = {}

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def read_rest(self, fetch: Callable[[SlabLayout], np.ndarray], target: "StreamedModel | None" = None) -> int:
        """Read and bind all but layers, and what stays of coded ones. Returns the bytes read.

        What lies around the layers of a copy is its `target`'s. Raises `UserError` where scales and the like cannot be
        right, and what `fetch` raises.
        """
        layout = self._beside.layout
        if layout.coded or layout.parameters:
            self._bind_beside(fetch(layout))
        if target is not None and self.checkpoint.is_copy:
            share(target._rest_places, self._rest_places, self.place)
            self._expanded_rest = {}
        else:
            self.bind_rest(fetch(self.rest_layout))
        return self.rest_bytes

    @property
    def rest_bytes(self) -> int:
        """What `read_rest` reads."""
        return self._beside.layout.slab_bytes + (0 if self.checkpoint.is_copy else self.rest_layout.slab_bytes)

    def _bind_beside(self, slab: np.ndarray) -> None:
        dtypes = {source: place.empty.dtype for source, place in self._rest_places}
        companions_of = self._beside.companions(slab)
        self._expanded_rest = self._beside.expanded(slab, companions_of, dtypes)
        self._expanded.keep(companions_of)

    def expand_with(self, expansion: Expansion) -> None:
        """From now on coded weights of layers are expanded by these functions."""
        self._expanded.expand_with(expansion)

    def hold_layer(self, layer: int) -> None:
        """A layer is bound for good; its slab can go where its matrices are to be held in fewer bits."""
        if self.held is not None:
            self.held.take_layer(self._blocks[layer], self._layer_places[layer].values(), self._expanded)
            self._expanded.unbind(layer)

    def bind_rest(self, slab: np.ndarray) -> None:
        """Give embeddings, norm and head their weights for good; tied ones share one tensor where they lie together."""
        flat = torch.from_numpy(slab[self.rest_layout.sent])
        weights = {name: view_of(flat, self.rest_layout, name) for name in self.rest_layout.parameters}
        weights = {name: tensor.to(self._type_of(name, tensor)) for name, tensor in weights.items()}
        weights |= self._expanded_rest
        self._expanded_rest = {}
        sent: dict[tuple[str, bool], Tensor] = {}
        for source, place in self._rest_places:
            is_table = any(place.table is table._parameters for table in self._tables)
            if (source, is_table) not in sent:
                # A table that stays on the host is copied, so that the rest of its slab can go.
                weight = weights[source]
                sent[source, is_table] = weight.clone() if is_table else weight.to(self.place)
            place.table[place.key] = nn.Parameter(sent[source, is_table], requires_grad=False)

    def bind_layer(self, layer: int, slab: Slab) -> None:
        """Let a layer's parameters be views of `slab`, or copies where the compute type differs from the stored one.

        An array is as a store fills it, and is sent where the model computes; a tensor holds what is `sent` of one.
        Views of a tensor are kept: slots are few.
        """
        if isinstance(slab, np.ndarray):
            sent = torch.from_numpy(slab[self._layouts[layer].sent]).to(self.place)
            views = self._views_of(layer, sent)
        else:
            sent, key = slab, (layer, slab.data_ptr())
            views = self._views[key] = self._views.get(key) or self._views_of(layer, slab)
        for name, view in views.items():
            place = self._layer_places[layer][name]
            place.table[place.key] = view.to(place.empty.dtype)
        self._expanded.bind(layer, sent)

    def _views_of(self, layer: int, sent: Tensor) -> dict[str, Tensor]:
        layout = self._layouts[layer]
        return {name: view_of(sent, layout, name) for name in layout.parameters}

    def unbind_layer(self, layer: int) -> None:
        """Let go of the slab that a layer's parameters are views of."""
        for place in self._layer_places[layer].values():
            place.table[place.key] = place.empty
        self._expanded.unbind(layer)

    @contextmanager
    def cut_to(self, num_layers: int) -> Iterator[None]:
        """Meanwhile the decoder has its first layers only, so that one of them can be timed without the others."""
        with cut_stack(self.meta_model, num_layers):
            yield

    def stream_layers(self, acquire: Callable[[int], Slab], release: Callable[[int], None]) -> None:
        """From now on take each layer's slab just before it runs and give it back right after, even when it fails."""
        for index, layer in enumerate(self._blocks):
            self._hooks.append(layer.register_forward_pre_hook(partial(self._bind_from, acquire, index)))
            self._hooks.append(
                layer.register_forward_hook(partial(self._give_back, release, index), always_call=True, prepend=True)
            )

    def close(self) -> None:
        """Take the hooks off: they refer back to this model, and such a cycle would hold its weights for longer."""
        while self._hooks:
            self._hooks.pop().remove()
        self._views.clear()
        self._replay = None

    @torch.inference_mode()
    def forward(
        self, token_T: Tensor, position_U: Tensor, ancestor_TU: Tensor, cache: KVCache, *, num_logits: int = 0
    ) -> Tensor:
        """One pass over all layers: logits (T or num_logits, V).

        Args:
            token_T: ids of the rows, the last of U uncommitted ones; earlier passes left the others in the cache.
            position_U: absolute positions of all uncommitted rows.
            ancestor_TU: bool; which uncommitted rows (itself included) each row of this pass sees.
            cache: holds P committed positions, which every row sees.
            num_logits: how many of the last rows to score; 0 scores all.
        """
        if self._replay is not None:
            logits = self._replay(token_T, position_U, ancestor_TU, cache, num_logits)
            if logits is not None:
                return logits
        num_rows, num_uncommitted = ancestor_TU.shape
        cache.place(num_uncommitted - num_rows, num_rows)
        position_U = self.send(position_U)
        masks = self._paths(ancestor_TU, cache.length) or self._build_masks(position_U, ancestor_TU, cache)
        return self.run(token_T, position_U[-num_rows:], masks, cache, num_logits=num_logits)

    @torch.inference_mode()
    def score(
        self,
        token_T: Tensor,
        position_U: Tensor,
        ancestor_TU: Tensor,
        cache: KVCache,
        *,
        num_logits: int,
        max_rows: int,
    ) -> Logits:
        """Like `forward`, but at most `max_rows` rows are scored at once: now the first, later what is looked at.

        What a family does to its logits (soft caps, scales) is left to its own forward pass: for a later chunk it is
        called again, with a decoder that does nothing but hand out the hidden states that this call computes.
        """
        decoder, hidden = self.meta_model.get_decoder(), []

        def cut(_: nn.Module, __: Any, out: Any) -> Any:
            hidden.extend([out, out.last_hidden_state[:, -num_logits:]])
            out.last_hidden_state = hidden[1][:, :max_rows]
            return out

        hook = decoder.register_forward_hook(cut)
        try:
            first_CV = self.forward(token_T, position_U, ancestor_TU, cache, num_logits=num_logits)
        finally:
            hook.remove()
        assert hidden, "a pass that was replayed has no hidden states"
        return Logits(num_logits, max_rows, first_CV, partial(self._score_hidden, *hidden))

    @torch.inference_mode()
    def _score_hidden(self, out: Any, hidden_1ND: Tensor, lo: int, hi: int) -> Tensor:
        decoder, out.last_hidden_state = self.meta_model.get_decoder(), hidden_1ND[:, lo:hi]
        decoder.forward = lambda *_, **__: out
        try:
            nothing = torch.zeros(1, hi - lo, dtype=torch.long, device=self._table_place)
            with self._invariant or nullcontext():
                return self._call(nothing, logits_to_keep=hi - lo).logits[0]
        finally:
            del decoder.forward

    def run(self, token_T: Tensor, position_T: Tensor, masks: Masks, cache: KVCache, *, num_logits: int = 0) -> Tensor:
        """The pass itself, over rows that `cache` has been told where to write; see `forward` for what it returns.

        `masks` has for each of `windows` an additive one, (1, 1, T, S), or the same in bits.
        """
        self._masks, first = masks, masks[self._windows[0]]
        with self._invariant or nullcontext():
            out = self._call(
                (token_T.to(_HOST) if self._table_place == _HOST else self.send(token_T))[None],
                attention_mask=first if isinstance(first, Tensor) else None,  # layers get their own from `_give_mask`
                position_ids=position_T[None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=num_logits,
            )
        return out.logits[0, -num_logits:]  # some families score every row whatever they are asked; -0 is all of them

    def _call(self, token_1T: Tensor, **more: Any) -> Any:
        """transformers' own forward pass."""
        return self.meta_model(input_ids=token_1T, **more)

    def new_cache(self, num_slots: int, gather: Callable[..., None] = kv_commit_reference) -> KVCache:
        """An empty one, for one text."""
        return KVCache(self.num_layers, num_slots, gather, self.send)

    def take_in(self, tokens: Sequence[int], cache: KVCache, begin: Callable[[], None] = lambda: None) -> None:
        """Let `cache` have what an encoder makes of the text's prompt; other models have none, and read it in passes.

        `begin` is called before the encoder's layers run.
        """

    def be_invariant(self, rows: InvariantRows | None) -> None:
        """From now on a row's numbers do not depend on other rows; with None they are computed in the quickest way.

        Raises `UserError` where this family's attention cannot be ours.
        """
        experts = "eager" if rows is not None else self._usual_experts  # one product for each, whose rows can be padded
        if rows is None:
            self.meta_model.set_attn_implementation(self._usual_attention)
        elif not attention.takes_paths(self.meta_model):
            self.meta_model.set_attn_implementation(self._usual_attention)
            raise UserError(f"{self.meta_model.config.model_type} models calculate with masks of their own")
        if experts is not None:
            self.meta_model.set_experts_implementation(experts)
        self._invariant = rows

    @property
    def windows(self) -> set[int | None]:
        """How far back layers see, without repetition; None is without limit."""
        return set(self._windows)

    def replay_with(self, replay: Replay) -> None:
        """From now on ask `replay` for each pass first; what it declines is computed as ever."""
        self._replay = replay

    def send_with(self, send: Callable[[Tensor], Tensor]) -> None:
        """From now on `send` brings tensors of the host where this model computes; others it hands back."""
        self._send_by = send

    def send(self, tensor: Tensor) -> Tensor:
        """A small tensor where this model computes; itself where it is there already."""
        return self._send_by(tensor)

    def attend_with(self, attend: attention.Attend | None) -> None:
        """From now on tell rows in bits to this kernel of tree attention, if the family lets us."""
        self._attend = attend if attention.is_for_rows(self.meta_model.config) else None

    def _paths(self, ancestor_TU: Tensor, num_prefix: int) -> Masks:
        """What rows see by position on their paths, for each window, where rows are to be invariant."""
        if self._invariant is None:
            return {}
        what, rows = (num_prefix, ancestor_TU), self._invariant
        return {window: path_rows(*what, window, rows, self.send) for window in self.windows}

    def _build_masks(self, position_U: Tensor, ancestor_TU: Tensor, cache: KVCache) -> Masks:
        """One mask per attention window of this model; a lone row that sees everything needs none."""
        num_prefix = cache.length
        ancestor_TU = self.send(ancestor_TU)
        is_plain = ancestor_TU.shape == (1, 1) and self.meta_model.config._attn_implementation == attention.NAME
        what = (num_prefix, position_U, ancestor_TU)
        masks: dict[int | None, Tensor | attention.TreeRows | PathRows | None] = {}
        for window in self.windows:
            if is_plain and (window is None or num_prefix < window):
                masks[window] = None
            elif self._attend is not None:
                masks[window] = attention.tree_rows(*what, window, self._attend)
            else:
                masks[window] = attention.tree_mask(*what, window, self.dtype)
        return masks

    def _give_mask(self, window: int | None, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        assert "attention_mask" in kwargs, "this family does not pass masks by name"
        mask, hidden = self._masks[window], args[0] if args else kwargs["hidden_states"]
        if isinstance(mask, Tensor):
            mask = mask[:, :, -hidden.shape[-2] :]  # some families run their last layers on the rows to be scored alone
        return args, {**kwargs, "attention_mask": mask}

    def _move_buffers(self) -> None:
        """What a family computes at construction (rotary frequencies, scales) goes where it is used."""
        for module in self.meta_model.modules():
            place = _HOST if module in self._tables else self.place
            for key, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[key] = buffer.to(place)

    def _bind_from(self, acquire: Callable[[int], Slab], index: int, *_: Any) -> None:
        self.bind_layer(index, acquire(index))

    def _give_back(self, release: Callable[[int], None], index: int, *_: Any) -> None:
        self.unbind_layer(index)
        release(index)

    def _type_of(self, name: str, tensor: Tensor) -> torch.dtype:
        """The meta model's own type for `name`: the compute type but for what a family insists on keeping in fp32."""
        return next((place.empty.dtype for own, place in self._rest_places if own == name), tensor.dtype)
