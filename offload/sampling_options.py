"""The options that decide how tokens are drawn, each declared once and checked where it comes in."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from offload.declaration import check_values, number, option, options_of, whole_number
from offload.errors import UserError, require

NOISE_POSITIONS = 32  # whose noise a sampler keeps: a step needs one for every level of its tree
MOST_PENALTY = 100  # logits are about as large, and scores must stay finite
MOST_SAMPLES = 100_000  # of a prompt: each is held until all are written
LEAST_TEMPERATURE = 1e-30  # logits divided by less overflow, and all large ones would be equal
_NUM_SEEDS = 1 << 63
_WRITE = ("generate", "chat")
_ALL = ("http", "batch", "chat")
# and a model's own generation_config.json
_SUGGESTED = (*_ALL, "suggested")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Sampling:
    """How the next token is drawn from the target's logits; temperature 0 is greedy.

    Penalties and biases are applied to logits first, and hold for greedy text as well.
    """

    GROUP: ClassVar[str] = "Sampling"

    # A table, as in `offload.options`.
    # fmt: off
    temperature: float = option(
        "--temp", "--temperature", is_main=True, default=0.0, metavar="T", within="0 or more",
        remedy="0 is greedy", help="how freely tokens are drawn; 0 is greedy", commands=(*_WRITE, "tune", "demo"),
        # greedy, the packaged pair repeats itself, which flatters every guess
        differs={"demo": {"default": 0.7}} | {
            name: {"help": "how freely tokens are drawn; 0 is greedy; default: as the model suggests"}
            for name in _WRITE
        },
        is_drawing=True, doors=(*_SUGGESTED, "page"),
        doc="0 is greedy; `generate` and `chat` [ask the model](#sampling) where neither this "
        "nor `--top-p`, `--top-k` or `--min-p` is given; `tune` is greedy",
        page=("0", "10"),
    )
    top_p: float = option(
        "--top-p", default=1.0, metavar="P", within="(0, 1]", remedy="1 keeps every token",
        help="keep the likeliest tokens, whose chances sum to P", commands=(*_WRITE, "tune"),
        is_drawing=True, doors=(*_SUGGESTED, "page"),
        page=("0.0001", "1"),
    )
    top_k: int = option(
        "--top-k", default=0, metavar="K", within="0 or more", remedy="0 keeps every token",
        help="keep the K likeliest tokens; 0 keeps all", commands=(*_WRITE, "tune"),
        is_drawing=True, doors=(*_SUGGESTED, "page"),
        page=("0", "1000000"),
    )
    min_p: float = option(
        "--min-p", default=0.0, metavar="P", within="[0, 1]", remedy="0 keeps every token",
        help="keep tokens that are at least P times as likely as the likeliest one", commands=_WRITE,
        is_drawing=True, doors=(*_SUGGESTED, "page"),
        doc="keep tokens that are at least P times as likely as the likeliest one; after `--top-p`",
        page=("0", "1"),
    )
    seed: int = option(
        "--seed", default=0, metavar="N", within="[0, 2^63)", remedy="0 is as good as any",
        keeps_default=True, help="the same seed gives the same text; with the rules match and topk for any tree",
        commands=(*_WRITE, "tune", "demo"), doors=("http", "batch", "chat", "page"),
        page=("0", "9007199254740991"),
    )
    repeat_penalty: float = option(
        "--repeat-penalty", "--repetition-penalty", default=1.0, metavar="R",
        within=f"{1 / MOST_PENALTY:g} to {MOST_PENALTY}", remedy="1 is none",
        help="above 1: make tokens of the prompt and the answer less likely", commands=_WRITE,
        doors=_SUGGESTED, called={"suggested": "repetition_penalty"},
        synonyms=("repetition_penalty",),
        doc="above 1: [divides logits](#penalties-and-biases) of tokens in the prompt or the "
        "answer",
    )
    presence_penalty: float = option(
        "--presence-penalty", default=0.0, metavar="A", within=f"-{MOST_PENALTY} to {MOST_PENALTY}",
        remedy="0 is none", help="subtract A from the logits of tokens that are in the answer",
        commands=_WRITE, doors=_ALL, http_within=(-2, 2),
    )
    frequency_penalty: float = option(
        "--frequency-penalty", default=0.0, metavar="A",
        within=f"-{MOST_PENALTY} to {MOST_PENALTY}", remedy="0 is none",
        help="subtract A from the logits of tokens in the answer, as many times as they are there",
        commands=_WRITE, doors=_ALL, http_within=(-2, 2),
    )
    # kept as pairs
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = option(
        "--logit-bias", default=(), metavar="ID:NUMBER", kind=str, is_several=True,
        help="add NUMBER to the logit of the token ID; may be given several times", commands=_WRITE,
        differs={"python": {"help": "add numbers to the logits of tokens, by their ids"}},
        doors=("http", "batch"), http_within=(-100, 100),
    )
    # fmt: on

    def __post_init__(self) -> None:
        check_values(self)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        is_safe = self.temperature == 0 or self.temperature >= LEAST_TEMPERATURE
        requirement = f"`temperature` must be 0, or at least {LEAST_TEMPERATURE:g}"
        require(is_safe, requirement, self.temperature, "0 is greedy")

    def __repr__(self) -> str:
        shown = {**self.as_dict(), "seed": self.seed}
        return f"Sampling({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_adjusted(self) -> bool:
        penalties = (self.repeat_penalty - 1, self.presence_penalty, self.frequency_penalty)
        return any(penalties) or bool(self.logit_bias)

    @property
    def kind(self) -> "Sampling":
        """Return the settings without the seed: what is learned of acceptance holds for these."""
        return replace(self, seed=0)

    def later(self, number: int) -> "Sampling":
        """Return the settings with the seed this many behind; the first one follows on the last."""
        return replace(self, seed=(self.seed + number) % _NUM_SEEDS)

    @property
    def unprofiled(self) -> str:
        """Return in words which settings no profile covers; empty where profiles cover all."""
        if self.is_adjusted:
            return "penalties or biases"
        return "min-p" if self.min_p and not self.is_greedy else ""

    def as_dict(self) -> dict[str, object]:
        """Return temperature, top-p, top-k and all other settings in use, without the seed."""
        settings = dict[str, object]()
        for each_field in fields(self):
            value = getattr(self, each_field.name)
            is_always = each_field.name in ("temperature", "top_p", "top_k")
            if each_field.name != "seed" and (is_always or value != each_field.default):
                settings[each_field.name] = (
                    dict(value) if each_field.name == "logit_bias" else value
                )
        return settings


# Options that choose among tokens that are drawn, and of them those that need a temperature beside them.
DRAWING = tuple(
    name for name, each_option in options_of(Sampling).items() if each_option.is_drawing
)
NARROWING = tuple(name for name in DRAWING if name != "temperature")


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """Return (token, bias) pairs, sorted by token. Raises `UserError`."""
    try:
        pairs = (
            given.items()
            if isinstance(given, Mapping)
            else [(token, bias) for token, bias in given]
        )
    except (TypeError, ValueError):
        requirement = "`logit_bias` must be pairs of token and number"
        raise UserError(f"{requirement}, got {given!r:.80}: try {{5: -1}}") from None
    tokens = [whole_number(token, "a token of `logit_bias`") for token, _ in pairs]
    numbers = [number(value, "a number of `logit_bias`") for _, value in pairs]
    is_sound = all(abs(value) <= MOST_PENALTY for value in numbers)
    requirement = f"numbers of `logit_bias` must lie between -{MOST_PENALTY} and {MOST_PENALTY}"
    require(is_sound, requirement, numbers, f"-{MOST_PENALTY} is as good as never")
    requirement = "tokens of `logit_bias` must be 0 or more"
    require(all(token >= 0 for token in tokens), requirement, tokens, "give token ids")
    requirement = "a token of `logit_bias` must have one number"
    require(len({*tokens}) == len(tokens), requirement, tokens, "leave others out")
    return tuple(sorted(zip(tokens, numbers, strict=True)))
