"""The paths of all protocols. A protocol is a folder, and a row here and in `error_forms`."""

from offload.server.anthropic.routes import ROUTES as ANTHROPIC
from offload.server.openai.routes import ROUTES as OPENAI

PROTOCOL_ROUTES = {**OPENAI, **ANTHROPIC}
