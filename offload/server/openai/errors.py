"""Errors in OpenAI's form."""

from typing import Any

from offload.server.core.refusals import Refusal

_KINDS = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


def error_body(refusal: Refusal) -> dict[str, Any]:
    """Return the body of a refusal."""
    kind = _KINDS.get(refusal.status, "invalid_request_error")
    fields = {"message": refusal.message, "type": kind}
    return {"error": {**fields, "param": refusal.param, "code": refusal.code}}
