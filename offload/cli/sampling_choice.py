"""How tokens are drawn: as the flags say, or where they say nothing as the model suggests, and then a line tells so."""

import os
from collections.abc import Callable
from typing import NamedTuple

from offload.checkpoint.generation_config import suggested_sampling
from offload.config import Sampling
from offload.errors import UserError


class SamplingChoice(NamedTuple):
    """What a run samples with."""

    sampling: Sampling
    note: str  # for the user, where it is the model's


def own_sampling(
    temp: float | None, top_p: float | None, top_k: int | None, seed: int, *, is_greedy: bool
) -> Sampling | None:
    """What the flags say, or None where that is left to the model. Raises `UserError` for what makes no sense."""
    named = {"temperature": temp, "top_p": top_p, "top_k": top_k}
    given = {name: value for name, value in named.items() if value is not None}
    own = Sampling(seed=seed, **given)  # type: ignore[arg-type]
    if is_greedy:
        return Sampling(seed=seed)
    if temp is None and given:
        raise UserError("`top_p` and `top_k` choose among tokens that are drawn: give `temperature` as well")
    return own if given else None


def choose_sampling(model: str, own: Sampling | None, seed: int, on_phase: Callable[[str], None]) -> SamplingChoice:
    """The user's own, or the model's suggestion. Raises `UserError` for one that makes no sense."""
    if own is not None:
        return SamplingChoice(own, "")
    if not os.path.isdir(os.path.expanduser(model)):
        on_phase("asking the hub")
    suggested = suggested_sampling(model, seed)
    note = (
        "" if suggested.is_greedy else f"sampling as the model suggests: {sampling_words(suggested)}; --greedy for none"
    )
    return SamplingChoice(suggested, note)


def sampling_words(sampling: Sampling) -> str:
    """`temperature 0.6, top-p 0.9`: what is not off."""
    if sampling.is_greedy:
        return "greedy"
    top_p = f", top-p {sampling.top_p:g}" if sampling.top_p < 1 else ""
    return f"temperature {sampling.temperature:g}{top_p}" + (f", top-k {sampling.top_k}" if sampling.top_k else "")
