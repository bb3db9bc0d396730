"""Log-probabilities of tokens in OpenAI's two forms, without tokens that end a text."""

from collections.abc import Sequence
from typing import Any

from offload.engine.sequence import TokenLogprob
from offload.server.core.answer import TokenNames

_LEAST = -9999.0  # in place of minus infinity, which JSON has no word for


def of_chat(names: TokenNames, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return `TokenLogprob`s as chat completions and responses have them."""
    told = []
    for drawn in logprobs:
        if drawn.token not in names.end_ids:
            top = [_named(names, *pair) for pair in drawn.top]
            told.append({**_named(names, drawn.token, drawn.logprob), "top_logprobs": top})
    return told


def of_completion(
    names: TokenNames, logprobs: Sequence[TokenLogprob], num_chars: int
) -> dict[str, Any]:
    """Return `TokenLogprob`s as plain completions have them, behind so many characters."""
    fields = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    told: dict[str, list[Any]] = {field: [] for field in fields}
    for drawn in logprobs:
        if drawn.token not in names.end_ids:
            text = names.text(drawn.token)
            told["tokens"].append(text)
            told["token_logprobs"].append(_finite(drawn.logprob))
            top = {names.text(token): _finite(number) for token, number in drawn.top}
            told["top_logprobs"].append(top)
            told["text_offset"].append(num_chars)
            num_chars += len(text)
    return told


def _named(names: TokenNames, token: int, logprob: float) -> dict[str, Any]:
    raw = list(names.bytes_of(token))
    return {"token": names.text(token), "logprob": _finite(logprob), "bytes": raw}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
