"""From a body to requests of an engine: the one place that knows both vocabularies."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from offload.config import Sampling
from offload.declaration import options_at
from offload.engine.request import Request
from offload.engine.service import Engine
from offload.engine.ticket import Ticket
from offload.sampling.grammar import Grammar
from offload.server.protocol import Body, ChatBody, CompletionBody
from offload.server.refusal import Refusal, too_long
from offload.server.settings import Settings

_LARGEST_SEED = 2**63 - 1
_LEGACY_TOKENS = 16  # of /v1/completions, where a body does not say


class Wanted(NamedTuple):
    """What chat and plain completions say each in their own words."""

    param: str  # the field that has the prompt
    num_new: int | None  # None is as many as there is room for
    num_logprobs: int | None
    grammar: Grammar | None = None


def order_chat(engine: Engine, settings: Settings, body: ChatBody) -> list[Ticket]:
    """One ticket for each choice. Raises `Refusal` and `UserError`; then no request is left behind."""
    _require_few(engine, body)
    grammar = body.grammar
    ids = engine.decoder.encode(body.told, tools=body.tools_told)
    num_new = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if body.top_logprobs is not None and not body.logprobs:
        raise Refusal(400, "'top_logprobs' goes with 'logprobs': set that to true", param="top_logprobs")
    return _order(engine, settings, body, [ids], Wanted("messages", num_new, num_logprobs, grammar))


def order_completion(engine: Engine, settings: Settings, body: CompletionBody) -> list[Ticket]:
    """One ticket for each choice of each prompt, in OpenAI's order. Raises what `order_chat` raises."""
    _require_few(engine, body)
    prompts = [engine.decoder.encode(prompt, raw=True) for prompt in body.prompts]
    num_new = _LEGACY_TOKENS if body.max_tokens is None else body.max_tokens
    return _order(engine, settings, body, prompts, Wanted("prompt", num_new, body.logprobs))


def _require_few(engine: Engine, body: Body) -> None:
    """Before anything is read that could never be served."""
    if body.num_texts > engine.most_requests:
        message = f"Invalid value for 'n': this server takes {engine.most_requests} texts at a time"
        raise Refusal(400, f"{message}, got {body.num_texts}", param="n")


def _order(
    engine: Engine, settings: Settings, body: Body, prompts: Sequence[list[int]], wanted: Wanted
) -> list[Ticket]:
    sampling, tickets = _sampling(settings, body), list[Ticket]()
    try:
        for ids in prompts:
            for index in range(body.num_choices):
                own = replace(sampling, seed=(sampling.seed + index) & _LARGEST_SEED)
                room, num_logprobs, grammar = _room(engine, ids, wanted), wanted.num_logprobs, wanted.grammar
                request = Request(ids, own, room, body.stop or None, num_logprobs=num_logprobs, grammar=grammar)
                ticket = engine.submit(request, tree=body.extension.tree, rule=body.extension.rule)
                tickets.append(ticket)
    except Exception:
        for ticket in tickets:
            ticket.cancel()
        raise
    return tickets


def _room(engine: Engine, ids: list[int], wanted: Wanted) -> int:
    """New tokens that are wanted, or as many as there is room for."""
    room, num_new = engine.decoder.room(ids), wanted.num_new
    if room < max(1, num_new or 0):
        raise too_long(len(ids), num_new, engine.decoder.plan.context, wanted.param)
    return room if num_new is None else num_new


def _sampling(settings: Settings, body: Body) -> Sampling:
    """What a body says, else what the server was told; without a seed any."""
    given: dict[str, Any] = {}
    for name, one in options_at("http", Sampling).items():
        value = getattr(body, name)
        if value not in (None, {}):
            given[one.name] = value if one.is_number else _biases(value)
    seed = secrets.randbelow(_LARGEST_SEED) if body.seed is None else body.seed & _LARGEST_SEED
    return replace(settings.sampling, **{**given, "seed": seed})


def _biases(biases: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): number for token, number in biases.items()}
    except ValueError:
        message = "Invalid value for 'logit_bias': its keys must be ids of tokens"
        raise Refusal(400, message, param="logit_bias") from None
