"""What a client is told when it gets no answer: OpenAI's JSON form, with the status that fits.

Invariant: 500 is a fault of this program or its disk alone, and never carries a traceback; what a client can mend has
400, with the rule, the value and the remedy.
"""

from typing import Any

from offload.engine.service import Closing, EngineFigures, QueueFull
from offload.errors import RunError, UserError

_KINDS = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
_MOST_WAIT_S = 60


class Refusal(Exception):  # noqa: N818
    """A request that is not served, and why."""

    def __init__(
        self, status: int, message: str, *,
        code: str | None = None, param: str | None = None, headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        message = message.encode(errors="backslashreplace").decode()  # what it quotes need not be text that can be sent
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.headers = status, message, code, param, headers or {}

    def as_dict(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refusal_of(error: BaseException, figures: EngineFigures | None = None) -> Refusal:
    """What a client is told of an error; what it cannot mend and none of ours foresaw stays untold."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, QueueFull):
        return Refusal(429, str(error), code="queue_full", headers={"Retry-After": str(_wait_s(figures))})
    if isinstance(error, Closing):
        return closing()
    if isinstance(error, UserError):
        return Refusal(400, str(error).replace("`max_new_tokens`", "`max_tokens`"))
    if isinstance(error, RunError):  # whose words name files of this machine
        return Refusal(500, "the run failed, and the server's log says why", code="run_failed")
    return Refusal(500, "the server failed, and its log says where", code="internal_error")


def closing() -> Refusal:
    """While the server ends."""
    return Refusal(503, "the server is closing: ask again later", code="closing", headers={"Retry-After": "10"})


def loading() -> Refusal:
    """While the model is read."""
    return Refusal(503, "the model is loading: ask again later", code="loading", headers={"Retry-After": "2"})


def no_such_model(model: str, model_id: str) -> Refusal:
    """For another model than the one that is served."""
    message = f"The model `{model:.80}` does not exist: this server has `{model_id}`"
    return Refusal(404, message, code="model_not_found", param="model")


def too_long(num_prompt: int, num_new: int | None, context: int, param: str) -> Refusal:
    """For prompts, in the field `param`, that leave no room for what is wanted."""
    wanted = "" if num_new is None else f" and {num_new} in the completion"
    return Refusal(
        400,
        f"This model's maximum context length is {context} tokens, but you asked for {num_prompt} tokens in the "
        f"{param}{wanted}: shorten the {param} or lower `max_tokens`",
        code="context_length_exceeded",
        param=param,
    )


def _wait_s(figures: EngineFigures | None) -> int:
    """About as long as those before had to wait."""
    if figures is None:
        return 1
    num_begun = max(1, figures.num_done + figures.num_cancelled + figures.num_active)
    return round(min(max(1.0, figures.waited_s / num_begun), _MOST_WAIT_S))
