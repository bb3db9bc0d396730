"""Units, sampling settings and rules, checked once, and the legend of shape suffixes.

A tensor's name ends in one letter per dimension: `logits_NV`, `parent_N`, `key_GSK`.

    N  tree nodes (the root included)      A  accepted nodes         P  committed positions (prefix)
    T  rows of one forward pass            S  cache slots            D  model width
    H  query heads                         G  key/value heads        K  head width
    F  feed-forward width                  V  vocabulary             B  bytes of a flat buffer
    U  rows behind the committed ones      W  nodes run together     L  layers
    C  a chunk of rows, or candidates      K  also ranks, children   R  rows of a block
    M  matches in a corpus

Counts are named `num_...`; sizes, times and rates carry their unit: `slot_bytes`, `stall_s`,
`link_bytes_per_s`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar, NamedTuple, Self

from offload.declaration import check_numbers, number, option, options_of, whole_number
from offload.errors import UserError, require

NOISE_POSITIONS = 32  # whose noise a sampler keeps: a step needs one for every level of its tree
MOST_PENALTY = 100  # logits are about as large, and scores must stay finite
MOST_SAMPLES = 100_000  # of a prompt: each is held until all are written
LEAST_TEMPERATURE = 1e-30  # logits divided by less overflow, and all large ones would be equal
DTYPES = ("auto", "bfloat16", "float16", "float32")
# how routed experts come: one by one as passes need them, or with their layers
EXPERTS = ("auto", "demand", "layers")
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


_WRITE = ("generate", "chat")
_ALL = ("http", "batch", "chat", "harness")


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
        is_drawing=True, is_suggested=True, doors=(*_ALL, "page"),
        doc="0 is greedy; `generate` and `chat` [ask the model](#sampling) where neither this "
        "nor `--top-p`, `--top-k` or `--min-p` is given; `tune` is greedy",
        page=("0", "10"),
    )
    top_p: float = option(
        "--top-p", default=1.0, metavar="P", within="(0, 1]", remedy="1 keeps every token",
        help="keep the likeliest tokens, whose chances sum to P", commands=(*_WRITE, "tune"),
        is_drawing=True, is_suggested=True, doors=(*_ALL, "page"),
        page=("0.0001", "1"),
    )
    top_k: int = option(
        "--top-k", default=0, metavar="K", within="0 or more", remedy="0 keeps every token",
        help="keep the K likeliest tokens; 0 keeps all", commands=(*_WRITE, "tune"),
        is_drawing=True, is_suggested=True, doors=(*_ALL, "page"),
        page=("0", "1000000"),
    )
    min_p: float = option(
        "--min-p", default=0.0, metavar="P", within="[0, 1]", remedy="0 keeps every token",
        help="keep tokens that are at least P times as likely as the likeliest one", commands=_WRITE,
        is_drawing=True, is_suggested=True, doors=(*_ALL, "page"),
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
        is_suggested=True, doors=_ALL, called={"harness": "repetition_penalty"},
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
        doors=("http", "batch"), http_within=(-100, 100),
    )
    # fmt: on

    def __post_init__(self) -> None:
        check_numbers(self)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        is_safe = self.temperature == 0 or self.temperature >= LEAST_TEMPERATURE
        require(
            is_safe,
            f"`temperature` must be 0, or at least {LEAST_TEMPERATURE:g}",
            self.temperature,
            "0 is greedy",
        )

    def __repr__(self) -> str:
        told = ", ".join(
            f"{name}={value!r}" for name, value in (*self.as_dict().items(), ("seed", self.seed))
        )
        return f"Sampling({told})"

    @property
    def is_greedy(self) -> bool:
        """Return whether no noise enters at all."""
        return self.temperature == 0

    @property
    def is_adjusted(self) -> bool:
        """Return whether there are penalties or biases."""
        penalties = (self.repeat_penalty - 1, self.presence_penalty, self.frequency_penalty)
        return any(penalties) or bool(self.logit_bias)

    def as_dict(self) -> dict[str, object]:
        """Return temperature, top-p, top-k and all other settings in use, without the seed."""
        always = ("temperature", "top_p", "top_k")
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        used = [
            one.name
            for one in fields(self)
            if one.name in always or values[one.name] != one.default
        ]
        return {
            name: dict(values[name]) if name == "logit_bias" else values[name]
            for name in used
            if name != "seed"
        }


# Options that choose among tokens that are drawn, and of them those that need a temperature beside them.
DRAWING = tuple(name for name, one in options_of(Sampling).items() if one.is_drawing)
NARROWING = tuple(name for name in DRAWING if name != "temperature")


class ChildSampling(Enum):
    """How a drafter chooses the children of a node."""

    COUPLED = "coupled"  # the best by log q + G, with the very noise that the target draws with
    TOP_K = "top-k"  # the likeliest
    WITHOUT_REPLACEMENT = "without replacement"  # drawn from q, no token twice
    WITH_REPLACEMENT = "with replacement"  # independent draws from q

    @property
    def keeps_distributions(self) -> bool:
        """Return whether verification needs q itself and not just the tokens."""
        return self in (ChildSampling.WITHOUT_REPLACEMENT, ChildSampling.WITH_REPLACEMENT)


class RuleTerms(NamedTuple):
    """The two halves of a rule, which must fit."""

    drafting: ChildSampling
    test: str  # name of the function in `offload.trees.verification` that judges the children


# All rules of verification by name. The functions need torch, this table does not.
RULES: dict[str, RuleTerms] = {
    "match": RuleTerms(ChildSampling.COUPLED, "match"),
    "sequoia": RuleTerms(ChildSampling.WITHOUT_REPLACEMENT, "ratio"),
    "specinfer": RuleTerms(ChildSampling.WITH_REPLACEMENT, "ratio"),
    "spectr": RuleTerms(ChildSampling.WITH_REPLACEMENT, "k_sequential"),
    "topk": RuleTerms(ChildSampling.TOP_K, "match"),
}


def drafting_of(rule: str) -> ChildSampling:
    """Return the child sampling that goes with a rule. Raises `UserError` for an unknown rule."""
    if not isinstance(rule, str) or rule not in RULES:
        raise UserError(
            f"`rule` must be one of {', '.join(RULES)}, got {rule!r}: leave it out for match"
        )
    return RULES[rule].drafting


def check_lenience(lenience: float, rule: str, sampling: Sampling | None = None) -> float:
    """Return `lenience`, checked to be one that the rule can use. Raises `UserError`.

    Args:
        sampling: how tokens will be drawn; None is not known yet.
    """
    lenience = number(lenience, "`lenience`")
    require(
        0 < lenience <= 1, "`lenience` must lie in (0, 1]", lenience, "1 is exact, and the default"
    )
    is_drawn = sampling is not None and not sampling.is_greedy
    if lenience < 1 and is_drawn and not drafting_of(rule).keeps_distributions:
        raise UserError(
            f"`lenience` {lenience:g} scales a ratio that `rule` {rule} does not take where tokens are drawn: "
            "use `rule` sequoia, or `temperature` 0"
        )
    return lenience


class ByteSize(int):
    """Bytes as a person gave them; they are printed in powers of two or of ten, as given.

    Attributes:
        is_decimal: whether they were given as `8GB` or `8G`, and not as `8GiB`.
    """

    is_decimal = False

    @classmethod
    def parse(cls, given: str | int, flag: str) -> Self:
        """Return a size from `512MiB`, `1.2GB`, `4G` or a number of bytes. Raises `UserError`."""
        if isinstance(given, cls):
            return given
        match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d*)?)\s*([kmgt]i?|)b?\s*", str(given).lower())
        if match is None:
            raise UserError(
                f"{flag} must be a size such as 8GiB, 1.2GB or 512MiB, got {str(given)!r}"
            )
        size = cls(float(match[1]) * _UNITS[match[2]])
        require(size > 0, f"{flag} must be more than zero", given, "try 4GiB")
        size.is_decimal = len(match[2]) == 1
        return size

    def __str__(self) -> str:
        return format_bytes(int(self), is_decimal=self.is_decimal)

    def __deepcopy__(self, memo: object) -> Self:
        return self


class Rate(ByteSize):
    """Bytes per second."""

    @classmethod
    def parse(cls, given: str | int, flag: str) -> Self:
        """Return a rate from what is a size, with or without `/s`. Raises `UserError`."""
        return super().parse(given.removesuffix("/s") if isinstance(given, str) else given, flag)

    def __str__(self) -> str:
        return f"{super().__str__()}/s"


def parse_size(given: str | int, flag: str) -> int:
    """Return the bytes of `512MiB`, `1.2GB`, `4G` (decimal) or a number. Raises `UserError`."""
    return int(ByteSize.parse(given, flag))


def parse_rate(given: str | int | None, flag: str) -> int | None:
    """Return the bytes per second of `400MB`, with or without `/s`; None stays None.

    Raises `UserError`.
    """
    return None if given is None else int(Rate.parse(given, flag))


def is_decimal(size: str | int | None) -> bool:
    """Return whether a size is written in powers of ten: `8GB` or `8G`, not `8GiB`."""
    if isinstance(size, ByteSize):
        return size.is_decimal
    return re.search(r"[kmgt]b?\s*$", str(size).lower()) is not None


def format_bytes(num_bytes: float, *, is_decimal: bool = False) -> str:
    """Return `1.59 GiB`, `25.1 MiB`: three digits, in binary units or in `GB` and `MB`."""
    base, infix = (1000, "") if is_decimal else (1024, "i")
    for unit, size in (
        (f"{prefix}{infix}B", base**power)
        for prefix, power in zip("TGMK", (4, 3, 2, 1), strict=True)
    ):
        if abs(num_bytes) >= size:
            return (
                f"{num_bytes / size:.3g} {unit}"
                if num_bytes / size < 999.5
                else f"{num_bytes / size:.0f} {unit}"
            )
    return f"{num_bytes:.0f} B"


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """Return (token, bias) pairs, sorted by token. Raises `UserError`."""
    try:
        pairs = [
            (token, value)
            for token, value in (given.items() if isinstance(given, Mapping) else given)
        ]
    except (TypeError, ValueError):
        raise UserError(
            f"`logit_bias` must be pairs of token and number, got {given!r:.80}: try {{5: -1}}"
        ) from None
    tokens = [whole_number(token, "a token of `logit_bias`") for token, _ in pairs]
    numbers = [number(value, "a number of `logit_bias`") for _, value in pairs]
    is_sound = all(abs(value) <= MOST_PENALTY for value in numbers)
    rule = f"numbers of `logit_bias` must lie between -{MOST_PENALTY} and {MOST_PENALTY}"
    require(is_sound, rule, numbers, f"-{MOST_PENALTY} is as good as never")
    require(
        all(token >= 0 for token in tokens),
        "tokens of `logit_bias` must be 0 or more",
        tokens,
        "give token ids",
    )
    require(
        len({*tokens}) == len(tokens),
        "a token of `logit_bias` must have one number",
        tokens,
        "leave others out",
    )
    return tuple(sorted(zip(tokens, numbers, strict=True)))
