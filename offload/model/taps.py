"""Hidden states of the target that a drafter reads, kept until the drafter has taken them.

A pass over the target computes the states from which heads trained on it start (MTP layers,
EAGLE-3, DFlash). `Taps` names those states; a `TapLog` keeps them for one text's committed tokens.
It belongs to the text's cache and follows it: `commit` picks the rows of the accepted path, `clear`
cuts. So interrupted steps, prompts of several passes and many texts in one pass need no special
treatment.

Invariant: rows of a log are those of committed positions [first, end), without a gap.

Shape letters, in this file only: W width of a row, the sum over what is tapped.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from offload.model.layer_stacks import layer_stacks
from offload.model.library import PreTrainedModel


class Taps(NamedTuple):
    """The hidden states that a target keeps: inputs of these layers, the final norm's output.

    States lie in a row by rising numbers, the normed one last. A layer's number may be the number of
    layers: that is what leaves the last one, before the norm.
    """

    layers: tuple[int, ...] = ()
    is_normed: bool = False

    @property
    def num_states(self) -> int:
        """Return the number of states of width D that a row has."""
        return len(self.layers) + self.is_normed


class TapLog:
    """Hidden states of one text's committed tokens.

    Attributes:
        first: position of the first row; the last one stays of rows that are taken.
    """

    def __init__(self) -> None:
        self.first = 0
        self._rows = list[Tensor]()
        self._num_rows = 0
        self._uncommitted = list[Tensor]()

    @property
    def end(self) -> int:
        """Return the position behind the last row."""
        return self.first + self._num_rows

    def offer(self, hidden_TW: Tensor, *, is_first: bool) -> None:
        """Note the rows of a pass; `is_first` where no earlier pass has rows behind the committed."""
        if is_first:
            self._uncommitted.clear()
        self._uncommitted.append(hidden_TW)

    def commit(self, path: Sequence[int], length: int) -> None:
        """Keep rows `path` of what was offered, of positions from `length` on."""
        if self._uncommitted and path:
            if self.end != length:
                self._restart(length)
            hidden_UW = torch.cat(self._uncommitted)
            row_A = torch.tensor([*path], device=hidden_UW.device)
            self._rows.append(hidden_UW[row_A])
            self._num_rows += len(path)
        self._uncommitted.clear()

    def clear(self, length: int) -> None:
        """Forget the rows from this position on, and what was offered."""
        self._uncommitted.clear()
        if self.end <= length:
            return
        num_kept = max(0, length - self.first)
        kept_TW = torch.cat(self._rows)[:num_kept].clone()
        self._restart(self.first if num_kept else length)
        if num_kept:
            self._rows.append(kept_TW)
            self._num_rows = num_kept

    def take(self, position: int, end: int) -> Tensor:
        """Return the rows (T, W) of positions [position, end); the last of them stays."""
        assert self.first <= position < end <= self.end, "these rows are there"
        rows_TW = torch.cat(self._rows)
        first = self.first
        self._restart(end - 1)
        self._rows.append(rows_TW[end - 1 - first :].clone())
        self._num_rows = len(self._rows[0])
        return rows_TW[position - first : end - first]

    def _restart(self, position: int) -> None:
        self.first = position
        self._rows.clear()
        self._num_rows = 0


@contextmanager
def tapped(taps: Taps | None, meta_model: PreTrainedModel) -> Iterator[Callable[[int], Tensor]]:
    """Tap hidden states during the body; yield a function of T that returns them as (T, W).

    Call it after the pass over T rows. Families whose last layers share keys run these on scored
    rows alone. The other rows are zeros there, which costs guesses, never exactness.
    """
    decoder = meta_model.get_decoder()
    shown = dict[int, Tensor]()
    hooks = list[Any]()
    layers = layer_stacks(meta_model)[0] if taps else ()
    normed = len(layers) + 1

    def note_entering(index: int, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        shown[index] = (args[0] if args else kwargs["hidden_states"])[0]

    def note_normed(_: nn.Module, __: Any, out: Any) -> None:
        shown[normed] = out.last_hidden_state[0]

    def states(num_rows: int) -> Tensor:
        whole = [pad(rows, (0, 0, num_rows - len(rows), 0)) for _, rows in sorted(shown.items())]
        return torch.cat(whole, dim=1)

    for index in taps.layers if taps else ():
        module = layers[index] if index < len(layers) else final_norm(decoder)
        hook = partial(note_entering, index)
        hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    if taps and taps.is_normed:
        hooks.append(decoder.register_forward_hook(note_normed))
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def final_norm(decoder: nn.Module) -> nn.Module:
    """Return the norm behind a decoder's last layer."""
    norms = [module for name, module in decoder.named_children() if "norm" in name]
    assert norms, "a decoder has a final norm"
    return norms[-1]
