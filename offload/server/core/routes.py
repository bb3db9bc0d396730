"""From a body to its jobs: all of a request is submitted to the engine, or nothing.

Invariant: whatever fails before an answer is made cancels every job.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from offload.engine.conversation import template_source, words_of
from offload.engine.job import Job
from offload.engine.request import NoRoom, Request, samples_of
from offload.engine.service import Engine
from offload.errors import UserError
from offload.server.core.answer import Answer, TokenNames
from offload.server.core.body import Body
from offload.server.core.refusals import Refusal
from offload.server.settings import ServerSettings

# some hundred bytes each, until the answer is sent
_MOST_SCORES = 1 << 18

AnswerKind = Callable[[Any, list[Job], TokenNames, str], Answer]


class RouteContext(NamedTuple):
    """What a route needs for an answer."""

    engine: Engine
    settings: ServerSettings
    names: TokenNames

    def answer(self, body: Body, kind: AnswerKind) -> Answer:
        """Submit a body's requests; return the growing answer."""
        jobs = submit(self.engine, self.settings, body)
        try:
            return kind(body, jobs, self.names, self.settings.model_id)
        except BaseException:
            _cancel(jobs)
            raise

    def num_prompt_tokens(self, body: Body) -> int:
        """Return the number of the prompt's tokens, however little room there is."""
        try:
            (request,) = prepare(self.engine, self.settings, body)
        except NoRoom as error:
            return error.num_prompt
        prompt: Any = request.prompt
        return len(prompt)

    def ignored(self, body: Body) -> list[str]:
        """Return the names of fields that change nothing."""
        tokenizer = self.engine.decoder.tokenizer
        ignored = body.ignored_by(template_source(tokenizer))
        if body.wants_thoughts is not None and words_of(tokenizer).thinking is None:
            ignored.append("thinking")
        return ignored


class Route(NamedTuple):
    """A path of a protocol: its body, and a function that makes an answer or an object of it."""

    body: type[Body]
    reply: Callable[[RouteContext, Any], Answer | dict[str, Any]]

    @classmethod
    def for_body(cls, body: type[Body], kind: AnswerKind) -> "Route":
        """Return the route that submits a body and answers in this kind."""
        return cls(body, lambda context, asked: context.answer(asked, kind))


def submit(engine: Engine, settings: ServerSettings, body: Body) -> list[Job]:
    """Submit each choice of each prompt, or none of them; return their jobs.

    Raises `Refusal` and `UserError`.
    """
    num_texts = body.num_choices * body.num_prompts
    # before anything is made of them, for more texts than could ever be served
    if num_texts > engine.most_requests:
        requirement = (
            f"this server takes {engine.most_requests} texts in one request, got {num_texts}"
        )
        param = "n" if body.num_choices > 1 else body.prompt_field
        raise Refusal.of_value(param, requirement, "ask for fewer")
    try:
        checked = prepare(engine, settings, body)
    except NoRoom as error:
        raise _refuse_length(error, body.prompt_field) from None
    _require_few_scores(checked, body.prompt_field)
    samples = (samples_of(request, body.num_choices) for request in checked)
    return engine.submit_all([*chain.from_iterable(samples)])


def _require_few_scores(requests: Sequence[Request], field: str) -> None:
    """Raise `Refusal` if scores of prompts would take much memory."""
    wanted = [request for request in requests if request.num_prompt_logprobs is not None]
    prompts: list[Any] = [request.prompt for request in wanted]
    num_tops = [1 + (request.num_prompt_logprobs or 0) for request in wanted]
    num = sum(len(ids) * num_top for ids, num_top in zip(prompts, num_tops, strict=True))
    if num > _MOST_SCORES:
        requirement = (
            f"a request tells at most {_MOST_SCORES} log-probabilities of prompts, got {num}"
        )
        raise Refusal.of_value(
            field, requirement, "ask for fewer 'logprobs', or in several requests"
        )


def prepare(engine: Engine, settings: ServerSettings, body: Body) -> list[Request]:
    """Return the requests of a body, checked. Raises `Refusal`, `NoRoom` and other `UserError`s."""
    try:
        requests = body.requests(settings.sampling)
        think = body.wants_thoughts
        if think is not None and words_of(engine.decoder.tokenizer).thinking is not None:
            requests = [replace(request, think=think) for request in requests]
        requests = [engine.prepare(request) for request in requests]
        require_tools(engine, body)
    except NoRoom:
        raise
    except UserError as error:
        # by the name that the client knows
        if (schema := "`json_schema`") not in str(error):
            raise
        message = str(error).replace(schema, f"`{body.schema_field}`")
        raise Refusal(400, message, param=body.schema_field) from None
    return requests


def _cancel(jobs: list[Job]) -> None:
    for job in jobs:
        job.cancel()


def _refuse_length(error: NoRoom, field: str) -> Refusal:
    """Return the refusal of a prompt without room, in words that clients search for."""
    wanted = "" if error.num_new is None else f" and {error.num_new} in the completion"
    message = (
        f"This model's maximum context length is {error.context} tokens, but you asked for "
        f"{error.num_prompt} tokens in the {field}{wanted}: "
        f"shorten the {field} or lower `max_tokens`"
    )
    return Refusal(400, message, code="context_length_exceeded", param=field)


def require_tools(engine: Engine, body: Body) -> None:
    """Raise `Refusal` if the model's template takes no tools, or its calls could not be read."""
    toolbox = body.toolbox()
    if toolbox.is_forced or not toolbox.described:
        return
    words = words_of(engine.decoder.tokenizer)
    if not words.knows_tools:
        requirement = "the model's chat template does not tell the model of tools"
    elif words.calls is None and not words.is_harmony:
        requirement = "the model's chat template writes calls in no form that is known here"
    else:
        return
    remedy = "leave it out, or force a call by 'tool_choice', which a grammar keeps"
    raise Refusal(400, f"'tools' cannot be used: {requirement}: {remedy}", param="tools")
