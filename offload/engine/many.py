"""Many requests through one decoder: as many at a time as it has places for, each handed out as it finishes.

Invariant: what one request gives does not depend on the others; one that cannot be served fails alone.
"""

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from offload.engine.generation import Generation, Run
from offload.engine.request import Request
from offload.errors import UserError

if TYPE_CHECKING:
    from offload.engine.decoder import Decoder


class Finished(NamedTuple):
    """What has become of one request."""

    number: int  # among those that were given, from 0
    outcome: Generation | UserError  # the error where it could not begin


def write_all(
    decoder: "Decoder", requests: Sequence[Request], on_pass: Callable[[Sequence[Run]], None] = lambda runs: None,
    *, tree: str | None = None, rule: str | None = None,
) -> Generator[Finished, None, None]:  # fmt: skip
    """Yield results in the order of finishing; what is left under way when this is closed is dropped.

    A prompt that another text is just taking in waits until it is there, and takes it over.

    Args:
        on_pass: hears of all runs under way before every pass over the weights.
    """
    waiting, under_way = deque(range(len(requests))), dict[int, Run]()
    try:
        while waiting or under_way:
            while waiting and len(under_way) < decoder.num_parallel and not _is_coming(waiting[0], requests, under_way):
                number = waiting.popleft()
                try:
                    under_way[number] = decoder.start(requests[number], tree=tree, rule=rule, continues=True)
                except UserError as error:
                    yield Finished(number, error)
            if not under_way:
                continue
            on_pass([*under_way.values()])
            decoder.advance([*under_way.values()])
            for number in [number for number, run in under_way.items() if run.is_finished]:
                run = under_way.pop(number)
                result = run.result()
                decoder.release(run)
                yield Finished(number, result)
    finally:
        for run in under_way.values():
            decoder.release(run)


def in_order(
    decoder: "Decoder", requests: Sequence[Request], *, tree: str | None = None, rule: str | None = None
) -> list[Generation]:
    """All results, as they were asked for. Raises `UserError` for the first that cannot be served."""
    found = dict[int, Generation]()
    with closing(write_all(decoder, requests, tree=tree, rule=rule)) as finished:
        for number, outcome in finished:
            if isinstance(outcome, UserError):
                raise outcome
            found[number] = outcome
    return [found[number] for number in range(len(requests))]


def _is_coming(number: int, requests: Sequence[Request], under_way: Mapping[int, Run]) -> bool:
    """Whether a text with the same prompt has not taken it in yet."""
    prompt = requests[number].prompt
    return any(requests[other].prompt == prompt and not run.sequence.new_ids and run.is_writing
               for other, run in under_way.items())  # fmt: skip
