"""Whether a growing tree is worth another draft pass, and how many of its nodes are worth their rows.

A pass that ends while the link still fills the slots is free. Any other has to bring tokens at the rate at which a step
brings them: the gain that is asked for is tokens per step / seconds of a step * seconds of the pass. What the last pass
has added to the expected tokens stands for what the next one will, since passes bring less and less. Invariant: where
nothing was measured all are. It looks at tokens that were proposed, so it is for trees that may.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from offload.tree.sizes import SIZES

StepSeconds = Callable[[int, Sequence[int]], float]  # of a step, by rows of its sweep and of each of its draft passes

_MOST_STEPS = 32  # that the mean of tokens goes back


class Worth:
    """For one kind of sampling: what steps have brought, and so what a pass has to."""

    def __init__(self, step_s: StepSeconds = lambda *_: 1.0) -> None:
        self._step_s, self._tokens_per_step, self._num_steps = step_s, 0.0, 0

    def pays(self, gain: float, num_rows: int, draft_widths: Sequence[int]) -> bool:
        """Whether one more pass like the last one is worth its time.

        Args:
            gain: tokens of a sweep that the last pass has added to those expected.
            num_rows: of the sweep.
            draft_widths: rows of every pass so far, one at least.
        """
        so_far_s = self._step_s(num_rows, draft_widths)
        then_s = self._step_s(num_rows, [*draft_widths, draft_widths[-1]])
        return then_s <= so_far_s or gain * so_far_s >= self._tokens_per_step * (then_s - so_far_s)

    def num_rows(self, chances: NDArray[np.float64], draft_widths: Sequence[int], num_roots: int = 1) -> int:
        """Rows of the sweep that brings the most tokens for its time: the roots and the best nodes.

        Rows that take no time are all worth it; each row of a mixture of experts asks for some that others do not.

        Args:
            chances: of the nodes below the root to be accepted, falling.
            draft_widths: rows of every pass.
        """
        most = len(chances) + num_roots
        sizes = [size for size in SIZES if num_roots <= size < most] + [most]
        seconds = np.array([self._step_s(size, draft_widths) for size in sizes])
        tokens = np.cumsum([float(num_roots), *chances])[np.array(sizes) - num_roots]
        rates = tokens / seconds
        return sizes[len(sizes) - 1 - int(rates[::-1].argmax())]  # of equals the largest

    def together_with(self, others: Iterable["Worth"]) -> "Worth":
        """That of a step for several texts, which brings what each brings."""
        joint = Worth(self._step_s)
        joint._tokens_per_step = self._tokens_per_step + sum(other._tokens_per_step for other in others)
        return joint

    def learn(self, num_tokens: int) -> None:
        """A step has brought so many; those of long ago fade."""
        self._num_steps = min(self._num_steps + 1, _MOST_STEPS)
        self._tokens_per_step += (num_tokens - self._tokens_per_step) / self._num_steps
