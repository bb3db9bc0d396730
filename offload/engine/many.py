"""Many requests through one decoder: as many at a time as it has places for, each handed out as it
finishes.

Invariant: what one request gives does not depend on the others; one that cannot be served fails
alone.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from offload.engine.generation import Generation, Run
from offload.engine.request import Request
from offload.engine.sequence import LEAST_COPIED
from offload.errors import RunError, UserError

if TYPE_CHECKING:
    from offload.engine.decoder import Decoder


class Finished(NamedTuple):
    """What has become of one request."""

    number: int  # among those that were given, from 0
    outcome: Generation | UserError  # the error where it could not begin, or not go on


def write_all(
    decoder: "Decoder",
    requests: Sequence[Request],
    on_pass: Callable[[Sequence[Run]], None] = lambda runs: None,
    *,
    tree: str | None = None,
    rule: str | None = None,
) -> Generator[Finished, None, None]:
    """Yield results in the order of finishing; what is left under way when this is closed is
    dropped.

    A prompt that another text is just taking in waits until it is there, and takes it over.

    Args:
        on_pass: hears of all runs under way before every pass over the weights.
    """
    waiting = deque(range(len(requests)))
    under_way = dict[int, Run]()
    try:
        while waiting or under_way:
            while waiting and len(under_way) < decoder.num_parallel:
                texts = [(requests[number].prompt, run) for number, run in under_way.items()]
                if is_coming(requests[waiting[0]].prompt, texts):
                    break
                number = waiting.popleft()
                try:
                    under_way[number] = decoder.start(
                        requests[number], tree=tree, rule=rule, continues=True
                    )
                except UserError as error:
                    yield Finished(number, error)
            if not under_way:
                continue
            numbers = [*under_way]
            runs = [*under_way.values()]
            on_pass(runs)
            errors = sweep_each(decoder, runs)
            for number, run, failure in zip(numbers, runs, errors, strict=True):
                outcome = _outcome(run, failure)
                if outcome is not None:
                    decoder.release(under_way.pop(number))
                    yield Finished(number, outcome)
    finally:
        for run in under_way.values():
            decoder.release(run)


def in_order(
    decoder: "Decoder",
    requests: Sequence[Request],
    *,
    tree: str | None = None,
    rule: str | None = None,
) -> list[Generation]:
    """All results, as they were asked for. Raises `UserError` for the first that cannot be served."""
    found = dict[int, Generation]()
    with closing(write_all(decoder, requests, tree=tree, rule=rule)) as finished:
        for number, outcome in finished:
            if isinstance(outcome, UserError):
                raise outcome
            found[number] = outcome
    return [found[number] for number in range(len(requests))]


def sweep_each(decoder: "Decoder", runs: Sequence[Run]) -> list[Exception | None]:
    """`Decoder.sweep` for all, and where that fails for each: whose error it was shows alone.
    Raises `RunError`.
    """
    try:
        decoder.sweep(runs)
    except RunError:  # the disk, or another rank: it is an error of all texts
        raise
    except Exception as error:
        return (
            [error]
            if len(runs) == 1
            else [one for run in runs for one in sweep_each(decoder, [run])]
        )
    return [None] * len(runs)


def is_coming(prompt: object, texts: Iterable[tuple[object, Run]]) -> bool:
    """Whether some of these texts, given with their prompts, take in this very one, to be copied,
    and none has it.
    """
    alike = [run.sequence for other, run in texts if other == prompt]
    is_worth_it = any(text.num_prompt_tokens > LEAST_COPIED for text in alike)
    return is_worth_it and not any(text.new_ids for text in alike)


def _outcome(run: Run, error: Exception | None) -> Generation | UserError | None:
    """What has become of a run by a pass; None where it goes on. Raises an error that is no user's."""
    try:
        if error is not None:
            raise error
        run.take()
        if not run.is_writing:
            run.take()  # its end is told now, not behind the others' next pass
        return run.result() if run.is_finished else None
    except UserError as failure:
        return failure
