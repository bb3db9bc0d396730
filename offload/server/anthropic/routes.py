"""The paths of Anthropic's protocol."""

from typing import Any

from offload.server.anthropic.answer import MessageAnswer
from offload.server.anthropic.bodies import CountBody, MessagesBody
from offload.server.core.routes import Route, RouteContext


def _count(context: RouteContext, body: CountBody) -> dict[str, Any]:
    return {"input_tokens": context.num_prompt_tokens(body)}


ROUTES = {
    "/v1/messages": Route.for_body(MessagesBody, MessageAnswer),
    "/v1/messages/count_tokens": Route(CountBody, _count),
}
