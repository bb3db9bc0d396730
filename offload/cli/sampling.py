"""How tokens are drawn, and what texts must match, by the flags; else as the model suggests."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from offload.checkpoint.files import read_text
from offload.declaration import listed, options_of
from offload.errors import UserError
from offload.options import SamplingOptions, TextOptions
from offload.sampling.grammar import GRAMMARS, Grammar, find_grammar
from offload.sampling_options import DRAWING, NARROWING, Sampling

_OFF = Sampling()


class GivenSampling(NamedTuple):
    """How tokens are drawn, by the flags."""

    sampling: Sampling | None  # None leaves it to the model
    # settings that hold for greedy text as well, and override the model's suggestion
    overrides: Mapping[str, Any]
    note: str = ""  # a note for the user

    @classmethod
    def from_options(cls, options: SamplingOptions) -> "GivenSampling":
        """Return the sampling that the flags ask for. Raises `UserError` for contradictions.

        One flag that sets how tokens are chosen is enough: then nothing of the model's suggestion
        holds.
        """
        given = dict(options.given)
        if biases := given.get("logit_bias"):
            given["logit_bias"] = tuple(_bias(text) for text in biases)
        sampling = Sampling(**given)
        overrides = {name: value for name, value in given.items() if name not in (*DRAWING, "seed")}
        if options.greedy:
            idle = [f"`{name}` {given[name]:g}" for name in DRAWING if given.get(name)]
            note = f"--greedy wins over {listed(idle)}" if idle else ""
            return cls(Sampling(**overrides, seed=sampling.seed), {}, note)
        is_drawn = any(name in given for name in DRAWING)
        if is_drawn and "temperature" not in given:
            requirement = (
                f"{listed([f'`{name}`' for name in NARROWING])} choose among tokens that are drawn"
            )
            raise UserError(f"{requirement}: give `temperature` as well")
        return cls(sampling if is_drawn else None, {**overrides, "seed": sampling.seed})

    def settled(self, model: str, on_phase: Callable[[str], None]) -> tuple[Sampling, str]:
        """Return the user's sampling, or the model's with a note. Raises `UserError`."""
        if self.sampling is not None:
            return self.sampling, self.note
        from offload.checkpoint.generation_config import suggested_sampling

        if not os.path.isdir(os.path.expanduser(model)):
            on_phase("asking the hub")
        suggested = suggested_sampling(model, self.overrides["seed"])
        chosen = replace(suggested, **self.overrides)
        if suggested == Sampling(seed=suggested.seed):
            return chosen, ""
        but = ", but for flags" if len(self.overrides) > 1 else ""
        words = sampling_words(chosen)
        return chosen, f"sampling as the model suggests{but}: {words}; --greedy for none"


def _bias(text: str) -> tuple[int, float]:
    token, _, number = text.partition(":")
    try:
        return int(token), float(number)
    except ValueError:
        raise UserError(f"`logit_bias` must be ID:NUMBER, got {text!r:.80}: try 42:-1.5") from None


def sampling_words(sampling: Sampling) -> str:
    """Return settings that are not off, such as `temperature 0.6, top-p 0.9`."""
    words = []
    for name, each_option in options_of(Sampling).items():
        is_told = (
            each_option.is_number
            and name != "seed"
            and not (sampling.is_greedy and name in DRAWING)
        )
        if is_told and getattr(sampling, name) != getattr(_OFF, name):
            called = each_option.at("chat").replace("-penalty", " penalty")
            words.append(f"{called} {getattr(sampling, name):g}")
    words += [f"biases {len(sampling.logit_bias)}"] if sampling.logit_bias else []
    return ", ".join(["greedy", *words] if sampling.is_greedy else words)


def found_grammar(text: TextOptions) -> Grammar | None:
    """Return the grammar that a text must match, read from files, or None. Raises `UserError`."""
    given = {name: getattr(text, name) for name in GRAMMARS}
    for name, file in given.items():
        if isinstance(file, Path):
            given[name] = read_text(file, f"`{name}`")
    return find_grammar(**given)
