"""The paths of Anthropic's protocol."""

from typing import Any

from offload.engine.request import NoRoom
from offload.server.anthropic.answer import MessageAnswer
from offload.server.anthropic.bodies import CountBody, MessagesBody
from offload.server.core.routes import Route, RouteContext, prepare


def _count(context: RouteContext, body: CountBody) -> dict[str, Any]:
    """Return the number of the prompt's tokens, however little room there is."""
    try:
        (request,) = prepare(context.engine, context.settings, body)
    except NoRoom as error:
        return {"input_tokens": error.num_prompt}
    prompt: Any = request.prompt
    return {"input_tokens": len(prompt)}


ROUTES = {
    "/v1/messages": Route.for_body(MessagesBody, MessageAnswer),
    "/v1/messages/count_tokens": Route(CountBody, _count),
}
