"""What the numbers of each message are, for both of its ends, and what ranks settle before a pass.

Orders are runs and commits of stages, how a text is drawn, guesses, and why a rank fails. Between
joining and the first pass every rank says something small, and all ranks hear it.

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


class Issue(NamedTuple):
    """A run as the head issues it: w rows behind the U that are there."""

    run: int
    tokens: list[int]
    positions: list[int]
    # per row the uncommitted rows that it looks at, in [0, U + w), ascending, itself the last
    sees: list[list[int]]

    def message(self, num_drawn: int) -> Message:
        """Return a RUN; the last `num_drawn` of its rows are drawn."""
        numbers = [self.run, 0, len(self.tokens), num_drawn]
        for pair in zip(self.tokens, self.positions, strict=True):
            numbers += pair
        for seen in self.sees:
            numbers += [len(seen), *seen]
        return Message(Kind.RUN, numbers)


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


def commit_message(path: Sequence[int], kept: Sequence[int] = ()) -> Message:
    """Return a COMMIT of the rows of a path, and those that stay uncommitted, in their new order."""
    return Message(Kind.COMMIT, [len(path), *path, *kept])


def read_commit(numbers: Sequence[int], num_uncommitted: int) -> tuple[list[int], list[int]]:
    """Return the rows of a `commit_message`, of `num_uncommitted` that there are, none named twice."""
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
    """Return a RESET: how tokens are drawn, how many are kept, and to a draft the text itself."""
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


class Least(NamedTuple):
    """Bounds of guesses that are asked for."""

    f: float  # of the whole path below the root
    p: float  # of the token alone, among its siblings


def grow_message(num_nodes: int, least: Least) -> Message:
    """Return a GROW: so many guesses within these bounds are asked for."""
    return Message(Kind.GROW, [num_nodes], torch.tensor(least, dtype=torch.float64))


def read_grow(message: Message) -> tuple[int, Least]:
    """Return what a `grow_message` asks for."""
    if message.payload is None:
        raise ValueError("guesses are asked for within bounds")
    return message.numbers[0], Least(*message.payload.tolist())


class DraftNodeUpdate(NamedTuple):
    """A guess as the head hears of it."""

    number: int
    parent: int
    token: int
    p: float  # its chance among its siblings


def tree_message(told: Sequence[DraftNodeUpdate]) -> Message:
    """Return a TREE: what a draft proposes, parents before their children."""
    numbers = [number for node in told for number in node[:3]]
    p_N = torch.tensor([node.p for node in told], dtype=torch.float64) if told else None
    return Message(Kind.TREE, numbers, p_N)


def read_tree(message: Message) -> list[DraftNodeUpdate]:
    """Return what a `tree_message` proposes."""
    p_N = [] if message.payload is None else message.payload.tolist()
    numbers = iter(message.numbers)
    return [DraftNodeUpdate(*node) for node in zip(numbers, numbers, numbers, p_N, strict=True)]


def error_message(error: Exception) -> Message:
    """Return an ERROR with its reason, in UTF-8."""
    return Message(Kind.ERROR, (), torch.tensor(list(reason(error).encode()), dtype=torch.uint8))


def read_error(message: Message) -> str:
    """Return the reason of an `error_message`."""
    return bytes([] if message.payload is None else message.payload.tolist()).decode(
        errors="replace"
    )


HEAD = 0  # the rank that has the text
_MOST_BYTES = 1 << 20
T = TypeVar("T")


def all_gather_objects(transport: Transport, value: Any) -> list[Any]:
    """Return what each rank says, anything that JSON has, when the last one has spoken."""
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
    """Go on where no rank objects. Raises `UserError` on all, with the reason, where one does."""
    for rank, line in enumerate(all_gather_objects(transport, refusal)):
        if line is not None:
            raise UserError(f"rank {rank}: {line}")


def try_together(transport: Transport, attempt: Callable[[], T]) -> T:
    """Return what this rank's attempt gives, when no rank's is refused; raises as `agree_on`."""
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
