"""Flags, made of what is declared in `offload.options`: a command is a function of records of options.

`--help` shows the options of a command that matter first, and the others by name; `--help-all`
explains all. The group of an option, and whether it matters first, belong to its declaration.
"""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from offload import machine
from offload.declaration import GROUPS, Option, build, options_of
from offload.errors import require
from offload.options import RECORDS, OutputOptions
from offload.rank_roles import find_place, own_value

DECLARED = {
    name: each_option
    for record in reversed(RECORDS)
    for name, each_option in options_of(record).items()
}
# a command with no more options shows them all
_FEW = 12
_ALL = "--help-all"
# stands for a hyphen while lines are broken
_HYPHEN = "\N{NON-BREAKING HYPHEN}"


def command(
    app: typer.Typer, *, name: str | None = None, **settings: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function of records a command, whose flags are those options that name the command.

    Other parameters are typer's own. The command is called as its function, or by `name`.
    """

    def wrap(main: Callable[..., None]) -> Callable[..., None]:
        called = name or main.__name__
        taken = inspect.signature(main, eval_str=True).parameters
        records = dict[str, Any]()
        params = list[inspect.Parameter]()
        for parameter in taken.values():
            if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation):
                records[parameter.name] = parameter.annotation
            else:
                params.append(parameter)
        declared = {
            each_option.name: each_option.for_command(called)
            for record in records.values()
            for each_option in options_of(record).values()
            if called in each_option.commands
        }
        params += map(_parameter, declared.values())
        if is_long(declared):
            keyword = inspect.Parameter.KEYWORD_ONLY
            params.append(inspect.Parameter("help_all", keyword, default=False, annotation=HelpAll))

        def run(**given: Any) -> None:
            for name, record in records.items():
                given[name] = build(record, given)
            main(**{name: given[name] for name in taken})

        params.sort(key=lambda parameter: parameter.default is not inspect.Parameter.empty)
        run.__name__ = called
        run.__doc__ = main.__doc__
        run.__signature__ = inspect.Signature(params)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in params}
        app.command(cls=grouped(declared), **settings)(run)
        return main

    return wrap


def _parameter(declared: Option) -> inspect.Parameter:
    """Return an option as a parameter that typer understands."""
    kind = list[declared.kind] if declared.is_several else declared.kind  # type: ignore[name-defined]
    limits: dict[str, Any] = (
        {"min": declared.least, "max": declared.most} if declared.kind in (int, float) else {}
    )
    if declared.is_per_rank and declared.kind is int:
        limits = {"parser": str, "callback": _own_number}
    elif declared.is_per_rank:
        limits = {"callback": _of_this_rank}
    elif declared.kind is Path:
        limits = {"parser": path}
    typer_option = typer.Option(
        *declared.flags,
        metavar=declared.metavar,
        help=declared.help,
        hidden=declared.is_hidden,
        is_eager=declared.is_eager,
        **limits,
    )
    default = None if declared.is_several else declared.default
    if declared.is_required:
        default = inspect.Parameter.empty
    taken = Annotated[kind | None if default is None else kind, typer_option]  # type: ignore[valid-type]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(declared.name, keyword, default=default, annotation=taken)


def path(given: Any) -> Path:
    """Return a path as it is given; an empty one would mean the folder that one is in."""
    if not isinstance(given, str | Path) or not str(given).strip():
        raise typer.BadParameter("Input should be a path, not empty")
    return Path(given)


def as_flags(message: str) -> str:
    """Return a line of the library, which names arguments in backticks, with the flags for them.

    `` `tree` `` becomes `--tree`, `` `tree="64x16"` `` becomes `--tree 64x16`.
    """

    def flag(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name not in DECLARED:
            return match[0]
        return DECLARED[name].flag + (f" {value}" if value else "")

    return re.sub(r'`(\w+)(?:="([^`"]*)")?`', flag, message)


def ask_for_silence(words: Iterable[str]) -> bool:
    """Return True if a command line wants no lines on stderr but errors."""
    output = options_of(OutputOptions)
    return not {*output["quiet"].flags, *output["as_json"].flags}.isdisjoint(words)


def error_line(message: str) -> str:
    """Return a message as one line; what it quotes must not steer the terminal."""
    line = " ".join(as_flags(message).split())
    return "offload: " + "".join(char if char.isprintable() else "?" for char in line)


def _of_this_rank(context: typer.Context, param: Any, text: str | None) -> str | None:
    """Return this rank's own of one value per rank; without ranks, the text as it is.

    Without `--ranks` the variable RANK may be that of a job which calls the command.
    """
    place = None if context.params.get("ranks") is None else find_place()
    return None if text is None else own_value(text, param.opts[0], place)


def _own_number(context: typer.Context, param: Any, text: str | None) -> int | None:
    """Return this rank's own whole number. Raises `UserError` for more than there are."""
    number = _of_this_rank(context, param, text)
    if number is None:
        return None
    if not (number.isascii() and number.isdigit()):
        raise typer.BadParameter("Input should be a valid integer")
    if int(number) < 1:
        raise typer.BadParameter("Input should be at least 1")
    if DECLARED[str(param.name)].counts == "cores":
        # More threads than cores only wait for each other, and thousands are more than a process may start.
        most = machine.num_cores()
        requirement = f"{param.opts[0]} must be at most {most}, the cores that this process may use"
        require(int(number) <= most, requirement, number, "leave it out to have it measured")
    return int(number)


def grouped(declared: Mapping[str, Option]) -> type[TyperCommand]:
    """Return the class of a command with these options; others that it has matter first."""
    return type("GroupedCommand", (_GroupedCommand,), {"declared": declared})


def is_long(declared: Mapping[str, Option]) -> bool:
    """Return True if a command has so long a help that it shows the main options alone."""
    return sum(not each_option.is_hidden for each_option in declared.values()) > _FEW


class _GroupedCommand(TyperCommand):
    """A command whose help is in groups."""

    declared: Mapping[str, Option] = {}

    def get_help(self, ctx: Any) -> str:
        """Return the help, in which no line ends within a flag."""
        return super().get_help(ctx).replace(_HYPHEN, "-")

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words behind the command's name; of a required argument its name alone."""
        pieces = super().collect_usage_pieces(ctx)
        return [re.sub(r"^\{(.*?)(\.\.\.)?\}", r"\1", piece) for piece in pieces]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, and options by their groups."""
        sections: dict[str, list[tuple[str, str]]] = {}
        rest: dict[str, list[str]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is None:
                continue
            declared = self.declared.get(str(param.name))
            section = "Options"
            if param.param_type_name == "argument":
                record = (str(param.metavar), record[1])
                section = "Arguments"
            elif declared is not None and ctx.meta.get(_ALL):
                section = declared.group
            elif declared is not None and is_long(self.declared) and not declared.is_main:
                rest.setdefault(declared.group, []).append(longest_name(param))
                continue
            # no flag is broken into two lines
            text = re.sub(r"--?[a-z][\w-]*", lambda flag: flag[0].replace("-", _HYPHEN), record[1])
            sections.setdefault(section, []).append((record[0], text))
        for section in ("Arguments", "Options", *GROUPS):
            if section in sections:
                with formatter.section(section):
                    formatter.write_dl(sections[section])
        if rest:
            with formatter.section(f"More, which {ctx.command_path} {_ALL} explains"):
                for group in filter(rest.__contains__, GROUPS):
                    formatter.write(_row(group, ", ".join(rest[group]), formatter))


def _row(group: str, names: str, formatter: Any) -> str:
    head = f"{'':{formatter.current_indent}}{group:<10}"
    layout: Any = {"subsequent_indent": " " * len(head), "break_on_hyphens": False}
    return "\n".join([*textwrap.wrap(names, formatter.width, initial_indent=head, **layout), ""])


def longest_name(param: Any) -> str:
    """Return the name that an option is looked for by."""
    return next((name for name in param.opts if name.startswith("--")), param.opts[0])


def _show_all(ctx: typer.Context, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        print(ctx.get_help())
        raise typer.Exit


_SHOWS_ALL = typer.Option(
    _ALL,
    is_eager=True,
    expose_value=False,
    callback=_show_all,
    help="Show what every option does.",
)
HelpAll = Annotated[bool, _SHOWS_ALL]
