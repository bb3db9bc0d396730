"""Errors in Anthropic's form."""

from typing import Any

from offload.server.core.refusals import Refusal

# by status; source: the types of errors of the client `anthropic` 2.14
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def error_body(refusal: Refusal) -> dict[str, Any]:
    """Return the body of a refusal."""
    kind = _KINDS.get(refusal.status, "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": refusal.message}
    if refusal.details is not None:
        error["details"] = refusal.details
    return {"type": "error", "error": error}
