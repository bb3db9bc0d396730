"""Computed beginnings of texts, kept by content for every text that begins alike.

Keys and values lie in blocks of `BLOCK_ROWS` positions, named by a hash chain of the model's
identity and of all tokens up to the block's end. Layers with states have those at a few positions
only. So a point, the states after a position together with the rows since the last block's end, is
named by the same chain. The least recently used make room, but a chain never loses a block to its
own later part, which would be useless without it.

Invariant: a name determines the tokens and the weights, so rows under it are those that would be
computed here, and their bits as well if the names include what bits depend on
(`Invariance.arithmetic`).
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from offload.checkpoint.identity import FILES
from offload.engine.block_folder import BlockFolder, BlockHeader
from offload.engine.decoder_config import DecoderConfig
from offload.engine.identities import Identities
from offload.engine.sequence import Caches
from offload.engine.state_tensors import (
    PARTS,
    check_states,
    layers_of,
    point_of,
    point_tensors,
    row_tensors,
)
from offload.memory.sizes import POINT_ROWS
from offload.model.kv_cache import KVCache
from offload.model.recurrent_cache import RecurrentCache
from offload.units import rounded_up

BLOCK_ROWS = 64
# Fewer rows take as long to compute as to load, since a pass runs in any case.
LEAST_BROUGHT = 16
_KEY_BYTES = 20
_FORMAT = f"offload prompt cache, version 1, blocks of {BLOCK_ROWS}"
# parts of a model's identity; tokens are ids here, whatever text they stand for
_PARTS_OF_ROWS = ("weights", "config", "bits")
_ALIGN_BYTES = 16
Tensors = Mapping[str, Tensor]
Layers = Mapping[int, Mapping[str, Tensor]]


class CheckBlock(Protocol):
    """Checks the tensors of a block that was read."""

    def __call__(self, header: BlockHeader, part: str, *, is_point: bool) -> None:
        """Raise `ValueError` for tensors that no block of this model has."""


def model_root(part: str, identities: Identities, kv_dtype: str = "auto") -> bytes:
    """Return the prefix of a model's block names: its weights, its config and its type.

    A draft carried in the target's files has rows computed from the target's. Raises `ReadError`.
    """
    models = [identities.for_part(name) for name in (part, "target")]
    weights = [
        [model.parts.get(name) for name in _PARTS_OF_ROWS] + [model.proofs.get(FILES)]
        for model in models
        if model is not None
    ]
    return json.dumps([_FORMAT, part, weights, identities.dtypes[part], kv_dtype]).encode()


def open_prefixes(config: DecoderConfig, caches: Sequence[KVCache]) -> "PrefixCache | None":
    """Return the cache of beginnings for the texts in these caches; None if it is not wanted.

    Raises `UserError` for a folder with other content.
    """
    plan = config.plan
    place = config.prompts
    if not plan.prompt_cache_bytes and place is None:
        return None
    # with several texts, a prompt may be read in parts, with states after each
    for cache in caches if plan.parallel > 1 else ():
        cache.point_rows = POINT_ROWS
    identities = config.identities
    # once: files may be replaced while texts are written
    roots = {part: model_root(part, identities, plan.kv_dtype) for part in PARTS}

    def root(part: str) -> bytes:
        is_target = part == PARTS[0]
        bits = config.invariance.arithmetic(plan.device) if is_target else ""
        return roots[part] + bits.encode()

    def check(header: BlockHeader, part: str, *, is_point: bool) -> None:
        check_states(header, part, identities, BLOCK_ROWS, has_states=is_point)

    folder = None if place is None else BlockFolder(*place)
    return PrefixCache(root, plan.prompt_cache_bytes, folder, check)


class TokenChain:
    """Names of the blocks and points of one text.

    Args:
        root: names the model, and everything else that rows depend on.
        ahead: number of tokens after its own that a row depends on.
    """

    def __init__(self, root: bytes, tokens: Sequence[int], ahead: int) -> None:
        self._root = root
        self._token_bytes = np.array(tokens, dtype="<i8").tobytes()
        self._ahead = ahead
        self.num_rows = max(0, len(tokens) - ahead)

    @cached_property
    def keys(self) -> list[bytes]:
        """Return the names of the whole blocks."""
        keys = list[bytes]()
        before = _digest(self._root, self._tokens(-self._ahead, 0))
        for first in range(0, self.num_rows - BLOCK_ROWS + 1, BLOCK_ROWS):
            before = _digest(before, self._tokens(first, first + BLOCK_ROWS))
            keys.append(before)
        return keys

    def point_key(self, position: int) -> bytes:
        """Return the name of the point after this many positions, at least one."""
        num_blocks = point_blocks(position)
        before = self.keys[num_blocks - 1] if num_blocks else self._root
        return _digest(b"point", before, self._tokens(num_blocks * BLOCK_ROWS, position))

    def _tokens(self, first: int, end: int) -> bytes:
        lo, hi = ((place + self._ahead) * 8 for place in (first, end))
        return self._token_bytes[lo:hi]


def point_blocks(position: int) -> int:
    """Return the number of whole blocks before a point's own rows, which are never empty."""
    return (position - 1) // BLOCK_ROWS


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


class BlockStore:
    """Tensors by name in at most this many bytes; the least recently used make room."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.num_bytes = 0
        self._blocks = OrderedDict[bytes, tuple[Tensors, int]]()

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def read(self, key: bytes) -> Tensors | None:
        """Return the tensors of this name; None if there are none."""
        block = self._blocks.get(key)
        return None if block is None else block[0]

    def write(self, key: bytes, tensors: Tensors, needed: set[bytes]) -> bool:
        """Keep a copy; return True if there was room without removing a block that is `needed`."""
        if key in self._blocks:
            return True
        num_bytes = sum(_aligned_bytes(tensor) for tensor in tensors.values())
        while self.num_bytes + num_bytes > self._most_bytes:
            oldest = next((name for name in self._blocks if name not in needed), None)
            if oldest is None or num_bytes > self._most_bytes:
                return False
            self.num_bytes -= self._blocks.pop(oldest)[1]
        self._blocks[key] = (_copied(tensors, num_bytes), num_bytes)
        self.num_bytes += num_bytes
        return True

    def use(self, keys: Sequence[bytes]) -> None:
        """Note that a text uses these; others need its first blocks, so its last go first."""
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)


def _aligned_bytes(tensor: Tensor) -> int:
    return rounded_up(tensor.numel() * tensor.element_size(), _ALIGN_BYTES)


def _copied(tensors: Tensors, num_bytes: int) -> Tensors:
    """Copy tensors to the host, into one allocation, which leaves no gaps when it is freed."""
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    copies = dict[str, Tensor]()
    lo = 0
    for name, tensor in tensors.items():
        hi = lo + tensor.numel() * tensor.element_size()
        copies[name] = memory[lo:hi].view(tensor.dtype).view(tensor.shape)
        copies[name].copy_(tensor)
        lo += _aligned_bytes(tensor)
    return copies


class _Way(NamedTuple):
    """The part of a text whose rows are kept: the names up to `position`."""

    position: int
    keys: Sequence[bytes]
    point_key: bytes | None  # point of layers with states


class _GoneError(Exception):
    """A block was removed, or is damaged."""


class PrefixCache:
    """Blocks of all texts of one decoder, in memory and in a folder.

    Args:
        root_of: names a model, and everything else that its rows' bits currently depend on.
        ram_bytes: limit of blocks in memory.
        folder: keeps all blocks as well, as far as there is room; None for no folder.
        check: raises `ValueError` for a file that is no block of a model; called with its rows, and
            whether it is a point.
    """

    def __init__(
        self,
        root_of: Callable[[str], bytes],
        ram_bytes: int,
        folder: BlockFolder | None = None,
        check: CheckBlock = lambda header, part, *, is_point: None,
    ) -> None:
        self._root_of = root_of
        self._ram = BlockStore(ram_bytes)
        self._folder = folder
        self._check = check

    @property
    def num_bytes(self) -> int:
        """Return the bytes of blocks in memory."""
        return self._ram.num_bytes

    @torch.inference_mode()
    def keep(self, caches: Caches, tokens: Sequence[int]) -> None:
        """Keep the caches' rows of these tokens that are not kept yet, as far as there is room."""
        for part, cache in caches.saved().items():
            chain = self._chain(part, cache, tokens)
            num_rows = min(cache.num_sound, chain.num_rows)
            keys = chain.keys[: num_rows // BLOCK_ROWS]
            needed = {*keys}
            for index, key in enumerate(keys):
                first = index * BLOCK_ROWS
                rows = partial(row_tensors, part, cache, first, first + BLOCK_ROWS)
                if not self._has(key) and not self._write(key, rows(), needed):
                    break
            self._ram.use(keys)
            if isinstance(cache, RecurrentCache):
                self._keep_points(part, cache, chain, needed)

    def _keep_points(
        self, part: str, cache: RecurrentCache, chain: TokenChain, needed: set[bytes]
    ) -> None:
        for point in cache.take_points():
            if point.length <= min(cache.num_sound, chain.num_rows):
                key = chain.point_key(point.length)
                if not self._has(key):
                    first = point_blocks(point.length) * BLOCK_ROWS
                    rows = row_tensors(part, cache, first, point.length)
                    self._write(key, {**rows, **point_tensors(part, point)}, needed)
                self._ram.use([key])

    def _chain(self, part: str, cache: KVCache, tokens: Sequence[int]) -> TokenChain:
        side = b"long" if cache.is_long else b""  # at the turning point
        return TokenChain(self._root_of(part) + side, tokens, cache.ahead)

    def _has(self, key: bytes) -> bool:
        return key in self._ram or (self._folder is not None and self._folder.look(key))

    def _write(self, key: bytes, tensors: Tensors, needed: set[bytes]) -> bool:
        """Keep tensors in memory and in the folder; return True if one had room."""
        is_there = self._ram.write(key, tensors, needed)
        if self._folder is not None:
            is_there |= self._folder.write(key, tensors)
        return is_there

    def fill(self, caches: Caches, tokens: Sequence[int]) -> None:
        """Load a text's kept blocks into its caches, behind the rows that they hold already."""
        most_rows = len(tokens) - 1
        for part, cache in caches.saved().items():
            while True:
                try:
                    self._fill(part, cache, tokens, most_rows - cache.ahead)
                    break
                # it is known by now
                except _GoneError:
                    continue
            # a draft's rows beyond the target's are of no use
            most_rows = min(most_rows, caches.target.length)
        caches.rejoin(most_lost=BLOCK_ROWS)

    @torch.inference_mode()
    def _fill(self, part: str, cache: KVCache, tokens: Sequence[int], most_rows: int) -> None:
        """Load blocks into one model's cache, if they bring enough rows. Raises `_GoneError`."""
        chain = self._chain(part, cache, tokens)
        has_states = isinstance(cache, RecurrentCache)
        way = self._longest(chain, most_rows, has_states=has_states)
        if way.position < cache.length + LEAST_BROUGHT:
            return
        # first the part that recurrent layers cannot do without
        point = None
        if way.point_key is not None:
            point = point_of(part, self._read(way.point_key, part, is_point=True), way.position)
        cache.extend(self._rows(part, way, cache.length), way.position)
        if isinstance(cache, RecurrentCache) and point is not None:
            cache.restore(point)
        self._ram.use([*way.keys, *filter(None, [way.point_key])])

    def _longest(self, chain: TokenChain, most_rows: int, *, has_states: bool) -> _Way:
        """Return the longest part of a text, at most this many rows, that blocks and points cover."""
        keys = chain.keys
        num_blocks = next((at for at, key in enumerate(keys) if not self._has(key)), len(keys))
        if not has_states:
            position = max(0, min(num_blocks * BLOCK_ROWS, most_rows))
            return _Way(position, keys[: -(-position // BLOCK_ROWS)], None)
        last = min((num_blocks + 1) * BLOCK_ROWS, most_rows, chain.num_rows)
        for position in range(last, 0, -1):
            key = chain.point_key(position)
            # blocks that another program has written since are not looked for at every position
            if key in self._ram or (self._folder is not None and key in self._folder):
                return _Way(position, keys[: point_blocks(position)], key)
        return _Way(0, (), None)

    def _rows(self, part: str, way: _Way, first: int) -> Iterator[tuple[int, Layers]]:
        """Yield rows from position `first` on, with their first positions."""
        pieces = [(key, False) for key in way.keys]
        if way.point_key is not None:
            pieces.append((way.point_key, True))
        for index, (key, is_point) in enumerate(pieces):
            begin = index * BLOCK_ROWS
            if begin + BLOCK_ROWS <= first:
                continue
            layers = layers_of(part, self._read(key, part, is_point=is_point))
            lo = max(0, first - begin)
            hi = way.position - begin
            yield (
                begin + lo,
                {
                    layer: {name: rows[:, :, lo:hi] for name, rows in states.items()}
                    for layer, states in layers.items()
                },
            )

    def _read(self, key: bytes, part: str, *, is_point: bool) -> Tensors:
        """Return a block. Raises `_GoneError` if it is gone."""
        tensors = self._ram.read(key)
        if tensors is None and self._folder is not None:
            tensors = self._folder.read(key, partial(self._check, part=part, is_point=is_point))
            if tensors is not None:
                self._ram.write(key, tensors, {key})
        if tensors is None:
            raise _GoneError
        return tensors
