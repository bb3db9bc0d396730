"""Keywords of `Decoder.generate` and `stream`, for editors and type checkers.

Made by `python -m offload.cli.option_docs` of what is declared: change that.
"""

import collections.abc
import typing


class TextArguments(typing.TypedDict, total=False):
    """What may be asked of a text; all may be left out."""

    # write at most N new tokens; -1: as many as the context has room for
    max_new_tokens: int | None
    # end before this string; may be given several times
    stop: str | collections.abc.Sequence[str] | None
    # write JSON that this schema allows; docs/grammar.md
    json_schema: collections.abc.Mapping[str, typing.Any] | str | None
    # write what this regular expression matches as a whole
    regex: str | None
    # write what these rules in Lark's notation allow
    grammar: str | None
    # no chat template
    raw: bool
    # with --json: of each new token, and of K of the likeliest
    num_logprobs: int | None
    # 0 is greedy
    temperature: float
    # keep the likeliest tokens that sum to this
    top_p: float
    # keep so many of the likeliest tokens; 0 keeps all
    top_k: int
    # keep tokens at least P times as likely as the likeliest
    min_p: float
    # same seed, same text; with the rules match and topk for any tree
    seed: int
    # above 1: against tokens that are in the prompt or the answer
    repeat_penalty: float
    # off the logits of tokens that are in the answer, once
    presence_penalty: float
    # off the logits of tokens that are in the answer, as many times as they are there
    frequency_penalty: float
    # added to a token's logit; may be given several times
    logit_bias: collections.abc.Mapping[int, float] | tuple[tuple[int, float], ...]
