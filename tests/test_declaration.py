"""How options are declared: bounds in words, records of what was given, signatures made of records, sizes as values."""

import copy
import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import pytest

from offload.declaration import build, called_with, check_numbers, interval, option, options_of, unset
from offload.errors import UserError
from offload.planning.load_options import LoadOptions
from offload.units import ByteSize, Rate, is_decimal, parse_rate, parse_size


@dataclass(frozen=True)
class Inner:
    """Two numbers."""

    weight: float = option("--weight", default=1.0, within="(0, 1]", remedy="1 is all", help="how much")
    count: int = option("--count", "-c", default=3, help="how many", keeps_default=True)

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True)
class Outer:
    """A name, and what was given of the numbers."""

    name: str = option("--name", is_required=True, default="", help="what it is called")
    given: Mapping[str, Any] = unset(Inner)
    _: KW_ONLY
    loud: bool = option("--loud/--quiet", default=False, help="whether it is heard")


@pytest.mark.parametrize(
    ("text", "words", "inside", "outside"),
    [
        ("0 or more", "be 0 or more", (0, 1e300), (-1, math.inf, math.nan)),
        ("-2 to 2", "lie between -2 and 2", (-2, 0, 2), (-2.1, 3, math.nan)),
        ("(0, 1]", "lie in (0, 1]", (0.1, 1), (0, 1.1, math.nan)),
        ("[0, 1)", "lie in [0, 1)", (0, 0.9), (1, -0.1)),
        ("[0, 2^63)", "lie in [0, 2^63)", (0, 2**63 - 1), (2**63, -1)),
    ],
)
def test_bounds_are_said_and_held(text: str, words: str, inside: tuple[float, ...], outside: tuple[float, ...]) -> None:
    told, holds = interval(text)
    assert told == words
    assert all(map(holds, inside)) and not any(map(holds, outside))


def test_numbers_of_a_record_are_proved() -> None:
    assert Inner(weight=1).weight == 1.0 and isinstance(Inner(weight=1).weight, float)
    with pytest.raises(UserError, match=r"`weight` must lie in \(0, 1\], got 0.0: 1 is all"):
        Inner(weight=0)
    with pytest.raises(UserError, match="`weight` must be a number, got 'a'"):
        Inner(weight="a")  # type: ignore[arg-type]


def test_what_is_not_given_is_left_open() -> None:
    found = options_of(Outer)
    assert list(found) == ["name", "weight", "count", "loud"]
    assert found["weight"].default is None and found["count"].default == 3
    assert found["count"].setting == "count" and found["loud"].flag == "--loud"
    made = build(Outer, {"name": "x", "weight": None, "count": 3, "loud": True, "other": 5})
    assert made == Outer("x", {"count": 3}, loud=True)


def test_a_record_is_a_signature() -> None:
    @called_with(Outer)
    def tell(outer: Outer) -> str:
        """Tell.

        Args:
            {arguments}
        """
        return f"{outer.name}{'!' if outer.loud else ''}"

    assert tell("a") == "a" and tell(name="a", loud=True) == "a!"
    parameters = inspect.signature(tell).parameters
    assert parameters["name"].default is inspect.Parameter.empty
    assert parameters["loud"].kind is inspect.Parameter.KEYWORD_ONLY
    assert "        loud: whether it is heard\n" in (tell.__doc__ or "")
    for arguments in ({}, {"name": "a", "noise": 1}):
        with pytest.raises(TypeError, match=r"argument:? '(name|noise)'"):
            tell(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"), [("8GiB", "8 GiB"), ("8GB", "8 GB"), ("1.5g", "1.5 GB"), (1 << 20, "1 MiB")]
)
def test_sizes_print_themselves(given: str | int, words: str) -> None:
    size = ByteSize.parse(given, "`ram`")
    assert str(size) == words and is_decimal(size) == words.endswith(" GB")
    assert ByteSize.parse(size, "`ram`") is size and copy.deepcopy(size) is size
    assert json.dumps(size) == str(int(size)) and type(size + 1) is int
    assert type(parse_size(size, "`ram`")) is int, "what computes, or names files, has a plain number"


def test_rates_print_themselves() -> None:
    rate = Rate.parse("400MB/s", "`link_limit`")
    assert rate == parse_rate("400MB", "`link_limit`") == 400 * 10**6 and str(rate) == "400 MB/s"
    assert Rate.parse(rate, "`link_limit`") is rate and parse_rate(None, "`link_limit`") is None


def test_options_hold_what_is_parsed() -> None:
    options = LoadOptions(ram="8GB", gpu_memory="24GiB", link_limit="1GB/s")
    assert [*map(str, (options.ram, options.gpu_memory, options.link_limit))] == ["8 GB", "24 GiB", "1 GB/s"]
    assert LoadOptions.of(options) == options
