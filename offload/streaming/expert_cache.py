"""Which expert is in which slot of a pool, and which is evicted: bookkeeping only, no bytes.

The pool keeps the blocks that are likely to be used most, over all layers together. Routing has
habits of a few tokens and of a whole text, and models differ in their shares. So two moving
averages count the rows that used a block, and their weights for predicting the next pass are learnt
by least squares. A block that is less likely than all kept ones is read, used and dropped: the slot
that it borrows is *passing*, and at most `num_passing` are at any time. So a pass that needs more
blocks than there are slots (a prompt) evicts none of the kept ones, whereas evicting the least
recently used would keep nothing at all. Figures are in `bench/LOG.md`.

Invariants: a lent block is never evicted; a block is in one slot, or in none; a slot holds one
block, or is empty. Blocks are numbered in the order in which a pass reaches them.
"""

import numpy as np
from numpy.typing import ArrayLike

HALF_LIVES_TOKENS = (4.0, 32.0)
# share of earlier passes' sums that is left after one more
_LEARNING = 0.98
# squared uses that favour both averages alike: less than one pass of any mixture has
_PRIOR = 1.0
# Of two popular blocks, one that the pass has not reached yet is needed sooner.
_AHEAD = 1.15
# a pass of n rows ages earlier uses by n^0.2 tokens: most rows of a tree are rejected
_TREE_EXPONENT = 0.2
# but by at least n/16 tokens: a prompt's rows are all text
_PROMPT_SHARE = 1 / 16


def warm_order(uses_B: ArrayLike) -> np.ndarray:
    """Return the blocks that were used, the most used first, the order in which to fill a pool."""
    uses = np.asarray(uses_B)
    return np.argsort(-uses, kind="stable")[: np.count_nonzero(uses)]


class ExpertCache:
    """Slots 0..num_slots-1 and the blocks 0..num_blocks-1 in them. One thread calls.

    Args:
        num_slots: at least 2: one computes while the next one is read.
        uses_B: expected uses of each block for a token, such as an earlier run's counts over its
            tokens.
        num_passing: most slots lent at once to blocks that shall not stay, from 2 to half of all;
            as many are read ahead.

    Attributes:
        uses_B: the share of rows expected to use each block, by recent rows; read only.
    """

    def __init__(
        self,
        num_blocks: int,
        num_slots: int,
        *,
        uses_B: ArrayLike | None = None,
        num_passing: int,
    ) -> None:
        assert num_slots >= 2, "one slot computes while the next one is read"
        self.num_passing = max(2, min(num_passing, num_slots // 2))
        self.uses_B = np.zeros(num_blocks) if uses_B is None else np.array(uses_B, dtype=np.float64)
        assert self.uses_B.shape == (num_blocks,), "one share for each block"
        self._averages_2B = np.stack([self.uses_B] * 2)
        # the averages before this pass
        self._before_2B = np.zeros_like(self._averages_2B)
        # the share of this pass's rows that uses each block
        self._shares_B = np.zeros(num_blocks)
        # least squares: sums on how well the averages have predicted passes
        self._squares_22 = np.zeros((2, 2))
        self._products_2 = np.zeros(2)
        self._slot_of_B = np.full(num_blocks, -1)
        self._block_in_S = np.full(num_slots, -1)
        self._num_lent_S = np.zeros(num_slots, dtype=np.int64)
        # worth of the block in each slot; infinite if it must not be evicted
        self._worth_S = np.full(num_slots, np.inf)
        self._empty = list(range(num_slots - 1, -1, -1))
        # slots lent to blocks that shall not stay
        self._passing = set[int]()
        self.begin_pass()

    def begin_pass(self, num_rows: int = 1) -> None:
        """Begin a pass of `num_rows`: earlier uses count for less."""
        self._learn()
        age_tokens = max(num_rows**_TREE_EXPONENT, num_rows * _PROMPT_SHARE)
        kept_2 = 2.0 ** (-age_tokens / np.array(HALF_LIVES_TOKENS))
        self._averages_2B *= kept_2[:, None]
        self._step_2 = 1 - kept_2
        self._num_rows = num_rows
        self.uses_B = self._expected(self._averages_2B)
        self._go_to(-1)

    def use(self, blocks: ArrayLike, num_rows: ArrayLike = 1) -> None:
        """Count that the pass needs these blocks, cached or not, each named once."""
        chosen = np.asarray(blocks, dtype=np.intp)
        shares = np.asarray(num_rows) / self._num_rows
        self._shares_B[chosen] += shares
        self._averages_2B[:, chosen] += self._step_2[:, None] * shares
        self.uses_B[chosen] = self._expected(self._averages_2B[:, chosen])
        self._go_to(int(chosen.max(initial=-1)))

    def _learn(self) -> None:
        """Learn from the finished pass how well the averages before it predicted it."""
        # without BLAS, whose threads would disturb those that compute
        before_2B = self._before_2B
        squares_22 = np.einsum("ib,jb->ij", before_2B, before_2B)
        products_2 = np.einsum("ib,b->i", before_2B, self._shares_B)
        self._squares_22 = _LEARNING * self._squares_22 + squares_22
        self._products_2 = _LEARNING * self._products_2 + products_2
        even = _PRIOR * np.eye(2)
        weights_2 = np.linalg.solve(self._squares_22 + even, self._products_2 + even.mean(axis=0))
        # at least one is positive, since no product is negative
        self._weights_2 = np.maximum(weights_2, 0)
        self._before_2B = self._averages_2B.copy()
        self._shares_B[:] = 0

    def _expected(self, averages_2B: np.ndarray) -> np.ndarray:
        quick, slow = self._weights_2
        return quick * averages_2B[0] + slow * averages_2B[1]

    def _go_to(self, block: int) -> None:
        """Note that the pass has reached this block, and that uses have changed."""
        self._last = block
        idle = np.flatnonzero(self._worth_S < np.inf)
        blocks = self._block_in_S[idle]
        self._worth_S[idle] = self.uses_B[blocks] * np.where(blocks > block, _AHEAD, 1.0)

    def lend(self, block: int) -> int | None:
        """Return the slot of a block, None if it is not in the pool.

        The block stays in its slot until `release` was called as often as this.
        """
        slot = int(self._slot_of_B[block])
        if slot < 0:
            return None
        self._num_lent_S[slot] += 1
        self._worth_S[slot] = np.inf
        return slot

    def make_room(self, block: int) -> int | None:
        """Return a slot for a block that is not in the pool, lent from now on.

        None if nothing can be evicted before a release; never if nothing is lent.
        """
        assert self._slot_of_B[block] < 0, f"block {block} is there already"
        slot = self._empty.pop() if self._empty else self._take(block)
        if slot is not None:
            self._slot_of_B[block] = slot
            self._block_in_S[slot] = block
            self._num_lent_S[slot] = 1
            self._worth_S[slot] = np.inf
        return slot

    def release(self, block: int) -> None:
        """Return one loan; a block that is no longer lent stays until it is evicted."""
        slot = int(self._slot_of_B[block])
        assert slot >= 0 and self._num_lent_S[slot] > 0, f"block {block} is not lent"
        self._num_lent_S[slot] -= 1
        if not self._num_lent_S[slot]:
            self._worth_S[slot] = self.uses_B[block] * (_AHEAD if block > self._last else 1.0)
            self._passing.discard(slot)

    def forget(self, block: int) -> None:
        """Forget a block that could not be read, although it is lent, and empty its slot."""
        slot = int(self._slot_of_B[block])
        if slot >= 0:
            self._slot_of_B[block] = self._block_in_S[slot] = -1
            self._num_lent_S[slot] = 0
            self._worth_S[slot] = np.inf
            self._passing.discard(slot)
            self._empty.append(slot)

    def emptied(self) -> "ExpertCache":
        """Return a cache with the same slots, all empty, which keeps what was learnt of uses."""
        num_blocks = len(self._slot_of_B)
        num_slots = len(self._block_in_S)
        return ExpertCache(num_blocks, num_slots, uses_B=self.uses_B, num_passing=self.num_passing)

    def missing_share(self, num_rows: int) -> float:
        """Return the expected share of missing blocks in a pass of `num_rows`."""
        missing = np.minimum(self.uses_B[self._slot_of_B < 0], 1.0)
        return float(np.mean(1 - (1 - missing) ** num_rows)) if len(missing) else 0.0

    def _take(self, block: int) -> int | None:
        """Return the slot whose block is least needed, if `block` may replace it."""
        slot = int(self._worth_S.argmin())
        if self._worth_S[slot] == np.inf:
            return None
        if self.uses_B[block] <= self._worth_S[slot]:
            if len(self._passing) >= self.num_passing:
                return None
            self._passing.add(slot)
        self._slot_of_B[self._block_in_S[slot]] = -1
        return slot
