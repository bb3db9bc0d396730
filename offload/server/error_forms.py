"""The form of errors, which a request's path chooses.

Nothing here takes time to import: the server refuses while it loads, and before a route is known.
"""

from collections.abc import Callable
from typing import Any

from offload.server.anthropic import errors as anthropic_errors
from offload.server.core.refusals import Refusal
from offload.server.openai import errors as openai_errors

# by the beginning of a path; OpenAI's is that of all others
_FORMS: dict[str, Callable[[Refusal], dict[str, Any]]] = {
    "/v1/messages": anthropic_errors.error_body,
}


def error_body(path: str, refusal: Refusal) -> dict[str, Any]:
    """Return the body of a refusal in the form of the protocol that a path belongs to."""
    for start, form in _FORMS.items():
        if f"{path}/".startswith(f"{start}/"):
            return form(refusal)
    return openai_errors.error_body(refusal)
