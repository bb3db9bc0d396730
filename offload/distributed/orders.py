"""The numbers of messages to ranks that serve, and what ranks settle before the first pass.

Orders are runs and commits of stages, how a text is drawn, and why a rank fails. Between joining
and the first pass every rank says something small, and all ranks hear it.

Invariant: numbers that cannot be an order raise `ValueError`, before anything is computed.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from offload.declaration import options_of
from offload.distributed.transport import Channel, Kind, Message, Transport
from offload.errors import RankError, UserError, ensure, reason
from offload.sampling_options import Sampling


class RunMessage(NamedTuple):
    """A RUN as it is read: W rows behind U - W uncommitted ones."""

    number: int
    is_dead: bool
    num_drawn: int  # of its rows, the last ones
    token_W: Tensor
    position_W: Tensor
    sees_WU: Tensor  # bool; which uncommitted rows, itself included


def read_run(numbers: Sequence[int], num_uncommitted: int) -> RunMessage:
    """Read a RUN behind `num_uncommitted` rows."""
    number, is_dead, num_rows, num_drawn = numbers[:4]
    rows = numbers[4 : 4 + 2 * num_rows]
    end = 4 + 2 * num_rows
    is_sound = num_rows > 0 and 0 <= num_drawn <= num_rows and len(rows) == 2 * num_rows
    ensure(
        is_sound, f"run {number} of {num_rows} rows, {num_drawn} drawn, in {len(numbers)} numbers"
    )
    token_W, position_W = torch.tensor(rows).view(num_rows, 2).T.contiguous()
    sees_WU = torch.zeros(num_rows, num_uncommitted + num_rows, dtype=torch.bool)
    for own, sees_U in enumerate(sees_WU, num_uncommitted):
        seen = list(numbers[end + 1 : end + 1 + numbers[end]])
        is_sound = seen[-1:] == [own] and min(seen) >= 0 and max(seen) == own
        ensure(is_sound, f"row {own} of run {number} sees {seen[:8]}, and must see itself last")
        sees_U[seen] = True
        end += 1 + len(seen)
    ensure(end == len(numbers), f"run {number} has {len(numbers)} numbers, {end} are its own")
    return RunMessage(number, bool(is_dead), num_drawn, token_W, position_W, sees_WU)


def read_commit(numbers: Sequence[int], num_uncommitted: int) -> tuple[list[int], list[int]]:
    """Read a COMMIT of `num_uncommitted` rows, none of them named twice.

    Return those that are committed, and those that stay uncommitted, in their new order.
    """
    num_path, *rows = numbers
    is_sound = (
        len({*rows}) == len(rows)
        and {*rows} <= {*range(num_uncommitted)}
        and 0 <= num_path <= len(rows)
    )
    ensure(
        is_sound,
        f"a commit of {num_path} and rows {rows[:16]}, of {num_uncommitted} that there are",
    )
    return rows[:num_path], rows[num_path:]


# A text is drawn by numbers: whole ones, and others, each in the order of their declaration.
_WHOLE = [name for name, one in options_of(Sampling).items() if one.kind is int]
_REAL = [name for name, one in options_of(Sampling).items() if one.kind is float]


def reset_message(num_kept: int, sampling: Sampling, tokens: Sequence[int] = ()) -> Message:
    """Return a RESET: how the tokens of a text are drawn, and how many are kept.

    To a draft it brings the text itself.
    """
    numbers = [num_kept, *(getattr(sampling, name) for name in _WHOLE), *tokens]
    law = torch.tensor([getattr(sampling, name) for name in _REAL], dtype=torch.float64)
    return Message(Kind.RESET, numbers, law)


def sampling_of(reset: Message) -> Sampling:
    """Return how the tokens of a text are drawn."""
    assert reset.payload is not None, "a text is reset with its temperature"
    own = dict(zip(_REAL, reset.payload.tolist(), strict=True))
    return Sampling(**own, **dict(zip(_WHOLE, reset.numbers[1:], strict=False)))  # type: ignore[arg-type]


def text_of(reset: Message) -> Sequence[int]:
    """Return the tokens of the text that a draft is told to begin."""
    return reset.numbers[1 + len(_WHOLE) :]


def error_message(error: Exception) -> Message:
    """Return an ERROR with its reason, in UTF-8."""
    return Message(Kind.ERROR, (), torch.tensor(list(reason(error).encode()), dtype=torch.uint8))


HEAD = 0  # the rank that has the text
_MOST_BYTES = 1 << 20
T = TypeVar("T")


def all_gather_objects(transport: Transport, value: Any) -> list[Any]:
    """Return the values of all ranks, in their order; each is anything that JSON has.

    Returns when the last rank has spoken.
    """
    ranks = range(transport.num_ranks)
    if transport.rank != HEAD:
        transport.send(HEAD, Channel.DATA, _word(value))
        return list(_read(transport.receive(HEAD, Channel.DATA), HEAD))
    values = [
        value if rank == HEAD else _read(transport.receive(rank, Channel.DATA), rank)
        for rank in ranks
    ]
    for rank in ranks[1:]:
        transport.send(rank, Channel.DATA, _word(values))
    return values


def broadcast_from_head(transport: Transport, value: Any = None) -> Any:
    """Return what the head says, on every rank."""
    return all_gather_objects(transport, value)[HEAD]


def agree_on(transport: Transport, refusal: str | None = None) -> None:
    """Go on where no rank objects.

    Raises `UserError` on all ranks where one objects, with its reason.
    """
    for rank, line in enumerate(all_gather_objects(transport, refusal)):
        if line is not None:
            raise UserError(f"rank {rank}: {line}")


def try_together(transport: Transport, attempt: Callable[[], T]) -> T:
    """Return what this rank's attempt gives, when no rank's is refused.

    Raises `UserError` as `agree_on` does.
    """
    try:
        found = attempt()
    except UserError as error:
        agree_on(transport, str(error))
        raise
    agree_on(transport)
    return found


def _word(value: Any) -> Message:
    return Message(
        Kind.WORD,
        payload=torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8),
    )


def _read(message: Message, rank: int) -> Any:
    payload = torch.empty(0) if message.payload is None else message.payload
    try:
        ensure(message.kind is Kind.WORD, f"{message.kind.name} is no word")
        ensure(payload.dtype == torch.uint8 and payload.numel() <= _MOST_BYTES, "a word is short")
        return json.loads(payload.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise RankError(f"rank {rank} has said what is no word: {reason(error)}") from None
