"""Log-probabilities of tokens in OpenAI's two forms, without tokens that end a text."""

from collections.abc import Sequence
from typing import Any

from offload.engine.sequence import TokenLogprob
from offload.server.core.answer import TokenNames

FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")  # of plain completions
_LEAST = -9999.0  # in place of minus infinity, which JSON has no word for


def of_chat(names: TokenNames, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return `TokenLogprob`s as chat completions and responses have them."""
    tokens = []
    for drawn in logprobs:
        if drawn.token not in names.end_ids:
            top = [_named(names, *pair) for pair in drawn.top]
            tokens.append({**_named(names, drawn.token, drawn.logprob), "top_logprobs": top})
    return tokens


def of_completion(
    names: TokenNames, logprobs: Sequence[TokenLogprob], num_chars: int, *, has_ends: bool = False
) -> dict[str, Any]:
    """Return `TokenLogprob`s as plain completions have them, behind this many characters.

    With `has_ends` tokens that end a text are there as well.
    """
    columns = _nothing()
    for drawn in logprobs:
        if has_ends or drawn.token not in names.end_ids:
            num_chars = _add(columns, names, drawn.token, num_chars)
            columns["token_logprobs"].append(_finite(drawn.logprob))
            columns["top_logprobs"].append(_top(names, drawn))
    return columns


def of_prompt(
    names: TokenNames, first: int, logprobs: Sequence[TokenLogprob]
) -> tuple[dict[str, Any], int]:
    """Return the tokens of a prompt in the same form, and how many characters they have.

    Nothing is known of how likely the first is.
    """
    columns = _nothing()
    num_chars = _add(columns, names, first, 0)
    columns["token_logprobs"].append(None)
    columns["top_logprobs"].append(None)
    for name, values in of_completion(names, logprobs, num_chars, has_ends=True).items():
        columns[name] += values
    return columns, sum(map(len, columns["tokens"]))


def _nothing() -> dict[str, list[Any]]:
    return {field: [] for field in FIELDS}


def _add(columns: dict[str, list[Any]], names: TokenNames, token: int, num_chars: int) -> int:
    """Add a token that begins there; return where it ends."""
    text = names.text(token)
    columns["tokens"].append(text)
    columns["text_offset"].append(num_chars)
    return num_chars + len(text)


def _top(names: TokenNames, drawn: TokenLogprob) -> dict[str, float]:
    """Return the likeliest tokens by their texts; of several with one text the likeliest."""
    top: dict[str, float] = {}
    for token, number in drawn.top:
        top.setdefault(names.text(token), _finite(number))
    return top


def _named(names: TokenNames, token: int, logprob: float) -> dict[str, Any]:
    raw = list(names.bytes_of(token))
    return {"token": names.text(token), "logprob": _finite(logprob), "bytes": raw}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
