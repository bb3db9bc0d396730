"""What ranks agree on between joining and the first pass, in small messages from every rank.

Both ends name the type of a message; anything else that arrives is refused.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from msgspec import Raw, msgpack

from offload.distributed.orders import HEAD, Word
from offload.distributed.transport import Channel, Transport
from offload.errors import RankError, UserError, ensure, reason

T = TypeVar("T")
# plans of hundreds of layers take some kilobytes
_MOST_BYTES = 1 << 20


def gather_values(transport: Transport, value: T, kind: Any) -> list[T]:
    """Return the values of all ranks, of the type `kind`, once the last has come."""
    if transport.rank != HEAD:
        _send_value(transport, HEAD, value)
        return broadcast_from_head(transport, [], list[kind])
    others = range(1, transport.num_ranks)
    return broadcast_from_head(
        transport, [value, *(_receive_value(transport, rank, kind) for rank in others)], list[kind]
    )


def broadcast_from_head(transport: Transport, value: T, kind: Any) -> T:
    """Return the head's value, a `kind`, on every rank; the other ranks' `value` is not used."""
    if transport.rank != HEAD:
        heard: T = _receive_value(transport, HEAD, kind)
        return heard
    for rank in range(1, transport.num_ranks):
        _send_value(transport, rank, value)
    return value


def agree_on(transport: Transport, refusal: str | None = None) -> None:
    """Return if no rank objects. Raises `UserError` with the reason on all ranks if one does."""
    for rank, line in enumerate(gather_values(transport, refusal, str | None)):
        if line is not None:
            raise UserError(f"rank {rank}: {line}")


def try_together(transport: Transport, attempt: Callable[[], T]) -> T:
    """Return the result of this rank's attempt if no rank's failed; raises as `agree_on`."""
    try:
        outcome = attempt()
    except UserError as error:
        agree_on(transport, str(error))
        raise
    agree_on(transport)
    return outcome


def _send_value(transport: Transport, to: int, value: object) -> None:
    transport.send(to, Channel.DATA, Word(Raw(msgpack.encode(value))))


def _receive_value(transport: Transport, source: int, kind: Any) -> Any:
    order = transport.receive(source, Channel.DATA)
    try:
        if isinstance(order, Word):
            ensure(memoryview(order.content).nbytes <= _MOST_BYTES, "a word is short")
            return msgpack.decode(order.content, type=kind)
        received = type(order).__name__
    except (ValueError, RecursionError) as error:
        received = reason(error)
    raise RankError(f"rank {source} has said what is no word here: {received}")
