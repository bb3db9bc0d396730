"""Which expert lies in which slot of a pool, which one stays, and which gives way: bookkeeping alone, no bytes.

Kept is what was used most, by counts that halve every `HALF_LIFE_TOKENS` tokens, over all layers together. A block that
is used less than all that are kept is read, used and dropped: a slot that lent itself to such a block is *passing*, and
at most `num_passing` are at once. So a pass that needs more than there are slots (a prompt) costs the kept ones
nothing, where dropping what was used longest ago would keep nothing at all.
Invariants: what is held never gives way; a block lies in one slot, or in none; a slot holds one block, or is empty.
"""

from collections.abc import Iterator, Sequence

import numpy as np

HALF_LIFE_TOKENS = 24.0
NUM_PASSING = 8  # as many as are read at once
_MOST_HALVINGS = 512.0  # of one pass: more than a float64 could tell apart, and 2 to this power is still a number
_RENORMALISE = 2.0**256  # what one use may have grown to before all counts are scaled down


def warm_uses(counts_B: Sequence[float], num_tokens: float) -> np.ndarray:
    """Decayed uses as they would stand now if blocks had been used `counts_B` times in `num_tokens` tokens, evenly."""
    lasting_tokens = HALF_LIFE_TOKENS / np.log(2)  # the sum of 2^(-t/HALF_LIFE) over all earlier tokens
    return np.asarray(counts_B, dtype=np.float64) * (min(lasting_tokens, num_tokens) / max(num_tokens, 1.0))


def warm_order(counts_B: Sequence[float]) -> np.ndarray:
    """Blocks in the order in which they should be read into an empty pool: most used first, unused ones left out."""
    counts = np.asarray(counts_B)
    order = np.argsort(-counts, kind="stable")
    return order[: np.count_nonzero(counts)]


class ExpertCache:
    """Slots 0..num_slots-1 and the blocks 0..num_blocks-1 in them. One thread calls.

    `counts` are decayed uses to begin with (`warm_uses`); nothing lies in a slot then. `num_passing` bounds how many
    slots lend themselves at once to blocks that shall not stay, and so how many of those are read ahead.
    """

    def __init__(
        self, num_blocks: int, num_slots: int, *, counts: Sequence[float] | None = None, num_passing: int = NUM_PASSING
    ) -> None:
        assert num_slots >= 2, "one slot computes while the next one is read"
        self.num_passing = max(2, min(num_passing, num_slots // 2))
        self._one = 1.0  # what a use counts by now: it grows where all other counts would have to shrink
        self._weight_B = np.zeros(num_blocks) if counts is None else np.array(counts, dtype=np.float64)
        assert self._weight_B.shape == (num_blocks,), "one count for each block"
        self._slot_of_B = np.full(num_blocks, -1)
        self._block_in_S = np.full(num_slots, -1)
        self._holds_S = [0] * num_slots
        self._weight_S = np.full(num_slots, np.inf)  # of the block in it; infinite where it cannot give way
        self._empty = list(range(num_slots - 1, -1, -1))
        self._passing = set[int]()  # slots held for blocks that shall not stay

    @property
    def uses_B(self) -> np.ndarray:
        """Decayed uses of every block; a use of this pass is 1."""
        return self._weight_B / self._one

    def begin_pass(self, num_tokens: float = 1.0) -> None:
        """A pass of that many tokens begins: earlier uses count for less."""
        self._one *= 2.0 ** min(num_tokens / HALF_LIFE_TOKENS, _MOST_HALVINGS)
        if self._one > _RENORMALISE:
            self._weight_B /= self._one
            self._weight_S /= self._one
            self._one = 1.0

    def use(self, blocks: Sequence[int]) -> None:
        """The pass needs these, whether they are there or not; one that is named twice counts once."""
        chosen = np.asarray(blocks, dtype=np.intp)
        self._weight_B[chosen] += self._one
        slots = self._slot_of_B[chosen]
        there = slots >= 0
        slots, weights = slots[there], self._weight_B[chosen[there]]
        gives_way = np.isfinite(self._weight_S[slots])
        self._weight_S[slots[gives_way]] = weights[gives_way]

    def hold(self, block: int) -> int | None:
        """The slot of a block, which stays there until as many `release`; None where it is not there."""
        slot = int(self._slot_of_B[block])
        if slot < 0:
            return None
        self._holds_S[slot] += 1
        self._weight_S[slot] = np.inf
        return slot

    def place(self, block: int) -> int | None:
        """A slot for a block that is not there, held from now on; what was in it is forgotten.

        None where nothing may give way before something is released; never where nothing is held.
        """
        assert self._slot_of_B[block] < 0, f"block {block} is there already"
        slot = self._empty.pop() if self._empty else self._take(block)
        if slot is not None:
            self._slot_of_B[block], self._block_in_S[slot] = slot, block
            self._holds_S[slot], self._weight_S[slot] = 1, np.inf
        return slot

    def release(self, block: int) -> None:
        """One hold less; without any the block stays until it gives way."""
        slot = int(self._slot_of_B[block])
        assert slot >= 0 and self._holds_S[slot] > 0, f"block {block} is not held"
        self._holds_S[slot] -= 1
        if not self._holds_S[slot]:
            self._weight_S[slot] = self._weight_B[block]
            self._passing.discard(slot)

    def forget(self, block: int) -> None:
        """A block that could not be read is not there, whoever holds it, and its slot is empty."""
        slot = int(self._slot_of_B[block])
        if slot >= 0:
            self._slot_of_B[block] = self._block_in_S[slot] = -1
            self._holds_S[slot], self._weight_S[slot] = 0, np.inf
            self._passing.discard(slot)
            self._empty.append(slot)

    def kept(self) -> Iterator[int]:
        """The blocks that are there, most used first."""
        blocks = self._block_in_S[self._block_in_S >= 0]
        return iter(blocks[np.argsort(-self._weight_B[blocks], kind="stable")].tolist())

    def _take(self, block: int) -> int | None:
        """The slot whose block is used least, if that one may give way to `block`."""
        slot = int(self._weight_S.argmin())
        least = self._weight_S[slot]
        if least == np.inf:
            return None
        if self._weight_B[block] <= least:
            if len(self._passing) >= self.num_passing:
                return None
            self._passing.add(slot)
        self._slot_of_B[self._block_in_S[slot]] = -1
        return slot
