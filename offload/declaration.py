"""How an option is declared: once, as a field of a record, with everything that its doors need.

The command line, environment variables, config.toml, HTTP, files of prompts, `/set` in a chat,
lm-eval, documents and error messages are all derived from it. Nothing is imported that takes time.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, wraps
from inspect import Parameter, Signature, signature
from operator import index
from types import UnionType
from typing import Any, ParamSpec, TypeVar, get_args, get_origin

from offload.errors import UserError, require

P = ParamSpec("P")
Record = TypeVar("Record")
Result = TypeVar("Result")
_KEY = "option"
# groups in the order of help; a record names its own as `GROUP`
GROUPS = ("Model", "Text", "Sampling", "Memory", "Guessing", "Server", "Output", "Expert")


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option as declared."""

    name: str = ""  # name of the field, and of the argument in Python
    flags: tuple[str, ...]  # names on the command line; error lines use the first
    group: str = "Output"  # heading in `GROUPS` under which help lists it
    is_main: bool = False  # listed in a command's short help
    help: str
    default: Any = None
    kind: Any = str  # type to which the command line parses its text
    metavar: str | None = None
    commands: tuple[str, ...] = ()  # commands that take it
    # {command or door: what differs there}
    differs: Mapping[str, Mapping[str, Any]] | None = None
    # checked by the record itself, see `check_values`
    within: str = ""  # bounds, such as `[0, 1)`, `-1 to 1`, `0 or more`
    choices: tuple[str, ...] = ()
    # makes the value from the given one and the option's name
    reads: Callable[[Any, str], Any] | None = None
    remedy: str = ""
    least: float | None = None  # the command line itself refuses others
    most: float | None = None
    is_required: bool = False
    is_several: bool = False  # may be given several times
    is_hidden: bool = False
    is_setting: bool = True  # the environment and config.toml may set it
    is_per_rank: bool = False  # may have one value for each rank
    # listed even in a record that leaves other options out, see `given_of`
    keeps_default: bool = False
    is_eager: bool = False  # parsed before the others
    counts: str = ""  # upper bound of a number, by name: `cores`
    # affects how tokens are drawn, so it means nothing to greedy text
    is_drawing: bool = False
    # doors besides the command line: python, http, batch, chat, page, suggested
    doors: tuple[str, ...] = ()
    called: Mapping[str, str] | None = None  # {door: its name there}, if it differs
    synonyms: tuple[str, ...] = ()  # other names that programs may use
    # OpenAI's bounds, if they are narrower
    http_within: tuple[float, float] | None = None
    page: tuple[str, str] = ("", "")  # bounds of its field on the chat page
    doc: str = ""  # text of docs/flags.md, if it differs from `help`

    def for_command(self, command: str) -> "Option":
        """Return the option as a command declares it."""
        return replace(self, **(self.differs or {}).get(command, {}))

    def at(self, door: str) -> str:
        """Return its name at a door; in a chat with dashes."""
        usual = self.name.replace("_", "-") if door == "chat" else self.name
        return (self.called or {}).get(door, usual)

    @cached_property
    def flag(self) -> str:
        """Return its name in error lines."""
        return self.flags[0].partition("/")[0]

    @property
    def is_number(self) -> bool:
        return self.kind in (int, float) and not self.is_several

    def checked(self, value: Any) -> Any:
        """Return the value as it is used, numbers as Python's. Raises `UserError`."""
        subject = f"`{self.name}`"
        if self.reads is not None:
            return self.reads(value, subject)
        if self.choices:
            requirement = f"{subject} must be one of {', '.join(self.choices)}"
            require(
                value in self.choices,
                requirement,
                repr(value),
                f'try `{self.name}="{self.default}"`',
            )
        elif self.kind is bool:
            is_either = value in (True, False)
            require(is_either, f"{subject} must be True or False", repr(value), "leave it out")
        elif self.within:
            value = (whole_number if self.kind is int else number)(value, subject)
            requirement, holds = interval(self.within)
            require(holds(value), f"{subject} must {requirement}", value, self.remedy)
        return value


def option(*flags: str, help: str, default: Any = None, **details: Any) -> Any:
    """Declare a field of a record as an option; other arguments are fields of `Option`."""
    declared = {"flags": flags, "help": help, "default": default, **details}
    return field(default=default, metadata={_KEY: declared})


def given_of(record: type) -> Any:
    """Declare a field that holds the given options of another record: `{name: value}`."""
    return field(default_factory=dict, metadata={"of": record})


def as_in(record: type, name: str) -> Any:
    """Declare a field as another record's option, whose value may have other types here."""
    original = next(each_field for each_field in fields(record) if each_field.name == name)
    return field(default=original.default, metadata=original.metadata)


@cache
def options_of(record: type) -> Mapping[str, Option]:
    """Return the options of a record by name, as declared."""
    options = dict[str, Option]()
    for each_field in fields(record):
        if (other := each_field.metadata.get("of")) is not None:
            for name, nested in options_of(other).items():
                options[name] = nested if nested.keeps_default else replace(nested, default=None)
        elif (declared := each_field.metadata.get(_KEY)) is not None:
            # the first type in its annotation
            first = (
                get_args(each_field.type)[0]
                if isinstance(each_field.type, UnionType)
                else each_field.type
            )
            kind = declared.get("kind") or get_origin(first) or first
            group = declared.get("group", getattr(record, "GROUP", "Output"))
            assert group in GROUPS, f"{each_field.name} is of no group"
            settled = {"name": each_field.name, "kind": kind, "group": group}
            options[each_field.name] = Option(**{**declared, **settled})
    return options


def options_at(door: str, *records: type) -> dict[str, Option]:
    """Return the options of records that a door takes, by their names there."""
    declared = [each_option for record in records for each_option in options_of(record).values()]
    return {
        each_option.at(door): each_option for each_option in declared if door in each_option.doors
    }


def synonyms_at(door: str, *records: type) -> dict[str, str]:
    """Return `{other name: name}` of the options that a door takes; in a chat with dashes."""
    names = dict[str, str]()
    for name, each_option in options_at(door, *records).items():
        for other in each_option.synonyms:
            if other != name:
                names[other.replace("_", "-") if door == "chat" else other] = name
    return names


def build(record: type[Record], given: Mapping[str, Any]) -> Record:
    """Return a record made of those of its options that are given."""
    values: dict[str, Any] = {}
    for each_field in fields(record):  # type: ignore[arg-type]
        other = each_field.metadata.get("of")
        if other is not None:
            nested = {name: given.get(name) for name in options_of(other)}
            values[each_field.name] = {
                name: value for name, value in nested.items() if value not in (None, [], ())
            }
        elif each_field.name in given:
            values[each_field.name] = given[each_field.name]
    return record(**values)


def check_values(record: Any) -> None:
    """Check the values of a frozen record, and replace them by checked ones. Raises `UserError`."""
    for name, each_option in options_of(record.__class__).items():
        value = getattr(record, name)
        if not (value is None and each_option.default is None):
            object.__setattr__(record, name, each_option.checked(value))


def renamed(message: str, names: Mapping[str, str]) -> str:
    """Return a line that names options in backticks, with a door's names for them."""
    return re.sub(r"`(\w+)`", lambda match: names.get(match[1], match[0]), message)


def listed(names: Sequence[str], last: str = "and") -> str:
    """Return `a, b and c`; one name is itself."""
    return f" {last} ".join([*filter(None, [", ".join(names[:-1])]), names[-1]])


def called_with(
    arguments: Callable[P, Record],
) -> Callable[[Callable[[Record], Result]], Callable[P, Result]]:
    """Make a function of one record callable with the record's fields as its signature."""

    def decorate(function: Callable[[Record], Result]) -> Callable[P, Result]:
        taken = signature(arguments).parameters.values()
        # Required arguments are marked so, although their fields have defaults as those after them
        # do.
        needed = {
            name for name, each_option in options_of(arguments).items() if each_option.is_required
        }
        shown = Signature(
            [
                parameter.replace(default=Parameter.empty)
                if parameter.name in needed
                else parameter
                for parameter in taken
            ]
        )

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            # the record's TypeError would name no option, and its defaults would hide missing ones
            shown.bind(*args, **kwargs)
            return function(arguments(*args, **kwargs))

        returns = signature(function).return_annotation
        call.__signature__ = shown.replace(return_annotation=returns)  # type: ignore[attr-defined]
        options = options_of(arguments)
        names = {each_option.flag: f"`{name}`" for name, each_option in options.items()}
        lines = [
            # help names options as flags
            f"        {name}: {re.sub(r'--[a-z-]+', lambda flag: names.get(flag[0], flag[0]), each_option.help)}"
            for name, each_option in options.items()
        ]
        call.__doc__ = (function.__doc__ or "").replace("        {arguments}", "\n".join(lines))
        return call

    return decorate


@cache
def interval(text: str) -> tuple[str, Callable[[float], bool]]:
    """Return words and a test for bounds such as `[0, 1)`, `-1 to 1` or `0 or more`."""
    if match := re.fullmatch(r"(\S+) or more", text):
        low = _bound(match[1])
        return f"be {text}", lambda value: low <= value < math.inf
    if match := re.fullmatch(r"(\S+) to (\S+)", text):
        low = _bound(match[1])
        high = _bound(match[2])
        return f"lie between {match[1]} and {match[2]}", lambda value: low <= value <= high
    match = re.fullmatch(r"([\[(])(\S+), (\S+)([\])])", text)
    assert match is not None, f"{text!r} is no interval"
    low = _bound(match[2])
    high = _bound(match[3])
    left_out = {low} if match[1] == "(" else set()
    left_out |= {high} if match[4] == ")" else set()
    return f"lie in {text}", lambda value: low <= value <= high and value not in left_out


def _bound(text: str) -> float:
    base, _, power = text.partition("^")
    return int(base) ** int(power) if power else float(base)


def whole_number(value: object, subject: str) -> int:
    """Return `value`, a whole number of any library, as a Python int. Raises `UserError`."""
    try:
        return int(index(value))  # type: ignore[arg-type]  # True is 1, and libraries ask for the difference
    except TypeError:
        remedy = "round it" if isinstance(value, float) else "give an int"
        raise UserError(f"{subject} must be a whole number, got {value!r:.80}: {remedy}") from None


def number(value: object, subject: str) -> float:
    """Return `value`, a number of any library, as a Python float. Raises `UserError`."""
    try:
        if not isinstance(value, str):
            return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass  # of whatever kind it is
    raise UserError(f"{subject} must be a number, got {value!r:.80}: try 0.7")
