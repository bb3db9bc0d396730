"""How an option is declared: once, as a field of a record, with all that its doors need to know.

Command line, environment, config.toml, HTTP, files of prompts, `/set` of a chat, lm-eval, documents
and error words are made of what stands there. Nothing is imported that takes time.
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
# of options, in the order of help; a record's own is its `GROUP`
GROUPS = ("Model", "Text", "Sampling", "Memory", "Guessing", "Server", "Output", "Expert")


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option, as it is declared."""

    name: str = ""  # of the field, and of the argument in Python
    flags: tuple[str, ...]  # the first one stands in error lines
    group: str = "Output"  # of `GROUPS`, under which help lists it
    is_main: bool = False  # stands in a command's short help
    help: str
    default: Any = None
    kind: Any = str  # that the command line makes of its text
    metavar: str | None = None
    commands: tuple[str, ...] = ()  # that take it
    # {command, or door: what is another there}
    differs: Mapping[str, Mapping[str, Any]] | None = None
    # what the record itself checks, see `check_values`
    within: str = ""  # such as `[0, 1)`, `-1 to 1`, `0 or more`
    choices: tuple[str, ...] = ()
    # makes the value of what is given, whose name it is told
    reads: Callable[[Any, str], Any] | None = None
    remedy: str = ""
    least: float | None = None  # refused by the command line itself
    most: float | None = None
    is_required: bool = False
    is_several: bool = False  # may be given several times
    is_hidden: bool = False
    is_setting: bool = True  # may be set by the environment and by config.toml
    is_per_rank: bool = False  # may have one value for each rank
    keeps_default: bool = False  # also in a record that leaves others open, see `given_of`
    is_eager: bool = False  # read before the others
    counts: str = ""  # what a number may not exceed, by name: `cores`
    # chooses among tokens that are drawn, and means nothing to greedy text
    is_drawing: bool = False
    # beside the command line: python, http, batch, chat, page, harness, suggested
    doors: tuple[str, ...] = ()
    called: Mapping[str, str] | None = None  # {door: its name there}, where that is another
    synonyms: tuple[str, ...] = ()  # other names, which doors of programs take for it
    # bounds of OpenAI's protocol, where they are narrower
    http_within: tuple[float, float] | None = None
    page: tuple[str, str] = ("", "")  # bounds of its field on the chat page
    doc: str = ""  # what docs/flags.md says instead of `help`

    def for_command(self, command: str) -> "Option":
        """Return the option as one command has it."""
        return replace(self, **(self.differs or {}).get(command, {}))

    def at(self, door: str) -> str:
        """Return its name at a door; a chat writes it with dashes."""
        usual = self.name.replace("_", "-") if door == "chat" else self.name
        return (self.called or {}).get(door, usual)

    @cached_property
    def flag(self) -> str:
        """The name that error lines have for it."""
        return self.flags[0].partition("/")[0]

    @property
    def is_number(self) -> bool:
        return self.kind in (int, float) and not self.is_several

    def checked(self, value: Any) -> Any:
        """Return the value as it is used, a number as Python's. Raises `UserError`."""
        subject = f"`{self.name}`"
        if self.reads is not None:
            return self.reads(value, subject)
        if self.choices:
            rule = f"{subject} must be one of {', '.join(self.choices)}"
            require(value in self.choices, rule, repr(value), f'try `{self.name}="{self.default}"`')
        elif self.kind is bool:
            is_either = value in (True, False)
            require(is_either, f"{subject} must be True or False", repr(value), "leave it out")
        elif self.within:
            value = (whole_number if self.kind is int else number)(value, subject)
            rule, holds = interval(self.within)
            require(holds(value), f"{subject} must {rule}", value, self.remedy)
        return value


def option(*flags: str, help: str, default: Any = None, **details: Any) -> Any:
    """Declare a field of a record as an option; what else it may say is a field of `Option`."""
    declared = {"flags": flags, "help": help, "default": default, **details}
    return field(default=default, metadata={_KEY: declared})


def given_of(record: type) -> Any:
    """Declare a field that holds what was given of another record's options: `{name: value}`."""
    return field(default_factory=dict, metadata={"of": record})


def as_in(record: type, name: str) -> Any:
    """Declare a field as an option of another record, whose value may be of other types here."""
    original = next(each_field for each_field in fields(record) if each_field.name == name)
    return field(default=original.default, metadata=original.metadata)


@cache
def options_of(record: type) -> Mapping[str, Option]:
    """Return the options of a record by name, as they are declared."""
    options = dict[str, Option]()
    for each_field in fields(record):
        if (other := each_field.metadata.get("of")) is not None:
            for name, nested in options_of(other).items():
                options[name] = nested if nested.keeps_default else replace(nested, default=None)
        elif (declared := each_field.metadata.get(_KEY)) is not None:
            # the first type of its annotation
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
    """Return the options of records that one door takes, by their names there."""
    declared = [each_option for record in records for each_option in options_of(record).values()]
    return {
        each_option.at(door): each_option for each_option in declared if door in each_option.doors
    }


def synonyms_at(door: str, *records: type) -> dict[str, str]:
    """Return `{other name: name}` of the options that one door takes; a chat writes dashes."""
    names = dict[str, str]()
    for name, each_option in options_at(door, *records).items():
        for other in each_option.synonyms:
            if other != name:
                names[other.replace("_", "-") if door == "chat" else other] = name
    return names


def build(record: type[Record], given: Mapping[str, Any]) -> Record:
    """Return a record of those of its options that are given."""
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
    """Check the values of a frozen record, and keep them as they are used. Raises `UserError`."""
    for name, each_option in options_of(record.__class__).items():
        value = getattr(record, name)
        if not (value is None and each_option.default is None):
            object.__setattr__(record, name, each_option.checked(value))


def renamed(message: str, names: Mapping[str, str]) -> str:
    """Return a line, which names options in backticks, with a door's own names for them."""
    return re.sub(r"`(\w+)`", lambda match: names.get(match[1], match[0]), message)


def listed(names: Sequence[str], last: str = "and") -> str:
    """Return `a, b and c`; one name is itself."""
    return f" {last} ".join([*filter(None, [", ".join(names[:-1])]), names[-1]])


def called_with(
    arguments: Callable[P, Record],
) -> Callable[[Callable[[Record], Result]], Callable[P, Result]]:
    """Let a function of one record be called with its fields; they are its signature."""

    def decorate(function: Callable[[Record], Result]) -> Callable[P, Result]:
        taken = signature(arguments).parameters.values()
        # What must be given says so, though its field has a default as those that follow have.
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
            # its TypeError names no record, and no default of what must be given
            shown.bind(*args, **kwargs)
            return function(arguments(*args, **kwargs))

        returns = signature(function).return_annotation
        call.__signature__ = shown.replace(return_annotation=returns)  # type: ignore[attr-defined]
        options = options_of(arguments)
        names = {each_option.flag: f"`{name}`" for name, each_option in options.items()}
        lines = [
            # help speaks of flags
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
    """Return `value`, of whichever library, as an int of Python. Raises `UserError`."""
    try:
        return int(index(value))  # type: ignore[arg-type]  # True is 1, and libraries ask for the difference
    except TypeError:
        raise UserError(f"{subject} must be a whole number, got {value!r:.80}: round it") from None


def number(value: object, subject: str) -> float:
    """Return `value`, of whichever library, as a float of Python. Raises `UserError`."""
    try:
        if not isinstance(value, str):
            return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass  # of whatever kind it is
    raise UserError(f"{subject} must be a number, got {value!r:.80}: try 0.7")
