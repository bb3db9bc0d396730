"""A draft whose rows mix a token's embedding with a hidden state.

MTP layers are such drafts; heads with files of their own derive from them (`drafting/eagle3.py`).

Row i has the embedding of token i + 1 and the target's hidden state of token i, and scores token i
+ 2. A guess's row has this model's own output at its parent in place of the target's state, so it
is of no use once the target has run: `CarriedCache` keeps none.

Invariant: between steps the cache has row i only if tokens i and i + 1 are committed, computed from
the target's own state of token i.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from offload.checkpoint.carried import MIXER
from offload.checkpoint.checkpoint import Carried, Checkpoint
from offload.model.kv_cache import KVCache
from offload.model.linear import replace_linears
from offload.model.parts import BatchPart
from offload.model.taps import Taps, final_norm
from offload.model.tree_model import Replay, TreeModel
from offload.streaming.experts import ExpertPool

_HOST = torch.device("cpu")
# the target's states of rows (T, W) -> what is fed (T, D)
Encode = Callable[[Tensor], Tensor]


class CarriedCache(KVCache):
    """Keys and values of one text's rows, and the inputs of the next ones.

    Attributes:
        target: the cache of the target, with its log of hidden states; None where passes are timed.
    """

    target: KVCache | None = None
    ahead = 1

    def __init__(self, nothing_1D: Tensor, encode: Encode, *sizes: Any) -> None:
        super().__init__(*sizes)
        self._nothing_1D = nothing_1D
        self._encode = encode
        self._taps_TD = self._nothing_1D[:0]  # outputs of rows from `length` on
        self._outputs_UD = list[Tensor]()
        self._root_1D = self._nothing_1D
        self._num_sound = sys.maxsize  # first rows that lacked the target's state

    @property
    def outputs_UD(self) -> Tensor:
        """Return outputs of the last committed row, and of the rows after it so far."""
        return torch.cat([self._root_1D, *self._outputs_UD])

    @property
    def num_ready(self) -> int:
        """Return the number of rows for which the target has states."""
        log = None if self.target is None else self.target.taps
        return self.length + len(self._taps_TD) if log is None else max(log.end, self.length)

    def take_taps(self, num_rows: int) -> None:
        """Take the target's states of the next `num_rows` rows out of its log.

        Missing states are zeros: a meaningless row costs guesses and nothing else.
        """
        log = None if self.target is None else self.target.taps
        self._taps_TD = self._nothing_1D.expand(num_rows, -1)
        if log is None:
            return
        first = max(log.first, self.length)
        end = min(log.end, self.length + num_rows)
        if first > self.length or end <= first:
            self._num_sound = min(self._num_sound, self.length)
        if first < end:
            known_TW = log.take(first, end).to(self._nothing_1D)
            missing_TD = self._taps_TD[: first - self.length]
            self._taps_TD = torch.cat([missing_TD, self._encode(known_TW)])

    def num_tapped(self, part: BatchPart) -> int:
        """Return the number of a part's first rows that read the target's states."""
        num_rows, num_uncommitted = part.ancestor_TU.shape
        return max(0, min(len(self._taps_TD) - num_uncommitted + num_rows, num_rows))

    def fed(self, part: BatchPart) -> Tensor:
        """Return (T, D), the inputs of a part's rows: the target's states, or own outputs."""
        num_rows, num_uncommitted = part.ancestor_TU.shape
        first = num_uncommitted - num_rows
        num_taps = self.num_tapped(part)
        fed = [self._taps_TD[first : first + num_taps]]
        if num_taps < num_rows:
            # Rows that guess ahead of their parents read the nearest ancestor's output.
            num_known = sum(map(len, self._outputs_UD)) if first else 0
            parents = [
                parent_of(part.ancestor_TU, row, num_known) for row in range(num_taps, num_rows)
            ]
            # the last columns, if each layer has outputs of its own
            width = self._nothing_1D.shape[1]
            outputs_UD = self.outputs_UD[:, -width:]
            place_T = torch.tensor(parents, device=outputs_UD.device) + 1
            fed.append(outputs_UD[place_T])
        return torch.cat(fed)

    def note(self, part: BatchPart, output_TD: Tensor) -> None:
        """Keep the outputs of a part's rows, for the rows below them."""
        num_rows, num_uncommitted = part.ancestor_TU.shape
        if num_rows == num_uncommitted:
            self._outputs_UD.clear()
        self._outputs_UD.append(output_TD)

    def commit(self, path: Sequence[int], kept: Sequence[int] = ()) -> None:
        """See `KVCache`; the last row's output stays, as that of the next tree's root."""
        if path:
            self._root_1D = torch.cat(self._outputs_UD)[path[-1]][None]
            self._taps_TD = self._taps_TD[len(path) :]
        self._outputs_UD.clear()
        super().commit(path, kept)

    @property
    def num_sound(self) -> int:
        """Return the number of rows computed from the target's own states, see `KVCache`."""
        return min(self._num_sound, self.length)

    def clear(self, num_kept: int = 0) -> None:
        """Forget rows that depend on a token beyond the first `num_kept`."""
        self._taps_TD = self._nothing_1D[:0]
        self._outputs_UD.clear()
        super().clear(max(0, num_kept - 1))
        if self.length <= self._num_sound:
            self._num_sound = sys.maxsize

    def copy_from(self, other: KVCache, num_positions: int) -> None:
        """See `KVCache`."""
        super().copy_from(other, max(0, num_positions - 1))

    def can_follow(self, num_positions: int) -> int:
        """Return all if the target's log continues at the last row, else where it would have to."""
        log = None if self.target is None else self.target.taps
        assert log is not None, "a text has a target"
        is_joined = log.first <= self.length and log.end >= num_positions
        return num_positions if is_joined else min(num_positions, self.length)


def parent_of(ancestor_TU: Tensor, row: int, num_known: int) -> int:
    """Return the lowest of the first `num_known` rows above a row; -1 for the committed root."""
    place = ancestor_TU.shape[1] - ancestor_TU.shape[0] + row
    above = ancestor_TU[row, : min(place, num_known)].nonzero()
    return int(above[-1]) if len(above) else -1


class HalvesMixer(nn.Module):
    """Mixes an embedding and a hidden state: both normed, side by side, times (D, 2D)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.enorm = twin(norm)
        self.hnorm = twin(norm)
        weight = next(norm.parameters())
        width = weight.shape[0]
        self.eh_proj = nn.Linear(2 * width, width, bias=False, device="meta", dtype=weight.dtype)

    def forward(self, embedded_1TD: Tensor, fed_1TD: Tensor, *, is_hidden_first: bool) -> Tensor:
        """Return (1, T, D) of both."""
        halves = [self.enorm(embedded_1TD), self.hnorm(fed_1TD)]
        mixed_1TD: Tensor = self.eh_proj(torch.cat(halves[::-1] if is_hidden_first else halves, 2))
        return mixed_1TD


def twin(norm: nn.Module, width: int | None = None) -> nn.Module:
    """Return a norm of the same kind and width, or another width, with empty parameters."""
    made = type(norm).__new__(type(norm))
    nn.Module.__init__(made)
    # settings of this kind of norm; hooks and parameters are not shared
    made.__dict__ |= {**norm.__dict__, **made.__dict__, "training": norm.training}
    made._parameters = {
        name: nn.Parameter(weight.new_empty(width or len(weight)), requires_grad=False)
        for name, weight in norm._parameters.items()
        if weight is not None
    }
    return made


class CarriedModel(TreeModel):
    """The layers that a target carries, between its embedding table and its head."""

    _cache_class: Callable[..., CarriedCache] = CarriedCache

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str = "auto",
        torch_device: torch.device = _HOST,
        **bound: Any,
    ) -> None:
        assert checkpoint.carried is not None, "such a draft says what it shares"
        self._carried: Carried = checkpoint.carried
        super().__init__(checkpoint, dtype, torch_device, adapt=self._adapt, **bound)
        self._pool: ExpertPool | None = None
        self._fed_TD = torch.empty(0)
        self._output_TD = torch.empty(0)
        decoder = self.meta_model.get_decoder()
        self._hooks += [
            self.meta_model.get_input_embeddings().register_forward_hook(self._mix),
            final_norm(decoder).register_forward_hook(self._keep_output),
        ]

    def forward_parts(self, parts: Sequence[BatchPart], *, num_logits: int = 0) -> Tensor:
        """See `TreeModel`; the inputs of the rows are in their caches."""
        caches = [part.cache for part in parts]
        self._fed_TD = torch.cat(
            [
                cache.fed(part)
                for cache, part in zip(caches, parts, strict=True)
                if isinstance(cache, CarriedCache)
            ]
        )
        if self._pool is not None:
            self._pool.begin_pass(sum(len(part.token_T) for part in parts))
        logits = super().forward_parts(parts, num_logits=num_logits)
        lo = 0
        for part in parts:
            assert isinstance(part.cache, CarriedCache), "a cache of this model's"
            num_rows = len(part.token_T)
            part.cache.note(part, self._output_TD[lo : lo + num_rows])
            lo += num_rows
        return logits

    def draw_experts(self, pool: ExpertPool) -> None:
        """Read routed experts when passes need them, through a pool that is this model's alone."""
        self._pool = pool
        self.bring_experts(pool.bring)

    @property
    def own_bytes(self) -> int:
        """See `BoundModel`; a pool's slots are its own."""
        return super().own_bytes + (0 if self._pool is None else self._pool.num_bytes)

    def new_cache(self, num_slots: int, gather: Callable[..., None] | None = None) -> CarriedCache:
        """Return an empty cache for one text."""
        nothing_1D = torch.zeros(1, self._fed_width, dtype=self.dtype, device=self.torch_device)
        sizes = (self.num_layers, num_slots, gather, self.send)
        return self._cache_class(nothing_1D, self._encode, *sizes)

    @property
    def _fed_width(self) -> int:
        return int(self.meta_model.config.hidden_size)

    def set_graph_runner(self, replay: Replay) -> None:
        """Do nothing: recordings do not support rows with inputs of their own."""

    @property
    def needs(self) -> Taps:
        """Return the target's states that it reads."""
        return Taps(self._carried.tapped, self._carried.has_normed)

    @cached_property
    def _mixer(self) -> Any:
        # once: the library finds a decoder by trying many names
        return self.meta_model.get_decoder().mixer

    def _adapt(self, meta_model: nn.Module) -> None:
        """Add the mixer, before weights are mapped."""
        decoder: Any = meta_model.get_decoder()  # type: ignore[operator]
        add_mixer(decoder, self._mixer_between(decoder))

    def _mixer_between(self, decoder: Any) -> nn.Module:
        """Return the mixer between the table of a decoder and its layers."""
        return HalvesMixer(final_norm(decoder))

    def _encode(self, tapped_TW: Tensor) -> Tensor:
        """Return rows of the target's states unchanged: they are the input."""
        return tapped_TW

    def _enter(self, embedded_1TD: Tensor, fed_1TD: Tensor) -> Tensor:
        """Return the input of the first layer."""
        is_hidden_first = self._carried.is_hidden_first
        mixed_1TD: Tensor = self._mixer(embedded_1TD, fed_1TD, is_hidden_first=is_hidden_first)
        return mixed_1TD

    def _mix(self, _: nn.Module, __: Any, embedded_1TD: Tensor) -> Tensor:
        return self._enter(embedded_1TD, self._fed_TD[None].to(embedded_1TD))

    def _keep_output(self, _: nn.Module, args: Any, normed_1TD: Tensor) -> None:
        self._output_TD = (normed_1TD if self._carried.is_fed_normed else args[0])[0]


def add_mixer(decoder: nn.Module, mixer: nn.Module) -> None:
    """Add the mixer to a decoder, under the name in `checkpoint.carried`."""
    decoder.add_module(MIXER.split(".")[1], mixer)
    replace_linears(decoder)
