"""Many requests through one decoder: as many at a time as it has places for, each handed out as it finishes.

Invariant: what one request gives does not depend on the others; one that cannot be served fails alone.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from offload.engine.decoder import Decoder
from offload.engine.generation import Generation, Run
from offload.engine.request import Request
from offload.errors import UserError


class Finished(NamedTuple):
    """What has become of one request."""

    number: int  # among those that were given, from 0
    outcome: Generation | UserError  # the error where it could not begin


def write_all(
    decoder: Decoder, requests: Sequence[Request], on_pass: Callable[[Sequence[Run]], None] = lambda runs: None
) -> Generator[Finished, None, None]:
    """Yield results in the order of finishing; what is left under way when this is closed is dropped.

    Args:
        on_pass: hears of all runs under way before every pass over the weights.
    """
    waiting, under_way = deque(enumerate(requests)), dict[int, Run]()
    try:
        while waiting or under_way:
            while waiting and len(under_way) < decoder.num_parallel:
                number, request = waiting.popleft()
                try:
                    under_way[number] = decoder.start(request)
                except UserError as error:
                    yield Finished(number, error)
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
