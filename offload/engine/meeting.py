"""Ranks that were told to load one target meet, and see that they mean the same."""

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from offload.engine.team import Given
from offload.errors import ReadError
from offload.planning.place import require_place
from offload.ranks.join import headers_digest, joined
from offload.ranks.transport import Transport

_NUM_SAMPLES, _SAMPLE_BYTES = 16, 64  # of each file


class Met(NamedTuple):
    """The way to all others."""

    transport: Transport
    notes: tuple[str, ...]  # for the user


def meet(given: Given, resources: ExitStack, transport: Transport | None) -> Met:
    """Where torchrun's environment says, unless there is a transport already; it is open as long as `resources`.

    Raises `UserError` where ranks do not come, or have other files or options.
    """
    if transport is not None:
        return Met(transport, ())
    target, options = given.files.target, given.options
    given.hooks.on_phase("waiting for the other ranks")
    headers = json.dumps([target.config, target.tensors], sort_keys=True, default=repr)  # codings are dataclasses
    content = [headers.encode(), *map(_sample, target.shards)]
    has_draft = "given" if given.files.draft else "none"
    alike = {"--ranks": options.ranks, "--pipeline": options.pipeline, "--draft": has_draft}
    alike |= {"--dtype": options.dtype, "--context": str(options.context)}
    agreed = " ".join(f"{flag} {value}" for flag, value in alike.items())
    meeting = resources.enter_context(joined(require_place(), headers_digest(content), agreed, target.shards))
    return Met(meeting.transport, tuple(filter(None, [meeting.note()])))


def _sample(shard: Path) -> bytes:
    """Some bytes from all over a file: models of one shape have equal headers and other weights. Raises `ReadError`."""
    try:
        with shard.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            offsets = [size * part // _NUM_SAMPLES for part in range(_NUM_SAMPLES)]
            return b"".join(os.pread(file.fileno(), _SAMPLE_BYTES, offset) for offset in offsets)
    except OSError as error:
        raise ReadError(f"{shard.name} cannot be read any more: {error.strerror}") from None
