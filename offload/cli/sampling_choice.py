"""How tokens are drawn: as the flags say, or where they say nothing as the model suggests, and then
a line tells so.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from offload.checkpoint.generation_config import suggested_sampling
from offload.errors import UserError
from offload.units import Sampling

_OFF = Sampling()
_DRAWS = {"temperature": "temperature", "top_p": "top-p", "top_k": "top-k", "min_p": "min-p"}
_PENALTIES = {f"{name}_penalty": f"{name} penalty" for name in ("repeat", "presence", "frequency")}
Given = Mapping[str, Any]


class SamplingChoice(NamedTuple):
    """What a run samples with."""

    sampling: Sampling
    note: str  # for the user, where it is the model's


class OwnSampling(NamedTuple):
    """What the flags say."""

    sampling: Sampling | None  # None leaves it to the model
    penalties: Given = MappingProxyType({})  # that are laid over what it suggests


def own_sampling(draws: Given, penalties: Given, seed: int, *, is_greedy: bool) -> OwnSampling:
    """Fields of `Sampling` as flags give them, None where they do not. Raises `UserError` for what
    makes no sense.

    Args:
        draws: how tokens are drawn: one of them, and nothing is left to the model.
        penalties: what holds for greedy text as well; biases are `ID:NUMBER` each.
    """
    given = {name: value for name, value in draws.items() if value is not None}
    laid_over = {name: value for name, value in penalties.items() if value is not None}
    if biases := laid_over.pop("logit_bias", ()):
        laid_over["logit_bias"] = tuple(_bias(text) for text in biases)
    own = Sampling(seed=seed, **given, **laid_over)
    if is_greedy:
        return OwnSampling(Sampling(seed=seed, **laid_over))
    if draws["temperature"] is None and given:
        raise UserError(
            "`top_p`, `top_k` and `min_p` choose among tokens that are drawn: give `temperature` as well"
        )
    return OwnSampling(own if given else None, laid_over)


def _bias(text: str) -> tuple[int, float]:
    token, _, number = text.partition(":")
    try:
        return int(token), float(number)
    except ValueError:
        raise UserError(f"`logit_bias` must be ID:NUMBER, got {text!r:.80}: try 42:-1.5") from None


def choose_sampling(
    model: str, own: OwnSampling, seed: int, on_phase: Callable[[str], None]
) -> SamplingChoice:
    """The user's own, or the model's suggestion. Raises `UserError` for one that makes no sense."""
    if own.sampling is not None:
        return SamplingChoice(own.sampling, "")
    if not os.path.isdir(os.path.expanduser(model)):
        on_phase("asking the hub")
    suggested = suggested_sampling(model, seed)
    if suggested == Sampling(seed=seed):
        return SamplingChoice(replace(suggested, **own.penalties), "")
    chosen = replace(suggested, **own.penalties)
    but = ", but for flags" if own.penalties else ""
    return SamplingChoice(
        chosen, f"sampling as the model suggests{but}: {sampling_words(chosen)}; --greedy for none"
    )


def sampling_words(sampling: Sampling) -> str:
    """`temperature 0.6, top-p 0.9`: what is not off."""
    spoken = _PENALTIES if sampling.is_greedy else _DRAWS | _PENALTIES
    used = [name for name in spoken if getattr(sampling, name) != getattr(_OFF, name)]
    words = [f"{spoken[name]} {getattr(sampling, name):g}" for name in used]
    words += [f"biases {len(sampling.logit_bias)}"] if sampling.logit_bias else []
    return ", ".join(["greedy", *words] if sampling.is_greedy else words)
