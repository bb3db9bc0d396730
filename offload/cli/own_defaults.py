"""Defaults of one's own: a file, and environment variables before it, stand in for flags that are
not given.

The file is a TOML file of flag names, `ram = "8GiB"`; those in a table, `[chat]`, are for that
command alone and come first. What holds for all commands, as every variable does, holds for those
that take a model; the demo brings its own.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from offload.checkpoint.files import read_small
from offload.errors import UserError, reason

_EACH_TIME = ("prompt", "file", "help")  # said anew in every call
# what only shares its name: a file of machines there, roles of ranks elsewhere
_OF_ITS_OWN = {("plan", "ranks")}


class OwnDefaults(NamedTuple):
    """What was found."""

    commands: Mapping[str, Any]  # {name: what the option parser runs}
    by_command: dict[str, dict[str, Any]]  # as a context takes it: {command: {parameter: value}}
    sources: dict[tuple[str, str], str]  # {(command, parameter): the variable or file that sets it}

    def blame(self, message: str, given: list[str]) -> str:
        """An error's line, with where its flag was set if not in `given`, the arguments of the
        command line.
        """
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
                return f"{message} ({_long_names(param)[0]} is set by {source})"
        return message


def own_defaults(commands: Mapping[str, Any]) -> OwnDefaults:
    """What file and environment say about these commands. Raises `UserError` for a key that is no
    flag of theirs.
    """
    flags = {name: _flags(command) for name, command in commands.items()}
    shared = {
        name: {flag: param for flag, param in known.items() if (name, flag) not in _OF_ITS_OWN}
        for name, known in flags.items()
        if "model" in known
    }
    path = config_file()
    found = OwnDefaults(commands, {name: {} for name in flags}, {})
    told = _read(path) if path else {}
    tables = {name: told.pop(name) for name in flags if isinstance(told.get(name), dict)}
    for scope, entries in [
        (shared, told),
        *(({name: flags[name]}, table) for name, table in tables.items()),
    ]:
        for key, value in entries.items():
            _set(found, scope, key, value, str(path))
    for flag in {flag for known in shared.values() for flag in known}:
        variable = f"OFFLOAD_{flag.upper().replace('-', '_')}"
        if variable in os.environ:
            _set(found, shared, flag, os.environ[variable], variable)
    return found


def config_file() -> Path | None:
    """Where the file is looked for; None where there is no home."""
    folder = os.environ.get("XDG_CONFIG_HOME")
    try:
        return Path(folder or Path.home() / ".config") / "offload" / "config.toml"
    except RuntimeError:
        return None


def _flags(command: Any) -> dict[str, Any]:
    """Every parameter by its first long name without the dashes."""
    return {
        names[0][2:]: p
        for p in command.params
        if (names := _long_names(p)) and p.name not in _EACH_TIME
    }


def _long_names(param: Any) -> list[str]:
    return [name for name in param.opts if name.startswith("--")]


def _set(
    found: OwnDefaults, scope: Mapping[str, dict[str, Any]], key: str, value: Any, source: str
) -> None:
    """One setting for the commands of `scope` that know it; an empty one takes back what the file
    says.
    """
    if isinstance(value, dict) or not any(key in known for known in scope.values()):
        known = ", ".join(sorted({flag for flags in scope.values() for flag in flags}))
        raise UserError(
            f"{source} sets {key!r}, which is no flag: take it out, or name one of {known}"
        )
    for name, param in ((name, flags[key]) for name, flags in scope.items() if key in flags):
        found.by_command[name].pop(param.name, None)
        found.sources.pop((name, param.name), None)
        if value != "":
            is_one = param.multiple and not isinstance(value, list)
            found.by_command[name][param.name] = [value] if is_one else value
            found.sources[name, param.name] = source


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_small(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:  # among them what is no UTF-8 or no TOML
        raise UserError(f"cannot read {path} ({reason(error)}): mend it or move it away") from None
