"""Flags, made of what is declared in `offload.options`: a command is a function of records of options.

Values that are not given come from a file of one's own and, before it, from environment variables.
The file is a TOML file of flag names, `ram = "8GiB"`; those in a table, `[chat]`, are for that
command alone and come first. What holds for all commands, as every variable does, holds for those
that take a model; the demo brings its own.

`--help` shows the options of a command that matter first, and the others by name; `--help-all`
explains all. The group of an option, and whether it matters first, belong to its declaration.
"""

import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from offload import machine
from offload.checkpoint.files import read_small
from offload.declaration import GROUPS, Option, build, options_of
from offload.errors import UserError, did_you_mean, reason, require
from offload.options import RECORDS, OutputOptions
from offload.rank_roles import find_place, own_value

TRACEBACK = "OFFLOAD_TRACEBACK"  # for those who take a line for a fault of ours; it sets no flag
_PREFIX = "OFFLOAD_"
_NUM_NAMED = 3  # flags that an error names, the nearest ones
_DECLARED = {name: one for record in reversed(RECORDS) for name, one in options_of(record).items()}
# a command with no more options shows them all
_FEW = 12
_ALL = "--help-all"
# stands for a hyphen while lines are broken
_HYPHEN = "\N{NON-BREAKING HYPHEN}"


def command(
    app: typer.Typer, *, name: str | None = None, **how: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function of records a command, whose flags are those options that name the command.

    Other parameters are typer's own. The command is called as its function, or by `name`.
    """

    def wrap(main: Callable[..., None]) -> Callable[..., None]:
        called = name or main.__name__
        taken = inspect.signature(main, eval_str=True).parameters
        records = dict[str, Any]()
        params = list[inspect.Parameter]()
        for one in taken.values():
            if isinstance(one.annotation, type) and is_dataclass(one.annotation):
                records[one.name] = one.annotation
            else:
                params.append(one)
        declared = {
            one.name: one.of(called)
            for record in records.values()
            for one in options_of(record).values()
            if called in one.commands
        }
        params += map(_parameter, declared.values())
        if is_long(declared):
            keyword = inspect.Parameter.KEYWORD_ONLY
            params.append(inspect.Parameter("help_all", keyword, default=False, annotation=HelpAll))

        def run(**given: Any) -> None:
            for name, record in records.items():
                given[name] = build(record, given)
            main(**{name: given[name] for name in taken})

        params.sort(key=lambda one: one.default is not inspect.Parameter.empty)
        run.__name__ = called
        run.__doc__ = main.__doc__
        run.__signature__ = inspect.Signature(params)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in params}
        app.command(cls=grouped(declared), **how)(run)
        return main

    return wrap


def _parameter(one: Option) -> inspect.Parameter:
    """Return a flag as typer takes it."""
    kind = list[one.kind] if one.is_several else one.kind  # type: ignore[name-defined]
    more: dict[str, Any] = {"min": one.least, "max": one.most} if one.kind in (int, float) else {}
    if one.is_per_rank and one.kind is int:
        more = {"parser": str, "callback": _own_number}
    elif one.is_per_rank:
        more = {"callback": _of_this_rank}
    told = typer.Option(
        *one.flags,
        metavar=one.metavar,
        help=one.help,
        hidden=one.is_hidden,
        is_eager=one.is_eager,
        **more,
    )
    default = None if one.is_several else one.default
    if one.is_required:
        default = inspect.Parameter.empty
    taken = Annotated[kind | None if default is None else kind, told]  # type: ignore[valid-type]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(one.name, keyword, default=default, annotation=taken)


def as_flags(message: str) -> str:
    """Return a line of the library, which names arguments in backticks, with the flags for them.

    `` `tree` `` becomes `--tree`, `` `tree="64x16"` `` becomes `--tree 64x16`.
    """

    def flag(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name not in _DECLARED:
            return match[0]
        return _DECLARED[name].flag + (f" {value}" if value else "")

    return re.sub(r'`(\w+)(?:="([^`"]*)")?`', flag, message)


def ask_for_silence(words: Iterable[str]) -> bool:
    """Return whether a command line wants no lines on stderr but errors."""
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
    own = _of_this_rank(context, param, text)
    if own is None:
        return None
    if not (own.isascii() and own.isdigit()):
        raise typer.BadParameter("Input should be a valid integer")
    if int(own) < 1:
        raise typer.BadParameter("Input should be at least 1")
    if _DECLARED[str(param.name)].counts == "cores":
        # More threads than cores only wait for each other, and thousands are more than a process may start.
        most = machine.num_cores()
        rule = f"{param.opts[0]} must be at most {most}, the cores that this process may use"
        require(int(own) <= most, rule, own, "leave it out to have it measured")
    return int(own)


class Defaults(NamedTuple):
    """What a file and the environment set."""

    commands: Mapping[str, Any]  # {name: what the option parser runs}
    by_command: dict[str, dict[str, Any]]  # as a context takes it: {command: {parameter: value}}
    sources: dict[tuple[str, str], str]  # {(command, parameter): the variable or file that sets it}
    notes: list[str]  # of variables that are nearly a flag's

    def blame(self, message: str, given: list[str]) -> str:
        """Return an error's line, with where its flag was set if not in `given`, the arguments."""
        name = given[0]
        if not any(command == name for command, _ in self.sources):
            return message
        context = self.commands[name].make_context(name, given[1:], resilient_parsing=True)
        for param in context.command.params:
            source = self.sources.get((name, param.name))
            origin = context.get_parameter_source(param.name)
            flags = "|".join([*param.opts, *param.secondary_opts])
            is_given = origin is not None and origin.name == "COMMANDLINE"
            if source and not is_given and re.search(rf"(?<![\w-])({flags})(?![\w-])", message):
                return f"{message} (--{_key(param)} is set by {source})"
        return message

    def set(self, scope: Mapping[str, dict[str, Any]], key: str, value: Any, source: str) -> None:
        """Set a flag of commands that have it; empty unsets it. Raises `UserError` for none."""
        if isinstance(value, dict) or not any(key in known for known in scope.values()):
            known = {flag for flags in scope.values() for flag in flags}
            near = ", ".join(get_close_matches(key, known, _NUM_NAMED, cutoff=0))
            raise UserError(
                f"{source} sets {key!r}, which is no flag: take it out, or name one of {near}"
            )
        for name, flags in scope.items():
            if (param := flags.get(key)) is None:
                continue
            self.by_command[name].pop(param.name, None)
            self.sources.pop((name, param.name), None)
            if value != "":
                is_one = param.multiple and not isinstance(value, list)
                self.by_command[name][param.name] = [value] if is_one else value
                self.sources[name, param.name] = source


def may_have_defaults() -> bool:
    """Return whether there is a file of one's own, or a variable that may set a flag."""
    path = config_file()
    is_there = path is not None and os.path.lexists(path)
    return is_there or any(name.startswith(_PREFIX) for name in os.environ)


def find_defaults(commands: Mapping[str, Any]) -> Defaults:
    """Return what file and environment set for these commands. Raises `UserError`."""
    flags = {name: _settings(command) for name, command in commands.items()}
    shared = {
        name: {key: param for key, param in known.items() if _may(param, "is_shared")}
        for name, known in flags.items()
        if "model" in known
    }
    path = config_file()
    found = Defaults(commands, {name: {} for name in flags}, {}, [])
    told = _read(path) if path else {}
    tables = {name: told.pop(name) for name in flags if isinstance(told.get(name), dict)}
    for key, value in told.items():
        found.set(shared, key, value, str(path))
    for name, table in tables.items():
        for key, value in table.items():
            found.set({name: flags[name]}, key, value, str(path))
    keys = {key for known in shared.values() for key in known}
    variables = {f"{_PREFIX}{key.upper().replace('-', '_')}": key for key in keys}
    for name, value in os.environ.items():
        if name in variables:
            found.set(shared, variables[name], value, name)
        # of another program's variables nothing is said
        elif (
            name.startswith(_PREFIX)
            and name != TRACEBACK
            and (meant := did_you_mean(name, variables))
        ):
            found.notes.append(f"{name} sets no flag{meant}")
    return found


def config_file() -> Path | None:
    """Return where the file is looked for; None where there is no home."""
    folder = os.environ.get("XDG_CONFIG_HOME")
    try:
        return Path(folder or Path.home() / ".config") / "offload" / "config.toml"
    except RuntimeError:
        return None


def _settings(command: Any) -> dict[str, Any]:
    """Return what may be set of a command, by key."""
    known = {_key(one): one for one in command.params if _may(one, "is_setting")}
    return {key: one for key, one in known.items() if key not in ("", "help", "help-all")}


def _may(param: Any, what: str) -> bool:
    """Return what is declared of a parameter; one that is not declared may all."""
    return param.name not in _DECLARED or bool(getattr(_DECLARED[param.name], what))


def _key(param: Any) -> str:
    """Return the first long name without its dashes; empty where there is none."""
    long = _longest(param)
    return long[2:] if long.startswith("--") else ""


def _read(path: Path) -> dict[str, Any]:
    import tomllib  # `--help` reads no file

    try:
        return tomllib.loads(read_small(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:  # among them what is no UTF-8 or no TOML
        raise UserError(f"cannot read {path} ({reason(error)}): mend it or move it away") from None


def grouped(declared: Mapping[str, Option]) -> type[TyperCommand]:
    """Return the class of a command with these options; others that it has matter first."""
    return type("GroupedCommand", (_GroupedCommand,), {"declared": declared})


def is_long(declared: Mapping[str, Option]) -> bool:
    """Return whether a command has so many options that its help shows the main ones alone."""
    return sum(not one.is_hidden for one in declared.values()) > _FEW


class _GroupedCommand(TyperCommand):
    """A command whose help is in groups."""

    declared: Mapping[str, Option] = {}

    def get_help(self, ctx: Any) -> str:
        """Return the help, in which no line ends within a flag."""
        return super().get_help(ctx).replace(_HYPHEN, "-")

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return what follows the command's name; of a required argument its name alone."""
        pieces = super().collect_usage_pieces(ctx)
        return [re.sub(r"^\{(.*?)(\.\.\.)?\}", r"\1", piece) for piece in pieces]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, and options by their groups."""
        sections: dict[str, list[tuple[str, str]]] = {}
        rest: dict[str, list[str]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is None:
                continue
            one = self.declared.get(str(param.name))
            section = "Options"
            if param.param_type_name == "argument":
                record = (str(param.metavar), record[1])
                section = "Arguments"
            elif one is not None and ctx.meta.get(_ALL):
                section = one.group
            elif one is not None and is_long(self.declared) and not one.is_main:
                rest.setdefault(one.group, []).append(_longest(param))
                continue
            # no flag is broken into two lines
            told = re.sub(r"--?[a-z][\w-]*", lambda flag: flag[0].replace("-", _HYPHEN), record[1])
            sections.setdefault(section, []).append((record[0], told))
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
    how: Any = {"subsequent_indent": " " * len(head), "break_on_hyphens": False}
    return "\n".join([*textwrap.wrap(names, formatter.width, initial_indent=head, **how), ""])


def _longest(param: Any) -> str:
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
