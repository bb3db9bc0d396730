"""The paths of OpenAI's protocol."""

from typing import Any

from offload.server.core.routes import Route, RouteContext
from offload.server.openai.bodies import ChatBody, CompletionBody
from offload.server.openai.choices import ChatAnswer, CompletionAnswer
from offload.server.openai.responses import ResponseAnswer, ResponsesBody


def _count(context: RouteContext, body: ResponsesBody) -> dict[str, Any]:
    num_tokens = context.num_prompt_tokens(body)
    return {"object": "response.input_tokens", "input_tokens": num_tokens}


ROUTES = {
    "/v1/chat/completions": Route.for_body(ChatBody, ChatAnswer),
    "/v1/completions": Route.for_body(CompletionBody, CompletionAnswer),
    "/v1/responses": Route.for_body(ResponsesBody, ResponseAnswer),
    "/v1/responses/input_tokens": Route(ResponsesBody, _count),
}
