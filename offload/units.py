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
from operator import index
from typing import Any, NamedTuple

from offload.errors import UserError

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


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Sampling:
    """How the next token is drawn from the target's logits; temperature 0 is greedy.

    Penalties and biases are applied to logits first, and hold for greedy text as well.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0  # tokens go that are less likely than this part of the likeliest
    seed: int = 0
    # divides logits of tokens in prompt or new text, multiplies negative ones
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0  # taken off tokens that are new text already, once
    frequency_penalty: float = 0.0  # ... and as often as they are
    # added to tokens' logits; kept as pairs
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("top_k", "seed"):  # numpy's whole numbers overflow where Python's do not
            object.__setattr__(self, name, whole_number(getattr(self, name), f"`{name}`"))
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repeat_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            object.__setattr__(self, name, _number(getattr(self, name), f"`{name}`"))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        require(
            0 <= self.temperature < float("inf"),
            "`temperature` must be 0 or more",
            self.temperature,
            "0 is greedy",
        )
        is_safe = self.temperature == 0 or self.temperature >= LEAST_TEMPERATURE
        require(
            is_safe,
            f"`temperature` must be 0, or at least {LEAST_TEMPERATURE:g}",
            self.temperature,
            "0 is greedy",
        )
        require(
            0 < self.top_p <= 1, "`top_p` must lie in (0, 1]", self.top_p, "1 keeps every token"
        )
        require(self.top_k >= 0, "`top_k` must be 0 or more", self.top_k, "0 keeps every token")
        require(
            0 <= self.min_p <= 1, "`min_p` must lie in [0, 1]", self.min_p, "0 keeps every token"
        )
        is_safe = 1 / MOST_PENALTY <= self.repeat_penalty <= MOST_PENALTY
        rule = f"`repeat_penalty` must lie between {1 / MOST_PENALTY:g} and {MOST_PENALTY}"
        require(is_safe, rule, self.repeat_penalty, "1 is none")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            rule = f"`{name}` must lie between -{MOST_PENALTY} and {MOST_PENALTY}"
            require(abs(value) <= MOST_PENALTY, rule, value, "0 is none")
        require(
            0 <= self.seed < 2**63, "`seed` must lie in [0, 2^63)", self.seed, "0 is as good as any"
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
    test: str  # name of the function in `offload.verification` that judges the children


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
    lenience = _number(lenience, "`lenience`")
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


def parse_size(text: str | int, flag: str) -> int:
    """Return the bytes of `512MiB`, `1.2GB`, `4G` (decimal) or a number. Raises `UserError`."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d*)?)\s*([kmgt]i?|)b?\s*", str(text).lower())
    if match is None:
        raise UserError(f"{flag} must be a size such as 8GiB, 1.2GB or 512MiB, got {str(text)!r}")
    size_bytes = int(float(match[1]) * _UNITS[match[2]])
    require(size_bytes > 0, f"{flag} must be more than zero", text, "try 4GiB")
    return size_bytes


def parse_rate(text: str | int | None, flag: str) -> int | None:
    """Return the bytes per second of `400MB`, with or without `/s`; None stays None.

    Raises `UserError`.
    """
    return None if text is None else parse_size(str(text).removesuffix("/s"), flag)


def is_decimal(size: str | int | None) -> bool:
    """Return whether a size is written in powers of ten: `8GB` or `8G`, not `8GiB`."""
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


def whole_number(value: object, what: str) -> int:
    """Return `value` as Python's int, whatever library it comes from.

    Raises `UserError` where it is no whole number.
    """
    try:
        return int(index(value))  # type: ignore[arg-type]  # True is 1, and libraries ask for the difference
    except TypeError:
        raise UserError(f"{what} must be a whole number, got {value!r:.80}: round it") from None


def _number(value: object, what: str) -> float:
    """Return `value` as Python's float, whatever library it comes from.

    Raises `UserError` where it is no number.
    """
    try:
        if not isinstance(value, str):
            return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass  # of whatever kind it is
    raise UserError(f"{what} must be a number, got {value!r:.80}: try 0.7")


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """Return (token, bias) pairs, sorted by token. Raises `UserError`."""
    try:
        pairs = [
            (token, number)
            for token, number in (given.items() if isinstance(given, Mapping) else given)
        ]
    except (TypeError, ValueError):
        raise UserError(
            f"`logit_bias` must be pairs of token and number, got {given!r:.80}: try {{5: -1}}"
        ) from None
    tokens = [whole_number(token, "a token of `logit_bias`") for token, _ in pairs]
    numbers = [_number(number, "a number of `logit_bias`") for _, number in pairs]
    is_sound = all(abs(number) <= MOST_PENALTY for number in numbers)
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


def require(holds: bool, rule: str, value: object, remedy: str) -> None:
    """Raise `UserError` unless a rule holds."""
    if not holds:
        raise UserError(f"{rule}, got {value!s:.80}: {remedy}")
