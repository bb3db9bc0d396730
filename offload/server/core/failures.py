"""What clients are told about errors.

Invariant: 500 means a fault of this program or its disk, and never carries a traceback. Errors that
clients can correct have 400, with the requirement, the wrong value and the remedy.
"""

import re
import sys
import traceback

from offload.engine.scheduler import EngineStats
from offload.engine.service import ASK_LATER, Closing, QueueFull
from offload.errors import HostFault, RunError, UserError
from offload.server.core.refusals import Refusal

_MOST_WAIT_S = 60


def refusal_of(error: BaseException, figures: EngineStats | None = None) -> Refusal:
    """Return the refusal for an error; an unforeseen error's text is not sent."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, QueueFull):
        wait_s = 1.0
        if figures is not None:  # about as long as earlier requests had to wait
            waited_s = figures.waited_s / max(1, figures.num_begun)
            wait_s = min(max(1.0, waited_s), _MOST_WAIT_S)
        again = {"Retry-After": str(round(wait_s))}
        return Refusal(429, str(error), code="queue_full", headers=again)
    if isinstance(error, Closing):
        return refuse_closing()
    if isinstance(error, HostFault | RunError):  # errors whose text is for the server's operator
        return Refusal(500, "the run failed, and the server's log says why", code="run_failed")
    if isinstance(error, UserError):
        message = str(error).replace("`max_new_tokens`", "`max_tokens`")
        # the requirement, before the value and the remedy, names the field
        named = re.search(r"`(\w+)`", re.split(", got |: ", message)[0])
        return Refusal(400, message, param=named and named[1])
    return Refusal(500, "the server failed, and its log says where", code="internal_error")


def refuse_closing() -> Refusal:
    """Return the refusal of a server that is closing."""
    again = {"Retry-After": "10"}
    return Refusal(503, ASK_LATER, code="closing", headers=again)


def log_failure(error: BaseException) -> None:
    """Log where a fault occurred, without the error's text, which may quote a client."""
    # what a library says stands in parentheses
    message = re.sub(r" \(.*\)", "", str(error)) if isinstance(error, HostFault) else str(error)
    if not isinstance(error, HostFault | RunError):
        if refusal_of(error).code != "internal_error":
            return
        frames = reversed(traceback.extract_tb(error.__traceback__)[-3:])
        places = (f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames)
        message = f"{type(error).__name__} at {' < '.join(places)}"
    print(f"offload: a request failed: {message}", file=sys.stderr, flush=True)
