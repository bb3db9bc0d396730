"""Names of both models of a decoder in files, and whether a file was written by the same."""

import sys
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np

from offload.checkpoint.checkpoint import Checkpoint, ModelFiles, compute_dtype_name
from offload.checkpoint.identity import ModelIdentity, identity_of, same_model
from offload.errors import ReadError
from offload.streaming.disk import DiskReader, OpenSource, Watcher
from offload.streaming.summing import BlockSum, with_sum

# A sum that lacks at most this many bytes is completed by reading, such as a table no pass needs.
_LITTLE_BYTES = 64 << 20


class Identities:
    """Identities of target and draft, each computed once, of the files that were opened.

    Args:
        dtype: the requested compute type.
        is_wished: sum up weights as they are read, for files that will name them.
    """

    def __init__(
        self,
        files: ModelFiles,
        open_source: OpenSource = DiskReader,
        *,
        dtype: str = "auto",
        limit_bytes_per_s: float | None = None,
        is_wished: bool = False,
    ) -> None:
        self.files = files
        self._dtype = dtype
        self._how: dict[str, Any] = {
            "open_source": open_source,
            "limit_bytes_per_s": limit_bytes_per_s,
        }
        self._known = dict[str, ModelIdentity]()
        self._sums = dict[str, BlockSum]()
        for part, checkpoint in self.files._asdict().items() if is_wished else ():
            # no weights are read yet: the request may still be refused
            if checkpoint is not None:
                self._identify(part, checkpoint, sys.maxsize)

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """Return the compute types by part; an empty string for no draft."""
        files = self.files._asdict()
        return {
            part: compute_dtype_name(checkpoint, self._dtype) if checkpoint else ""
            for part, checkpoint in files.items()
        }

    def _identify(self, part: str, checkpoint: Checkpoint, most_bytes: int) -> None:
        """Note the identity that is known without reading weights, and begin a missing sum."""
        self._known[part] = identity_of(checkpoint)
        if checkpoint.num_bytes <= most_bytes and not self._known[part].has_sum:
            self._sums[part] = BlockSum(checkpoint)

    def for_part(self, part: str) -> ModelIdentity | None:
        """Return the identity of the target or the draft; None for no draft.

        It has the sum of all weights once they are read. Raises `ReadError` if files have changed
        since they were opened.
        """
        checkpoint: Checkpoint | None = getattr(self.files, part)
        if checkpoint is None:
            return None
        if part not in self._known:
            self._identify(part, checkpoint, _LITTLE_BYTES)
        total = self._sums.get(part)
        if total is not None and total.left_bytes <= _LITTLE_BYTES:
            del self._sums[part]
            # the identity is still good: its stamps are those of the opened files
            with suppress(ReadError):
                self._known[part] = with_sum(checkpoint, self._known[part], total, **self._how)
        return self._known[part]

    @property
    def target(self) -> ModelIdentity:
        identity = self.for_part("target")
        assert identity is not None, "there is always a target"
        return identity

    def identity(self, *, follows_draft: bool = False) -> ModelIdentity:
        """Return the target's identity, or of a text that `follows_draft`, one of both models."""
        return self.target.drafted_by(self.for_part("draft") if follows_draft else None)

    def difference(self, saved: ModelIdentity, *, follows_draft: bool = False) -> str:
        """Return in words why a file with this identity is of other models; empty if it is not.

        All weights are read if nothing else can tell. Raises `ReadError`.
        """
        mine = self.identity(follows_draft=follows_draft)
        if saved.has_weights_of(mine) is None and not saved.difference(mine) and saved.has_sum:
            mine = with_sum(self.files.target, mine, **self._how)
        self._known["target"] = self.target._replace(proofs=mine.proofs)
        return same_model(saved, mine)

    def watching(self, part: str, watcher: Watcher) -> Watcher:
        """Return a watcher of weights as they are read: this one, and a sum if it is wanted."""
        total = self._sums.get(part)
        if total is None:
            return watcher

        def look(shard: int, lo: int, stored: np.ndarray) -> None:
            watcher(shard, lo, stored)
            total.look(shard, lo, stored)

        return look
