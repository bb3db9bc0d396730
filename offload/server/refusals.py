"""Requests that are not served, in OpenAI's form: what was wrong becomes a status and a message.

Invariant: 500 is a fault of this program or its disk alone, and never carries a traceback; what a
client can mend has 400, with the rule, the value and the remedy.
"""

import re
from typing import Any

from starlette.responses import JSONResponse

from offload.engine.scheduler import EngineFigures
from offload.engine.service import ASK_LATER, Closing, QueueFull
from offload.errors import HostFault, RunError, UserError
from offload.server.listening import LOADING

_KINDS = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
_MOST_WAIT_S = 60
MEND = "mend it, or leave it out"


class Refusal(Exception):  # noqa: N818
    """A request that is not served, and why."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        # what it quotes need not be text that can be sent
        message = message.encode(errors="backslashreplace").decode()
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers or {}

    @classmethod
    def of_value(cls, param: str, rule: str, remedy: str = MEND, field: str = "") -> "Refusal":
        """Return the refusal of a body's field; a `field` within it is named instead."""
        return cls(400, f"Invalid value for '{field or param}': {rule}: {remedy}", param=param)

    @classmethod
    def of_stranger(cls, param: str, meant: str = "") -> "Refusal":
        """Return the refusal of a field that is not known; `meant` may name another."""
        message = f"Unrecognized request argument supplied: {param}{meant or ': leave it out'}"
        return cls(400, message, param=param)

    def response(self) -> JSONResponse:
        """Return the answer as it goes over the wire."""
        return JSONResponse(self.as_dict(), self.status, self.headers)

    def as_dict(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": told}


def refusal_of(error: BaseException, figures: EngineFigures | None = None) -> Refusal:
    """Return what a client is told of an error: nothing of one that none of ours foresaw."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, QueueFull):
        wait_s = 1.0
        if figures is not None:  # about as long as those before had to wait
            waited_s = figures.waited_s / max(1, figures.num_begun)
            wait_s = min(max(1.0, waited_s), _MOST_WAIT_S)
        again = {"Retry-After": str(round(wait_s))}
        return Refusal(429, str(error), code="queue_full", headers=again)
    if isinstance(error, Closing):
        return refuse_closing()
    if isinstance(error, HostFault | RunError):  # whose words are for who runs the server
        return Refusal(500, "the run failed, and the server's log says why", code="run_failed")
    if isinstance(error, UserError):
        message = str(error).replace("`max_new_tokens`", "`max_tokens`")
        # the rule, before the value and the remedy, names the field
        named = re.search(r"`(\w+)`", re.split(", got |: ", message)[0])
        return Refusal(400, message, param=named and named[1])
    return Refusal(500, "the server failed, and its log says where", code="internal_error")


def refuse_closing() -> Refusal:
    """Return the refusal of a server that ends."""
    again = {"Retry-After": "10"}
    return Refusal(503, ASK_LATER, code="closing", headers=again)


def refuse_loading() -> Refusal:
    """Return the refusal while the model is read."""
    return Refusal(503, LOADING, code="loading", headers={"Retry-After": "2"})


def no_such_model(model: str, model_id: str) -> Refusal:
    """Return the refusal for another model than the one that is served."""
    message = (
        f"The model `{model:.80}` does not exist: this server has `{model_id}`, "
        "start it with --alias to give it other names"
    )
    return Refusal(404, message, code="model_not_found", param="model")
