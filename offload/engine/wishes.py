"""What a caller may wish of a text by name: keywords of `Decoder.generate` and `stream`, and
requests made of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from offload.engine.request import Prompt, Request
from offload.errors import UserError
from offload.sampling.grammar import find_grammar
from offload.units import MOST_SAMPLES, Sampling, require, whole_number


class Wishes(TypedDict, total=False):
    """All may be left out."""

    max_new_tokens: int  # at most so many; 128
    temperature: float  # 0 is greedy, and the default; see `Sampling`
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repeat_penalty: float  # this and the next three see `Sampling`; of greedy text as well
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...]
    # tell each new token's, and those of so many of the likeliest, in `Generation.logprobs`
    num_logprobs: int | None
    stop: str | Sequence[str] | None  # strings that end the text; they are not part of it
    raw: bool  # leave the chat template out
    # What the text must keep, one of them: a schema or its text, a regular expression for all of
    # it, or rules in Lark's notation; see docs/grammar.md.
    json_schema: Mapping[str, Any] | str | None
    regex: str | None
    grammar: str | None


_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "repeat_penalty", "presence_penalty",
                "frequency_penalty", "logit_bias")  # fmt: skip


def request_of(prompt: Prompt, wishes: Wishes) -> Request:
    """What is asked for. Raises `UserError`, and `TypeError` for a name that there is not."""
    unknown = wishes.keys() - Wishes.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"there is no argument {', '.join(sorted(unknown))}, only {', '.join(Wishes.__annotations__)}"
        )
    left: dict[str, Any] = dict(wishes)
    sampling = Sampling(**{name: left.pop(name) for name in _OF_SAMPLING if name in left})
    kept = find_grammar(*(left.pop(name, None) for name in ("json_schema", "regex", "grammar")))
    return Request(prompt, sampling, grammar=kept, **left)


def samples_of(request: Request, num_samples: int) -> Iterator[Request]:
    """The same so many times, each with a seed of its own. Raises `UserError`."""
    is_possible = 1 <= whole_number(num_samples, "`num_samples`") <= MOST_SAMPLES
    require(is_possible, f"`num_samples` must lie in 1 to {MOST_SAMPLES}", num_samples, "try 1")
    for number in range(num_samples):
        yield replace(
            request,
            sampling=replace(request.sampling, seed=(request.sampling.seed + number) % 2**63),
        )


def several_of(prompt: Any) -> Sequence[Prompt] | None:
    """The prompts of a list of them; None for one prompt. Raises `UserError` for an empty list of
    nothing.
    """
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt:
        return None
    is_one = isinstance(prompt[0], Mapping | int) or not isinstance(prompt[0], str | Sequence)
    if is_one:
        return None
    if not all(isinstance(one, str | Sequence) for one in prompt):
        raise UserError("several prompts must each be text, messages or token ids: mend the list")
    return prompt
