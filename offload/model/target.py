"""The streamed model: one sweep over its layers scores a whole token tree, or those of several
texts.

It holds weights and no text: the cache of the text's keys and values is lent to it for every call.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from offload.kernels.registry import REFERENCES, KernelSet
from offload.memory.plan import MemoryPlan
from offload.model.kv_cache import KVCache
from offload.model.parts import BatchPart
from offload.model.streamed import StreamedModel
from offload.sampling.sampler import Logits
from offload.stats import RankFigures, Transfers
from offload.streaming.device import Device, computing_on
from offload.streaming.experts import ExpertPool
from offload.streaming.layers import Layers
from offload.trees.token_tree import TokenTree, ancestors


class BatchEntry(NamedTuple):
    """What one text has in a sweep that it shares."""

    tokens: Sequence[int]  # committed ones
    cache: KVCache  # one of those that were made together
    num_pending: int  # of the tokens that the cache lacks, the root left out: so many are taken in
    tree: TokenTree | None = None  # below the last of the tokens, where nothing else is pending

    @property
    def num_nodes(self) -> int:
        return self.tree.num_nodes if self.tree else 0


class Target:
    """A model whose layers pass through a stream.

    Args:
        model: embeddings and head are bound for good.
        stream: its layers.
        plan: says how large a cache is, how many rows are scored at once, how many committed tokens
            one sweep takes in beside the tree (a longer prompt takes several), and the context.
            Positions beyond that are never emitted: nodes that lie there are computed as if at the
            last one, because some rotary embeddings (dynamic, longrope) turn every row by the
            largest position of a pass.
        device: that it computes on; None is the CPU.
        on_layer: hears of every layer that has run.
        experts: routed ones, where they come on demand.
    """

    def __init__(
        self,
        model: StreamedModel,
        stream: Layers,
        plan: MemoryPlan,
        *,
        device: Device | None = None,
        kernels: KernelSet = REFERENCES,
        on_layer: Callable[[], None] = lambda: None,
        experts: ExpertPool | None = None,
    ) -> None:
        self.experts = experts
        self._model, self.stream, self._max_rows = model, stream, plan.max_prompt_rows
        self._last_position, self._max_logits = (
            plan.source_tokens + plan.context - 1,
            plan.num_logits_rows,
        )
        self._cache_slots, self._gather = plan.cache_slots, kernels.kv_commit
        self._device = device
        self._on_layer = on_layer
        # to be entered by every thread that computes with it
        self.computing = partial(computing_on, device)
        model.stream_layers(stream.acquire, self._release)
        if experts is not None:
            model.bring_experts(experts.bring)

    @property
    def moved(self) -> Transfers:
        """What passes so far have moved and waited for, of layers and experts that do not stay."""
        moved = Transfers(self.stream.bytes_read, self.stream.stall_s)
        if self.experts is None:
            return moved
        num_bytes = moved.num_bytes + self.experts.bytes_read
        stall_s = moved.stall_s + self.experts.stall_s
        return Transfers(num_bytes, stall_s, self.experts.num_hits, self.experts.num_misses)

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def start(self) -> tuple[int, ...]:
        """Ids that stand between a prompt and the new text."""
        return self._model.start

    @property
    def send(self) -> Callable[[Tensor], Tensor]:
        return self._model.send

    def new_cache(self) -> KVCache:
        """An empty one, for one sequence."""
        return self._model.new_cache(self._cache_slots, self._gather)

    def share_sweeps(self, caches: Sequence[KVCache]) -> None:
        """From now on sweeps may be of the texts of several of these new caches, see `score_all`.

        Raises `UserError` where the model cannot.
        """
        self._model.share_passes()
        KVCache.side_by_side(caches)

    def score(self, tree: TokenTree, tokens: Sequence[int], cache: KVCache) -> Logits:
        """Logits after every node, from one sweep; they are valid until the next.

        The root is the last of `tokens`, the committed ids; those that the cache lacks are taken in
        as well.
        """
        self._model.take_in(tokens, cache, self.stream.begin_prompt)
        pending = torch.tensor(tokens[cache.length : -1], dtype=torch.long)
        while len(pending) > self._max_rows:
            cache.promise(self._max_rows)
            self._sweep(
                pending[: self._max_rows],
                _causal(self._max_rows),
                torch.arange(self._max_rows),
                1,
                cache,
            )
            cache.commit(range(self._max_rows))
            pending = pending[self._max_rows :]
        cache.promise(len(pending))
        depth_N = torch.from_numpy(tree.topology.depth_N.copy())
        offset_T = torch.cat([torch.arange(len(pending)), depth_N + len(pending)])
        sees_TT = _chain_then_tree(len(pending), ancestors(tree.topology))
        return self._sweep(
            torch.cat([pending, tree.token_N]), sees_TT, offset_T, tree.num_nodes, cache
        )

    def score_all(self, planted: Sequence[BatchEntry]) -> list[Logits]:
        """Logits after every node of every tree, from one sweep; they are valid until the next.

        Nothing is taken in beyond what is said to be pending. Of a text without a tree they are
        none.
        """
        for one in planted:
            one.cache.promise(one.num_pending)
        prompts = [self._chain(one) for one in planted if one.num_pending]
        trees = [self._tree(one, one.tree) for one in planted if one.tree]
        num_logits = max(1, sum(len(part.token_T) for part in trees))  # some rows have to be scored
        self._begin_sweep(sum(len(part.token_T) for part in (*prompts, *trees)))
        logits = self._model.score_parts(
            [*prompts, *trees], num_logits=num_logits, max_rows=self._max_logits
        )
        firsts = accumulate((one.num_nodes for one in planted), initial=0)
        return [
            logits.part(first, first + one.num_nodes)
            for first, one in zip(firsts, planted, strict=False)
        ]

    def score_rows(
        self, tokens: Sequence[int], offsets: Sequence[int], sees_TT: Tensor, cache: KVCache
    ) -> Logits:
        """Logits after every row of any shape behind what a cache has committed; nothing is
        committed.

        `offsets` are positions, counted from the committed length; a row sees those before it that
        `sees_TT` says.
        """
        token_T = torch.tensor(tokens)
        offset_T = torch.tensor(offsets)
        return self._sweep(token_T, sees_TT, offset_T, len(token_T), cache)

    def _chain(self, planted: BatchEntry) -> BatchPart:
        tokens, cache, num_rows, _ = planted
        token_T = torch.tensor(tokens[cache.length : cache.length + num_rows])
        return BatchPart(
            token_T, self._positions(torch.arange(num_rows), cache), _causal(num_rows), cache
        )

    def _tree(self, planted: BatchEntry, tree: TokenTree) -> BatchPart:
        _, cache, num_pending, __ = planted
        depth_N = torch.from_numpy(tree.topology.depth_N.copy())
        offset_U = torch.cat([torch.arange(num_pending), depth_N + num_pending])
        sees_NU = _chain_then_tree(num_pending, ancestors(tree.topology))[num_pending:]
        return BatchPart(tree.token_N, self._positions(offset_U, cache), sees_NU, cache)

    def figures(self) -> list[RankFigures]:
        """Of each rank, where several run it; none of a process by itself. Raises `RankError`."""
        return []

    def wait(self) -> None:
        """Return when the last sweep is over, which on a device goes on after `score` has returned."""
        if self._device is not None:
            self._device.synchronize(self._device.record(self._device.compute))

    @property
    def peak_device_bytes(self) -> int:
        """The most memory that this process has taken on the device; 0 on a CPU."""
        return 0 if self._device is None else self._device.peak_bytes()

    def commit(self, nodes: Sequence[int], num_tokens: int, cache: KVCache) -> None:
        """Keep what the last sweep over so many tokens has taken in, and of its tree the accepted
        path, root first.
        """
        num_pending = num_tokens - 1 - cache.length
        cache.commit([*range(num_pending), *(num_pending + node for node in nodes)])

    def _sweep(
        self, token_T: Tensor, sees_TT: Tensor, offset_T: Tensor, num_logits: int, cache: KVCache
    ) -> Logits:
        self._begin_sweep(len(token_T))
        position_T = self._positions(offset_T, cache)
        return self._model.score(
            token_T, position_T, sees_TT, cache, num_logits=num_logits, max_rows=self._max_logits
        )

    def _begin_sweep(self, num_rows: int) -> None:
        self.stream.begin_sweep()
        if self.experts is not None:
            self.experts.begin_pass(num_rows)

    def _positions(self, offset_T: Tensor, cache: KVCache) -> Tensor:
        return (offset_T + cache.length).clamp(max=self._last_position)

    def _release(self, layer: int) -> None:
        self.stream.release(layer)
        if layer < self._model.num_layers:  # others are no part of a sweep
            self._on_layer()


def _causal(num_rows: int) -> Tensor:
    return torch.ones(num_rows, num_rows, dtype=torch.bool).tril()


def _chain_then_tree(num_pending: int, ancestor_NN: Tensor) -> Tensor:
    """Which rows a row sees when a chain of committed tokens is followed by a tree that sees all of
    it.
    """
    num_nodes = len(ancestor_NN)
    sees_TT = _causal(num_pending + num_nodes)
    sees_TT[num_pending:, num_pending:] = ancestor_NN
    return sees_TT
