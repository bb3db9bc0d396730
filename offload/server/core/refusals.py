"""Refused requests and their reasons; each protocol writes them in its own form.

Nothing here takes time to import: the server refuses while it loads.
"""

from typing import Any

LOADING = "the model is loading: ask again later"
RETRY_LOADING_S = 2
DEFAULT_REMEDY = "mend it, or leave it out"


class Refusal(Exception):  # noqa: N818
    """A refused request, and the reason.

    Attributes:
        code: names the reason for programs, as OpenAI does.
        param: the field that is wrong.
        details: what a protocol's own clients look for beside the message.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        # quoted parts need not be text that can be encoded
        message = message.encode(errors="backslashreplace").decode()
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers or {}
        self.details = details

    @classmethod
    def of_value(
        cls, param: str, requirement: str, remedy: str = DEFAULT_REMEDY, field: str = ""
    ) -> "Refusal":
        """Return the refusal of a body's field; a `field` within it is named instead."""
        return cls(
            400, f"Invalid value for '{field or param}': {requirement}: {remedy}", param=param
        )

    @classmethod
    def unknown_field(cls, param: str, meant: str = "") -> "Refusal":
        """Return the refusal of an unknown field; `meant` may suggest another."""
        message = f"Unrecognized request argument supplied: {param}{meant or ': leave it out'}"
        return cls(400, message, param=param)

    @classmethod
    def of_unsupported(cls, param: str, remedy: str = "leave it out") -> "Refusal":
        """Return the refusal of a known field that asks for an unsupported feature."""
        message = f"'{param}' is not supported by this server: {remedy}"
        return cls(400, message, param=param)


def refuse_loading() -> Refusal:
    """Return the refusal while the model is read."""
    return Refusal(503, LOADING, code="loading", headers={"Retry-After": str(RETRY_LOADING_S)})


def no_such_model(model: str, model_id: str) -> Refusal:
    """Return the refusal for another model than the one that is served."""
    message = (
        f"The model `{model:.80}` does not exist: this server has `{model_id}`, "
        "start it with --alias to give it other names"
    )
    return Refusal(404, message, code="model_not_found", param="model")
