"""The paths of OpenAI's protocol."""

from offload.server.core.routes import Route
from offload.server.openai.bodies import ChatBody, CompletionBody
from offload.server.openai.choices import ChatAnswer, CompletionAnswer
from offload.server.openai.responses import ResponseAnswer, ResponsesBody

ROUTES = {
    "/v1/chat/completions": Route.for_body(ChatBody, ChatAnswer),
    "/v1/completions": Route.for_body(CompletionBody, CompletionAnswer),
    "/v1/responses": Route.for_body(ResponsesBody, ResponseAnswer),
}
