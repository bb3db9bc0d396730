"""The paths of all protocols. A protocol is a folder, rows here, and a form in `error_forms`."""

from typing import Any

from offload.server.anthropic.answer import MessageAnswer
from offload.server.anthropic.bodies import CountBody, MessagesBody
from offload.server.core.routes import Route, RouteContext
from offload.server.openai.bodies import ChatBody, CompletionBody
from offload.server.openai.choices import ChatAnswer, CompletionAnswer
from offload.server.openai.responses import ResponseAnswer, ResponsesBody


def _count_message(context: RouteContext, body: CountBody) -> dict[str, Any]:
    return {"input_tokens": context.num_prompt_tokens(body)}


def _count_response(context: RouteContext, body: ResponsesBody) -> dict[str, Any]:
    num_tokens = context.num_prompt_tokens(body)
    return {"object": "response.input_tokens", "input_tokens": num_tokens}


PROTOCOL_ROUTES = {
    "/v1/chat/completions": Route.for_body(ChatBody, ChatAnswer),
    "/v1/completions": Route.for_body(CompletionBody, CompletionAnswer),
    "/v1/responses": Route.for_body(ResponsesBody, ResponseAnswer),
    "/v1/responses/input_tokens": Route(ResponsesBody, _count_response),
    "/v1/messages": Route.for_body(MessagesBody, MessageAnswer),
    "/v1/messages/count_tokens": Route(CountBody, _count_message),
}
