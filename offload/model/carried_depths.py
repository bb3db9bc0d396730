"""MTP layers of several depths: each reads the output of the layer before it at the token before.

Layer k of K is trained to guess k + 2 tokens ahead. In layer 0 a token's row mixes its embedding
with the target's state of the token before; in layer k, with layer k - 1's output at that token. So
layer 0 scores what follows the root, layer 1 what follows its children, and the last layer all
deeper guesses, reading its own outputs. All layers run every row of a pass; a guess's rows in
layers above its own are meaningless, and nothing reads them. Sources: DeepSeek-V3 (2412.19437,
section 2.2); transformers `MtpModel`; one layer alone is `carried_model.py`.

Invariant: committed tokens have correct rows in all layers. Exceptions are the first ones of a text
and those after a cut far back, where deeper layers read zeros: such rows cost guesses, nothing
else.

Shape letters, in this file only: O outputs of a row, K times D, by layer.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offload.model.carried_model import (
    CarriedCache,
    CarriedModel,
    Encode,
    HalvesMixer,
    parent_of,
    twin,
)
from offload.model.kv_cache import KVCache
from offload.model.parts import BatchPart
from offload.model.taps import final_norm

_TAIL_ROWS = 64  # rows whose outputs are kept, as a text may be cut after any of them


class DepthCache(CarriedCache):
    """A `CarriedCache` with one output of each layer for every row."""

    def __init__(self, num_depths: int, nothing_1D: Tensor, encode: Encode, *sizes: Any) -> None:
        super().__init__(nothing_1D, encode, *sizes)
        self._nothing_1O = nothing_1D.repeat(1, num_depths)
        self._go_on_from(self._nothing_1O[:0])

    def _go_on_from(self, tail_TO: Tensor) -> None:
        """Take these as outputs of the last committed rows; zeros stand for an unknown one."""
        self._tail_TO = tail_TO[-_TAIL_ROWS:]
        self._root_1D = tail_TO[-1:] if len(tail_TO) else self._nothing_1O

    def commit(self, path: Sequence[int], kept: Sequence[int] = ()) -> None:
        """See `CarriedCache`; outputs of some rows stay, for later cuts."""
        done_TO = torch.cat(self._outputs_UD)[list(path)] if path else self._nothing_1O[:0]
        super().commit(path, kept)
        self._go_on_from(torch.cat([self._tail_TO, done_TO]))

    def clear(self, num_kept: int = 0) -> None:
        """See `CarriedCache`."""
        length = self.length
        super().clear(num_kept)
        num_left = max(0, len(self._tail_TO) - (length - self.length))
        self._go_on_from(self._tail_TO[:num_left])

    def copy_from(self, other: KVCache, num_positions: int) -> None:
        """See `CarriedCache`."""
        super().copy_from(other, num_positions)
        tail_TO = other._tail_TO if isinstance(other, DepthCache) else self._nothing_1O[:0]
        num_left = max(0, len(tail_TO) - (other.length - self.length))
        self._go_on_from(tail_TO[:num_left])


class _Rows(NamedTuple):
    """The relations of a pass's rows; indices count the known outputs first, then the pass."""

    known_UO: Tensor
    parent_T: Tensor
    nearest_T: Tensor  # nearest ancestors with known outputs
    layer_T: Tensor  # layer that scores what follows
    is_deeper_T1: Tensor  # whether it is deeper than there are layers


class DepthModel(CarriedModel):
    """The layers of an MTP head, one for each depth."""

    def __init__(self, *given: Any, **bound: Any) -> None:
        super().__init__(*given, **bound)
        self._num_depths = self._carried.num_depths
        self._cache_class = partial(DepthCache, self._num_depths)
        # for each layer: its output, and what the next one reads of it
        self._bare = list[Tensor]()
        self._made = list[Tensor]()
        if self._num_depths == 1:
            return
        decoder = self.meta_model.get_decoder()
        for depth in range(1, self._num_depths):
            mix = partial(self._mix_deeper, depth)
            hook = decoder.layers[depth].register_forward_pre_hook(mix, with_kwargs=True)
            self._hooks.append(hook)
        self._norms = [final_norm(decoder), *(mixer.norm for mixer in self._mixer.deeper)]
        self._hooks.append(self._norms[0].register_forward_pre_hook(self._choose))

    def forward_parts(self, parts: Sequence[BatchPart], *, num_logits: int = 0) -> Tensor:
        """See `CarriedModel`."""
        if self._num_depths > 1:
            self._rows = self._relate(parts)
            self._bare.clear()
            self._made.clear()
        return super().forward_parts(parts, num_logits=num_logits)

    def _relate(self, parts: Sequence[BatchPart]) -> _Rows:
        """Return for each row its parent's and its nearest known output, its layer, if deeper."""
        caches = {id(part.cache): part.cache for part in parts}
        known = [cache.outputs_UD for cache in caches.values() if isinstance(cache, DepthCache)]
        sizes = list(map(len, known))
        # the index after a text's root, among known outputs and the pass
        root_of = dict(zip(caches, accumulate([0, *sizes]), strict=False))
        num_known = dict(zip(caches, sizes, strict=True))
        row_of = dict[tuple[int, int], int]()
        rows = list[tuple[int, int, int, bool]]()
        for part in parts:
            assert isinstance(part.cache, DepthCache), "a cache of this model's"
            text = id(part.cache)
            num_rows, num_uncommitted = part.ancestor_TU.shape
            num_tapped = part.cache.num_tapped(part)
            for row, depth in enumerate(part.ancestor_TU.sum(1).tolist()):
                parent = parent_of(part.ancestor_TU, row, num_uncommitted)
                # a pass of the first rows may meet outputs of an abandoned tree
                is_first = num_rows == num_uncommitted
                before = 0 if is_first else num_known[text] - 1
                nearest = parent_of(part.ancestor_TU, row, before)
                place = row_of.get((text, parent), root_of[text] + 1 + parent)
                row_of[text, num_uncommitted - num_rows + row] = sum(sizes) + len(rows)
                layer = 0 if row < num_tapped else min(depth, self._num_depths - 1)
                is_deeper = row >= num_tapped and depth >= self._num_depths
                rows.append((place, root_of[text] + 1 + nearest, layer, is_deeper))
        columns = (self.send(torch.tensor(column)) for column in zip(*rows, strict=True))
        parent_T, nearest_T, layer_T, is_deeper_T = columns
        return _Rows(torch.cat(known), parent_T, nearest_T, layer_T, is_deeper_T[:, None])

    def _mixer_between(self, decoder: Any) -> nn.Module:
        """Return the mixer before the first layer, with the mixers and norms of the other layers."""
        mixer = super()._mixer_between(decoder)
        norm = final_norm(decoder)
        mixer.deeper = nn.ModuleList(HalvesMixer(norm) for _ in range(1, self._carried.num_depths))
        for deeper in mixer.deeper:
            deeper.norm = twin(norm)
        return mixer

    def _enter(self, embedded_1TD: Tensor, fed_1TD: Tensor) -> Tensor:
        self._embedded_1TD = embedded_1TD
        return super()._enter(embedded_1TD, fed_1TD)

    def _mix_deeper(
        self, depth: int, _: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Feed a layer with the output of the one before it at each row's parent."""
        self._note_made(args[0] if args else kwargs["hidden_states"])
        rows = self._rows
        width = self._embedded_1TD.shape[2]
        known_UD = rows.known_UO[:, (depth - 1) * width : depth * width]
        fed_TD = torch.cat([known_UD, self._made[-1]])[rows.parent_T]
        if depth == self._num_depths - 1:
            # the last layer reads its own outputs
            again_TD = rows.known_UO[rows.nearest_T, -width:]
            fed_TD = torch.where(rows.is_deeper_T1, again_TD, fed_TD)
        mixed_1TD = self._mixer.deeper[depth - 1](
            self._embedded_1TD, fed_TD[None], is_hidden_first=self._carried.is_hidden_first
        )
        if args:
            return (mixed_1TD, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": mixed_1TD}

    def _note_made(self, out_1TD: Tensor) -> None:
        # not called as a module: the first layer's norm has a hook
        norm = self._norms[len(self._made)].forward
        self._bare.append(out_1TD[0])
        self._made.append(norm(out_1TD)[0] if self._carried.is_fed_normed else out_1TD[0])

    def _choose(self, _: nn.Module, args: Any) -> Any:
        """Give the norm, for each row, the output of the layer that scores what follows."""
        self._note_made(args[0])
        bare_TKD = torch.stack(self._bare, dim=1)
        row_T = torch.arange(len(bare_TKD), device=bare_TKD.device)
        return (bare_TKD[row_T, self._rows.layer_T][None], *args[1:])

    def _keep_output(self, hooked: nn.Module, args: Any, normed_1TD: Tensor) -> Any:
        if self._num_depths == 1:
            return super()._keep_output(hooked, args, normed_1TD)
        self._output_TD = torch.cat(self._made, dim=1)
        for depth, norm in enumerate(self._norms):
            is_here_T1 = (self._rows.layer_T == depth)[:, None]
            normed_1TD = torch.where(is_here_T1, norm(args[0]), normed_1TD) if depth else normed_1TD
        return normed_1TD
