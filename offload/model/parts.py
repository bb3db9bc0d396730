"""One pass over several texts: its rows in parts, each of one text, which sees the columns of that text alone.

Products take all rows at once, attention takes part by part: so what a row gets does not depend on other texts, but for
the rounding of products of more rows (and not even that where rows are `InvariantRows`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.model.kv_cache import JointCache, KVCache, Rows


class Part(NamedTuple):
    """The next rows of one text; see `StreamedModel.forward`. A text may have two: its prompt, and a tree behind it."""

    token_T: Tensor
    position_U: Tensor
    ancestor_TU: Tensor
    cache: KVCache


class Seen(NamedTuple):
    """What the rows of one part see."""

    lo: int  # rows of the pass
    hi: int
    first: int  # columns of the buffers of all texts
    last: int
    mask: Any  # of these rows and columns, as attention takes it for one text


@dataclass(frozen=True, slots=True, eq=False)
class Parted:
    """What the rows of one pass see, in place of a mask: part by part."""

    parts: tuple[Seen, ...]

    def attend(self, attend: Callable[..., tuple[Tensor, None]], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(1, T, H, K); families may run the last T rows of the pass alone."""
        first_row, found = self.parts[-1].hi - query.shape[2], list[Tensor]()
        for lo, hi, first, last, mask in self.parts:
            if hi > first_row:
                some, columns = slice(max(0, lo - first_row), hi - first_row), slice(first, last)
                found.append(attend(query[:, :, some], key[:, :, columns], value[:, :, columns], mask)[0])
        return torch.cat(found, 1)


class Laid(NamedTuple):
    """Parts, one behind the other."""

    token_T: Tensor
    position_T: Tensor
    cache: JointCache
    rows: tuple[Rows, ...]


def lay(parts: Sequence[Part]) -> Laid:
    """Give every part its rows of the pass, and its caches their places."""
    rows, lo = list[Rows](), 0
    for _, __, ancestor_TU, cache in parts:
        num_rows, num_uncommitted = ancestor_TU.shape
        rows.append(Rows(cache, lo, lo + num_rows, cache.place(num_uncommitted - num_rows, num_rows)))
        lo += num_rows
    position_T = torch.cat([part.position_U[-len(part.token_T) :] for part in parts])
    return Laid(torch.cat([part.token_T for part in parts]), position_T, JointCache(rows), tuple(rows))


def seen_by(rows: Sequence[Rows], masks: Sequence[Any]) -> Parted:
    """One mask for each part."""
    parts = []
    for (cache, lo, hi, position), mask in zip(rows, masks, strict=True):
        parts.append(Seen(lo, hi, cache.first_slot, cache.first_slot + position + hi - lo, mask))
    return Parted(tuple(parts))
