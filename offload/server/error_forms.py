"""The form of errors, which a request's path chooses.

Nothing here takes time to import: the server refuses while it loads, and before a route is known.
"""

from typing import Any

from offload.server.core.refusals import Refusal

_OPENAI_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
# source: the types of errors of the client `anthropic` 2.14
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_OTHER_TYPE = "invalid_request_error"


def error_body(path: str, refusal: Refusal) -> dict[str, Any]:
    """Return the body of a refusal in the form of the protocol that a path belongs to."""
    is_anthropic = f"{path}/".startswith("/v1/messages/")
    return anthropic_error(refusal) if is_anthropic else openai_error(refusal)


def openai_error(refusal: Refusal) -> dict[str, Any]:
    """Return the body of a refusal in OpenAI's form."""
    kind = _OPENAI_TYPES.get(refusal.status, _OTHER_TYPE)
    fields = {"message": refusal.message, "type": kind}
    return {"error": {**fields, "param": refusal.param, "code": refusal.code}}


def anthropic_error(refusal: Refusal) -> dict[str, Any]:
    """Return the body of a refusal in Anthropic's form."""
    kind = _ANTHROPIC_TYPES.get(refusal.status, _OTHER_TYPE)
    error: dict[str, Any] = {"type": kind, "message": refusal.message}
    if refusal.details is not None:
        error["details"] = refusal.details
    return {"type": "error", "error": error}
