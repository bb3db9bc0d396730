"""Keywords of `Decoder.generate` and `stream`, for editors and type checkers.

Made by `python .ci/option_docs.py` of what is declared: change that.
"""

import collections.abc
import typing


class TextArguments(typing.TypedDict, total=False):
    """What may be asked of a text; all may be left out."""

    # write at most N new tokens; 128 where it is left out
    max_new_tokens: int
    # end the text before this string, or before any of several
    stop: str | collections.abc.Sequence[str] | None
    # let the model think before it answers, or not; default: as its chat template does
    think: bool | None
    # write JSON that this schema allows; see docs/grammar.md
    json_schema: collections.abc.Mapping[str, typing.Any] | str | None
    # write a text that this regular expression matches as a whole
    regex: str | None
    # write a text that these rules in Lark's notation allow
    grammar: str | None
    # leave the chat template out
    raw: bool
    # tell how likely each new token is, and the K likeliest beside it
    num_logprobs: int | None
    # how freely tokens are drawn; 0 is greedy
    temperature: float
    # keep the likeliest tokens, whose chances sum to P
    top_p: float
    # keep the K likeliest tokens; 0 keeps all
    top_k: int
    # keep tokens that are at least P times as likely as the likeliest one
    min_p: float
    # the same seed gives the same text; with the rules match and topk for any tree
    seed: int
    # above 1: make tokens of the prompt and the answer less likely
    repeat_penalty: float
    # subtract A from the logits of tokens that are in the answer
    presence_penalty: float
    # subtract A from the logits of tokens in the answer, as many times as they are there
    frequency_penalty: float
    # add numbers to the logits of tokens, by their ids
    logit_bias: collections.abc.Mapping[int, float] | tuple[tuple[int, float], ...]
