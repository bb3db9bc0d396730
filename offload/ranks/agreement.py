"""What ranks settle between joining and the first pass: everybody says something small, and everybody hears it all."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from offload.errors import RankError, UserError, ensure, reason
from offload.ranks.messages import Channel, Kind, Message
from offload.ranks.transport import Transport

_HEAD = 0
_MOST_BYTES = 1 << 20
T = TypeVar("T")


def tell_all(transport: Transport, value: Any) -> list[Any]:
    """The values of all ranks, in their order; each is anything that JSON has. Returns when the last has spoken."""
    ranks = range(transport.num_ranks)
    if transport.rank != _HEAD:
        transport.send(_HEAD, Channel.DATA, _word(value))
        return list(_read(transport.receive(_HEAD, Channel.DATA), _HEAD))
    values = [value if rank == _HEAD else _read(transport.receive(rank, Channel.DATA), rank) for rank in ranks]
    for rank in ranks[1:]:
        transport.send(rank, Channel.DATA, _word(values))
    return values


def hear_head(transport: Transport, value: Any = None) -> Any:
    """What the head says, on every rank."""
    return tell_all(transport, value)[_HEAD]


def agree_on(transport: Transport, refusal: str | None = None) -> None:
    """Go on where no rank has anything against it. Raises `UserError` on all of them where one has, saying which."""
    for rank, line in enumerate(tell_all(transport, refusal)):
        if line is not None:
            raise UserError(f"rank {rank}: {line}")


def try_together(transport: Transport, attempt: Callable[[], T]) -> T:
    """What this rank's attempt gives, when that of no rank is refused. Raises `UserError` as `agree_on` does."""
    try:
        found = attempt()
    except UserError as error:
        agree_on(transport, str(error))
        raise
    agree_on(transport)
    return found


def _word(value: Any) -> Message:
    return Message(Kind.WORD, payload=torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8))


def _read(message: Message, rank: int) -> Any:
    payload = torch.empty(0) if message.payload is None else message.payload
    try:
        ensure(message.kind is Kind.WORD, f"{message.kind.name} is no word")
        ensure(payload.dtype == torch.uint8 and payload.numel() <= _MOST_BYTES, "a word is short")
        return json.loads(payload.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise RankError(f"rank {rank} has said what is no word: {reason(error)}") from None
