"""Passes of a Hugging Face causal language model whose weights are streamed.

`bound.py` provides the weights; the forward pass is transformers' own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from offload.checkpoint.checkpoint import Checkpoint
from offload.errors import UserError
from offload.kernels.path_attention import PathRows, Window, first_seen
from offload.model import attention
from offload.model.bound import BoundModel
from offload.model.kv_cache import KVCache
from offload.model.layer_stacks import cut_stack, head_alone
from offload.model.library import EXPERTS
from offload.model.linear import PLAIN, Products, choose_products, wrap_by_row
from offload.model.mixers.indexed import selection_of, with_placeholders
from offload.model.mixers.table import has_states, new_cache
from offload.model.parts import BatchMask, BatchPart, PassCache, causal, lay
from offload.model.path_attention import attend_along_paths, path_rows
from offload.model.wide_products import WideProducts, lacks_products
from offload.sampling.logits import Logits

# by window; None: without a mask
Masks = Mapping[Window, Tensor | PathRows | BatchMask | None]
# `path_attention_kernel`, or a function with the same result
Attend = Callable[..., Tensor]
# the rows of one text, num_logits -> logits, or None to decline
Replay = Callable[[BatchPart, int], Tensor | None]
_HOST = torch.device("cpu")


class TreeModel(BoundModel):
    """Passes of a model whose weights are bound as it runs, see `BoundModel`.

    Attributes:
        start_ids: what stands between a prompt and the new text; an encoder has read the prompt.
        kernel: what computes attention along paths in place of torch, see `set_attention_kernel`.
        foreign_ids: of a draft, ids that mean another token in the target.
    """

    start_ids: tuple[int, ...] = ()
    foreign_ids: tuple[int, ...] = ()

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str = "auto",
        torch_device: torch.device = _HOST,
        **bound: Any,
    ) -> None:
        super().__init__(checkpoint, dtype, torch_device, **bound)
        self._send_by: Callable[[Tensor], Tensor] = lambda tensor: tensor.to(torch_device)
        self._windows = attention.windows_of(self.meta_model.config, len(self._layers))
        self._masks: Masks = {}
        self._replay: Replay | None = None
        self.kernel: Attend | None = None
        self._invariant: Products | None = None
        self._selections = [selection_of(layer) for layer in self._layers]
        # layers that choose do so among the positions of paths
        self._is_by_path = self.has_index
        self._is_narrow = torch_device.type == "cpu" and lacks_products(self.dtype)
        self._usual_products: Products = WideProducts() if self._is_narrow else PLAIN
        config = self.meta_model.config
        self._usual_attention = config._attn_implementation
        self._usual_experts = getattr(config, "_experts_implementation", None)
        wrap_by_row(self.meta_model, has_sums=torch_device.type != "cpu")
        self._multiply_by(None)
        if self._is_narrow:
            # an eager one of the library would add up number after number
            self._is_by_path |= not attention.is_for_rows(config) and self._takes_paths()
        for index, (layer, window) in enumerate(zip(self._layers, self._windows, strict=True)):
            give = partial(self._give_mask, window, index)
            self._hooks.append(layer.register_forward_pre_hook(give, with_kwargs=True))
        for table in self._tables:
            self._hooks += [
                table.register_forward_pre_hook(lambda _, args: (args[0].to(_HOST), *args[1:])),
                table.register_forward_hook(lambda _, __, rows: self.send(rows)),
            ]

    def cut_to(self, kept: slice) -> AbstractContextManager[None]:
        """Leave the decoder these layers alone meanwhile, so that one can be timed by itself."""
        return cut_stack(self.meta_model, kept)

    def forward(
        self,
        token_T: Tensor,
        position_U: Tensor,
        ancestor_TU: Tensor,
        cache: KVCache,
        *,
        num_logits: int = 0,
    ) -> Tensor:
        """Run one pass over all layers; return logits (T or num_logits, V).

        Args:
            token_T: ids of the rows, the last of U uncommitted ones; earlier passes left the others
                in the cache.
            position_U: absolute positions of all uncommitted rows.
            ancestor_TU: bool; which uncommitted rows (itself included) each row of this pass sees.
            cache: holds P committed positions, which every row sees.
            num_logits: how many of the last rows to score; 0 scores all.
        """
        part = BatchPart(token_T, position_U, ancestor_TU, cache)
        return self.forward_parts([part], num_logits=num_logits)

    def forward_chain(self, token_T: Tensor, cache: KVCache, *, num_logits: int = 0) -> Tensor:
        """Run tokens that follow one another behind what a cache has committed, see `forward`."""
        num_rows = len(token_T)
        position_T = torch.arange(num_rows) + cache.length
        return self.forward(token_T, position_T, causal(num_rows), cache, num_logits=num_logits)

    @torch.inference_mode()
    def forward_parts(self, parts: Sequence[BatchPart], *, num_logits: int = 0) -> Tensor:
        """Run rows part behind part, see `forward`. More than one part needs `share_passes`."""
        if self._replay is not None and len(parts) == 1:
            logits = self._replay(parts[0], num_logits)
            if logits is not None:
                return logits
        token_T = torch.cat([part.token_T for part in parts])
        position_T = torch.cat([part.position_U[-len(part.token_T) :] for part in parts])
        cache = lay(parts, self._invariant)
        masks, *others = [self._masks_of(*part[1:4]) for part in parts]
        if others:
            masks = {
                window: BatchMask(
                    cache.parts, [mask, *(part_masks[window] for part_masks in others)]
                )
                for window, mask in masks.items()
            }
        return self.run(token_T, self.send(position_T), masks, cache, num_logits=num_logits)

    @torch.inference_mode()
    def score(
        self,
        parts: Sequence[BatchPart],
        *,
        num_logits: int,
        max_rows: int,
    ) -> Logits:
        """Run a pass, and score at most `max_rows` of its last `num_logits` rows at once.

        The first are scored now, others when they are looked at. What a family does to its logits
        (soft caps, scales) is left to its own forward pass, see `head_alone`.
        """
        decoder = self.meta_model.get_decoder()
        hidden = []

        def cut(_: nn.Module, __: Any, out: Any) -> Any:
            hidden.extend([out, out.last_hidden_state[:, -num_logits:]])
            out.last_hidden_state = hidden[1][:, :max_rows]
            return out

        hook = decoder.register_forward_hook(cut)
        try:
            first_CV = self.forward_parts(parts, num_logits=num_logits)
        finally:
            hook.remove()
        assert hidden, "a pass that was replayed has no hidden states"
        return Logits(num_logits, max_rows, first_CV, partial(self._score_hidden, *hidden))

    @torch.inference_mode()
    def _score_hidden(self, out: Any, hidden_1ND: Tensor, lo: int, hi: int) -> Tensor:
        out.last_hidden_state = hidden_1ND[:, lo:hi]
        nothing = torch.zeros(1, hi - lo, dtype=torch.long, device=self._table_device)
        with self._during(hi - lo), self._call_head(out):
            return self._call(nothing, logits_to_keep=hi - lo).logits[0]

    @contextmanager
    def _call_head(self, out: Any) -> Iterator[None]:
        """Make passes meanwhile compute the head alone, from these outputs of the decoder."""
        whole = self.meta_model
        self.meta_model = head_alone(whole, out)
        try:
            yield
        finally:
            self.meta_model = whole

    def run(
        self,
        token_T: Tensor,
        position_T: Tensor,
        masks: Masks,
        cache: PassCache,
        *,
        num_logits: int = 0,
    ) -> Tensor:
        """Run a pass over rows that were laid out; return what `forward` does.

        `masks` has an additive mask (1, 1, T, S) for each of `windows`, or rows with their paths.
        """
        self._masks = masks
        for selection, window in zip(self._selections, self._windows, strict=True):
            if selection is not None:
                selection.begin(masks[window], cache)
        first = masks[self._windows[0]]
        with self._during(len(token_T)), cache.running():
            out = self._call(
                (token_T.to(_HOST) if self._table_device == _HOST else self.send(token_T))[None],
                # layers get their own from `_give_mask`
                attention_mask=first if isinstance(first, Tensor) else None,
                position_ids=position_T[None],
                **cache.as_argument(),
                use_cache=True,
                logits_to_keep=num_logits,
            )
        # some families score every row whatever they are asked; -0 is all of them
        return out.logits[0, -num_logits:]

    def _during(self, num_rows: int) -> AbstractContextManager[Any]:
        """Return the context to enter while a pass of `num_rows` rows is computed."""
        is_host = self.torch_device.type == "cpu"
        return self._products.during(num_rows) if is_host else nullcontext()

    def _call(self, token_1T: Tensor, **inputs: Any) -> Any:
        """Run transformers' own forward pass."""
        return self.meta_model(input_ids=token_1T, **inputs)

    def new_cache(self, num_slots: int, gather: Callable[..., None] | None = None) -> KVCache:
        """Return an empty cache for one text, with states where layers keep any; see `KVCache`."""
        cache = new_cache(self._layers, num_slots, gather, self.send)
        if self._replay is not None:
            # now: its first pass may be one that is not replayed
            cache.fix()
        return cache

    def encode_prompt(
        self, tokens: Sequence[int], cache: KVCache, begin: Callable[[], None] = lambda: None
    ) -> None:
        """Let `cache` have what an encoder makes of a prompt; `begin` is called before it runs."""

    def set_batch_invariant(self, rows: Products | None) -> None:
        """Make a row's numbers independent of other rows; None restores the fastest way.

        Raises `UserError` where this family's attention cannot be ours.
        """
        if rows is not None and not self._takes_paths():
            kind = self.meta_model.config.model_type
            raise UserError(f"{kind} models calculate with masks of their own")
        if rows is None and self.kernel is None:
            self.meta_model.set_attn_implementation(self._usual_attention)
        self._multiply_by(rows)

    def _multiply_by(self, rows: Products | None) -> None:
        """Set the products that all parts of the model use; None restores torch's."""
        # a GPU has quicker ways than expert by expert, for experts that are there all at once
        is_usual = rows is None and self.torch_device.type != "cpu" and not self.experts
        if self._usual_experts is not None:
            usual = self._usual_experts if is_usual else EXPERTS
            self.meta_model.set_experts_implementation(usual)
        self._invariant = rows
        self._products: Products = self._usual_products if rows is None else rows
        # layers that are cut off for a trial meanwhile are asked as well
        for part in (self.meta_model, *self._blocks):
            choose_products(part, self._products)
        for selection in self._selections:
            if selection is not None:
                selection.products = self._products

    def share_passes(self) -> None:
        """Let several texts share a pass; families with attention of their own follow paths then.

        Raises `UserError` where that cannot be.
        """
        if attention.is_for_rows(self.meta_model.config):
            return
        if not self._takes_paths():
            kind = self.meta_model.config.model_type
            raise UserError(f"`parallel` must be 1 for {kind} models: leave it out")
        # a recording has masks, which lack what such scores need
        self._is_by_path = True
        self._replay = None

    def _takes_paths(self) -> bool:
        """Replace the attention of all layers by ours, including caps and sinks, or of none."""
        model = self.meta_model
        if model.config._attn_implementation != attention.NAME:
            with suppress(ValueError):
                model.set_attn_implementation(attention.NAME)
        can_be = attention.is_for_rows(model.config)
        if not can_be:
            model.set_attn_implementation(self._usual_attention)
        return can_be

    def close(self) -> None:
        """Take the hooks off, see `BoundModel.close`."""
        super().close()
        self._replay = None

    @property
    def windows(self) -> set[Window]:
        """Return the widths of layers' windows, each once; None is without limit."""
        return set(self._windows)

    @property
    def has_states(self) -> bool:
        return has_states(self._layers)

    @property
    def has_rows_alone(self) -> bool:
        """Return True if layers are products and attention of rows, without experts and states."""
        has_experts = self._usual_experts not in (None, "eager")
        return not self.has_states and not self.has_index and not has_experts

    @property
    def has_index(self) -> bool:
        return any(self._selections)

    @property
    def layers_to_try(self) -> list[int]:
        """Return the typical layer, and one of every kind where layers keep states or choose."""
        if not self.has_states and not self.has_index:
            return [self.typical_layer]
        first: dict[object, int] = {}
        for index, layer in enumerate(self._layers):
            shapes = [(name, parameter.shape) for name, parameter in layer.named_parameters()]
            plain = tuple(shape for shape in shapes if ".experts." not in shape[0])
            if not self._borrows_keys(index):
                first.setdefault(plain, index)
        return sorted({self.typical_layer, *first.values()})

    def set_graph_runner(self, replay: Replay) -> None:
        """Ask `replay` for each pass first from now on; what it declines is computed as ever."""
        self._replay = replay

    def set_uploader(self, send: Callable[[Tensor], Tensor]) -> None:
        """Let `send` bring the host's tensors where this model computes; others stay as is."""
        self._send_by = send

    def send(self, tensor: Tensor) -> Tensor:
        """Return a small tensor where this model computes; itself where it is there already."""
        return self._send_by(tensor)

    def set_attention_kernel(self, kernel: Attend | None) -> None:
        """Set the kernel by which rows attend along their paths, if the family allows that.

        Where layers choose, the kernel's reference goes on.
        """
        can_be = kernel is not None and not self.has_index and self._takes_paths()
        self.kernel = kernel if can_be else None

    @property
    def attend(self) -> Attend | None:
        """Return the function of attention along paths; None where rows have masks."""
        if self.kernel is not None:
            return self.kernel
        if self._invariant is not None:
            return partial(attend_along_paths, multiply=self._invariant.multiply)
        return attend_along_paths if self._is_by_path else None

    def _masks_of(self, position_U: Tensor, ancestor_TU: Tensor, cache: KVCache) -> Masks:
        """Return the views of one text's rows, by window: positions on their paths, or masks."""
        attend = self.attend
        if attend is None:
            return self._build_masks(self.send(position_U), ancestor_TU, cache)
        rows = path_rows(cache.length, ancestor_TU, attend, self.send)
        return {window: replace(rows, window=window) for window in self.windows}

    def _build_masks(self, position_U: Tensor, ancestor_TU: Tensor, cache: KVCache) -> Masks:
        """Return a mask for each window; a lone row that sees everything needs none."""
        num_prefix = cache.length
        ancestor_TU = self.send(ancestor_TU)
        is_ours = self.meta_model.config._attn_implementation == attention.NAME
        is_plain = is_ours and ancestor_TU.shape == (1, 1)
        masks: dict[Window, Tensor | None] = {}
        for window in self.windows:
            is_all_seen = is_plain and (window is None or first_seen(window, num_prefix) <= 0)
            given = (num_prefix, position_U, ancestor_TU, window, self.dtype)
            masks[window] = None if is_all_seen else attention.tree_mask(*given)
        return masks

    def _give_mask(
        self, window: Window, index: int, layer: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Return a layer's arguments with the mask of its window; a forward pre-hook."""
        # some families pass all by order
        if "attention_mask" not in kwargs:
            names = [*signature(type(layer).forward).parameters][2:]
            kwargs = dict(zip(names, args[1:], strict=False)) | kwargs
            args = args[:1]
            # it has its number without the layers before it as well
            if "layer_idx" in kwargs:
                kwargs["layer_idx"] = index
        hidden = args[0] if args else kwargs["hidden_states"]
        if self._selections[index] is not None:
            return args, with_placeholders(hidden, kwargs)
        # Zamba has another for its states
        name = "causal_mask" if "causal_mask" in kwargs else "attention_mask"
        assert name in kwargs, "this family passes no masks"
        mask = self._masks[window]
        num_rows = hidden.shape[-2]
        # some families run their last layers on the rows to be scored alone
        if isinstance(mask, Tensor) and num_rows < mask.shape[2]:
            mask = mask[:, :, -num_rows:]
        return args, {**kwargs, name: mask}
