"""The streamed model: one sweep over its layers scores the token trees of a batch of texts.

It holds weights and no text: each call gets the text's cache.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from offload.kernels.registry import REFERENCES, KernelSet
from offload.memory.plan import MemoryPlan
from offload.model.kv_cache import CODINGS, KVCache
from offload.model.parts import BatchPart, causal
from offload.model.taps import TapLog, Taps, tapped
from offload.model.tree_model import TreeModel
from offload.sampling.logits import Logits
from offload.stats import RankFigures, Transfers
from offload.streaming.device import HOST, Device
from offload.streaming.experts import ExpertPool
from offload.streaming.layers import LayerStream
from offload.trees.token_tree import TokenTree, ancestors


class Target:
    """A model whose layers pass through a stream.

    Args:
        model: embeddings and head are bound for good.
        stream: its layers.
        plan: has the size of a cache, the rows scored at once, the committed tokens that a sweep
            reads in addition to the tree (a longer prompt takes several), and the context.
            Positions beyond the context are never emitted: nodes there are computed as if at the
            last position, because some rotary embeddings (dynamic, longrope) rotate every row by
            the largest position of a pass. So are nodes beyond a turning point that their text has
            not reached, see `turn`.
        device: computes.
        on_layer: called for every layer of a sweep that has run.
        experts: routed experts, if they come on demand.
    """

    def __init__(
        self,
        model: TreeModel,
        stream: LayerStream,
        plan: MemoryPlan,
        *,
        device: Device = HOST,
        kernels: KernelSet = REFERENCES,
        on_layer: Callable[[int], None] = lambda layer: None,
        experts: ExpertPool | None = None,
    ) -> None:
        self.experts = experts
        self._model = model
        self.stream = stream
        self._max_rows = plan.max_prompt_rows
        self._last_position = plan.source_tokens + plan.context - 1
        self._turning_point = plan.turning_point if plan.turns else None
        self._max_logits = plan.num_logits_rows
        self._cache_slots = plan.cache_slots
        self._coding = CODINGS.get(plan.kv_dtype)
        # kernels move rows of these types
        self._gather = kernels.kv_commit if self._coding is None else None
        self._device = device
        self._taps: Taps | None = None
        # every thread that computes with it has to enter this
        self.computing = device.computing
        model.stream_layers(stream, on_layer)
        if experts is not None:
            model.bring_experts(experts.bring)

    @property
    def moved(self) -> Transfers:
        """Return the transfers and waits of passes, for layers and experts that do not stay."""
        stream = self.stream
        moved = Transfers(stream.bytes_read, stream.stall_s, reading_s=stream.reading_s)
        if self.experts is None:
            return moved
        experts = self.experts
        counts = (experts.num_hits, experts.num_misses)
        return moved.and_more(Transfers(experts.bytes_read, experts.stall_s, *counts))

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def start_ids(self) -> tuple[int, ...]:
        return self._model.start_ids

    @property
    def send(self) -> Callable[[Tensor], Tensor]:
        return self._model.send

    def new_cache(self) -> KVCache:
        """Return an empty cache for one sequence."""
        cache = self._model.new_cache(self._cache_slots, self._gather)
        cache.coding = self._coding
        cache.taps = None if self._taps is None else TapLog()
        return cache

    def tap(self, taps: Taps | None) -> None:
        """Log these states of committed tokens in caches made from now on."""
        self._taps = taps

    def share_sweeps(self, caches: Sequence[KVCache]) -> None:
        """Let sweeps serve these new caches' texts together. Raises `UserError` if they cannot."""
        self._model.share_passes()
        KVCache.side_by_side(caches)

    def turn(self, tokens: Sequence[int], cache: KVCache) -> None:
        """Drop a cache's keys if they do not fit a text of this length.

        Longrope rotates all positions of a text by long factors once it is longer than the turning
        point. A pass chooses its factors by its largest position, so all of its texts must be on
        the same side.
        """
        is_long = self._turning_point is not None and len(tokens) > self._turning_point
        if cache.is_long != is_long:
            cache.clear()
            cache.is_long = is_long

    def num_scored(self, num_tokens: int) -> int:
        """Count the tokens that one pass can score after these: it ends at the turning point."""
        turn = self._turning_point
        return sys.maxsize if turn is None or num_tokens > turn else turn + 1 - num_tokens

    def part_of(
        self,
        tokens: Sequence[int],
        cache: KVCache,
        tree: TokenTree | None = None,
        most_pending: int = sys.maxsize,
        on_chunk: Callable[[], None] = lambda: None,
    ) -> BatchPart:
        """Return a text's part of the next sweep: tokens that its cache lacks, `most_pending` at most,
        and where all are taken in, the tree below the last one, which is the root.

        What an encoder makes of a prompt, and what is too much for one sweep, is taken in at once;
        `on_chunk` is called behind each sweep of that.
        """
        self.turn(tokens, cache)
        self._model.encode_prompt(tokens, cache, self.stream.begin_prompt)
        num_pending = min(most_pending, len(tokens) - 1 - cache.length)
        while num_pending > self._max_rows:
            num_pending -= self._max_rows
            cache.expect_rows(self._max_rows)
            self._sweep([self._part(tokens, cache, self._max_rows)], 1, self._taps)
            cache.commit(range(self._max_rows))
            on_chunk()
        return self._part(tokens, cache, num_pending, tree)

    def score(self, parts: Sequence[BatchPart]) -> list[Logits]:
        """Return for each text the logits after every node of its tree, from one sweep.

        They are valid until the next sweep; a text without a tree has none.
        """
        for part in parts:
            part.cache.expect_rows(part.num_pending)
        ends = accumulate(part.num_nodes for part in parts)
        rows_of = [slice(end - part.num_nodes, end) for end, part in zip(ends, parts, strict=True)]
        # some rows have to be scored
        num_logits = max(1, rows_of[-1].stop)
        # only where several texts share passes
        are_cut = any(len(_cuts(part)) > 2 for part in parts)
        laid = [*_prompts(parts), *_trees(parts)] if len(parts) > 1 or are_cut else parts
        logits = self._sweep(laid, num_logits, self._taps)
        return [logits.part(rows.start, rows.stop) for rows in rows_of]

    def score_rows(
        self, tokens: Sequence[int], offsets: Sequence[int], sees_TT: Tensor, cache: KVCache
    ) -> Logits:
        """Return logits of rows of any tree shape after a cache's committed rows; commit none.

        `offsets` are positions from there on; a row sees those before it that `sees_TT` says.
        """
        position_T = self._positions(torch.tensor(offsets), cache)
        rows = BatchPart(torch.tensor(tokens), position_T, sees_TT, cache)
        return self._sweep([rows], len(tokens), taps=None)

    def _part(
        self, tokens: Sequence[int], cache: KVCache, num_pending: int, tree: TokenTree | None = None
    ) -> BatchPart:
        """Return a chain of the pending tokens, and the nodes of the tree, which see all of it."""
        token_T = torch.tensor(tokens[cache.length : cache.length + num_pending], dtype=torch.long)
        offset_T = torch.arange(num_pending)
        num_nodes = tree.num_nodes if tree else 0
        sees_TT = causal(num_pending + num_nodes)
        if tree is not None:
            depth_N = torch.from_numpy(tree.topology.depth_N.copy())
            token_T = torch.cat([token_T, tree.token_N])
            offset_T = torch.cat([offset_T, depth_N + num_pending])
            sees_TT[num_pending:, num_pending:] = ancestors(tree.topology)
        elif cache.is_long:
            # the last token, at its own position: by it the pass takes the long factors
            num_nodes = 1
            token_T = torch.cat([token_T, token_T.new_tensor(tokens[-1:])])
            offset_T = torch.cat([offset_T, offset_T.new_tensor([len(tokens) - 1 - cache.length])])
            sees_TT = causal(num_pending + 1)
        return BatchPart(token_T, self._positions(offset_T, cache), sees_TT, cache, num_nodes)

    def figures(self) -> list[RankFigures]:
        """Return each rank's figures; none of a process by itself. Raises `RankError`."""
        return []

    def wait(self) -> None:
        """Return when the last sweep is over, which on a device goes on after `score` has returned."""
        self._device.synchronize(self._device.mark(self._device.compute))

    @property
    def peak_device_bytes(self) -> int:
        """Return the most memory that this process has taken on the device; 0 on a CPU."""
        return self._device.peak_bytes()

    def commit(self, nodes: Sequence[int], num_tokens: int, cache: KVCache) -> None:
        """Keep what the last sweep over this many tokens took in, and the path, root first."""
        num_pending = num_tokens - 1 - cache.length
        cache.commit([*range(num_pending), *(num_pending + node for node in nodes)])

    def _sweep(self, parts: Sequence[BatchPart], num_logits: int, taps: Taps | None) -> Logits:
        self.stream.begin_sweep()
        if self.experts is not None:
            self.experts.begin_pass(sum(len(part.token_T) for part in parts))
        with tapped(taps, self._model.meta_model) as states:
            logits = self._model.score(parts, num_logits=num_logits, max_rows=self._max_logits)
        if taps is not None:
            _log(parts, states(sum(len(part.token_T) for part in parts)))
        return logits

    def _positions(self, offset_T: Tensor, cache: KVCache) -> Tensor:
        last = self._last_position
        if self._turning_point is not None and not cache.is_long:
            last = self._turning_point - 1
        return (offset_T + cache.length).clamp(max=last)


# Of several texts all pending tokens come first, as parts of their own: the last rows are those that
# are scored. A text alone is one part, as every family takes it.


def _prompts(parts: Sequence[BatchPart]) -> Iterator[BatchPart]:
    for part in parts:
        for lo, hi in pairwise(_cuts(part)):
            rows = (part.token_T[lo:hi], part.position_U[:hi], part.ancestor_TU[lo:hi, :hi])
            yield BatchPart(*rows, part.cache)


def _cuts(part: BatchPart) -> list[int]:
    """Return where the pending tokens of a part are cut: where states are wanted, and at the end."""
    num = part.num_pending
    step = part.cache.point_rows
    first = step - part.cache.length % step if step else num
    return [0, *range(first, num, step or 1), num] if num else [0]


def _trees(parts: Sequence[BatchPart]) -> Iterator[BatchPart]:
    for part in parts:
        if part.num_nodes:
            num = part.num_pending
            rows = (part.token_T[num:], part.position_U, part.ancestor_TU[num:])
            yield BatchPart(*rows, part.cache, part.num_nodes)


def _log(parts: Sequence[BatchPart], hidden_TW: Tensor) -> None:
    """Offer the hidden states (T, W) of each text's rows to the taps of its cache.

    These keep the states of rows that will be committed.
    """
    lo = 0
    for part in parts:
        num_rows, num_uncommitted = part.ancestor_TU.shape
        assert part.cache.taps is not None, "it was made with one"
        rows_TW = hidden_TW[lo : lo + num_rows]
        part.cache.taps.offer(rows_TW, is_first=num_rows == num_uncommitted)
        lo += num_rows
