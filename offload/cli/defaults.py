"""What flags are where a command line does not give them: a file of one's own, and environment variables.

The file is a TOML file of flag names, `ram = "8GiB"`; those in a table, `[chat]`, are for that
command alone and come first. Variables come before the file. What holds for all commands, as every
variable does, holds for those that take a model; the demo brings its own.
"""

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from offload.checkpoint.files import read_small
from offload.cli.flags import DECLARED, longest_name
from offload.errors import UserError, did_you_mean, reason

TRACEBACK = "OFFLOAD_TRACEBACK"  # for those who take a line for a fault of ours; it sets no flag
_PREFIX = "OFFLOAD_"
_NUM_NAMED = 3  # flags that an error names, the nearest ones


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
    """Return True if there is a file of one's own, or a variable that may set a flag."""
    path = config_file()
    is_there = path is not None and os.path.lexists(path)
    return is_there or any(name.startswith(_PREFIX) for name in os.environ)


def find_defaults(commands: Mapping[str, Any]) -> Defaults:
    """Return the defaults that file and environment set for these commands. Raises `UserError`."""
    flags = {name: _settings(command) for name, command in commands.items()}
    shared = {name: known for name, known in flags.items() if "model" in known}
    path = config_file()
    settings = Defaults(commands, {name: {} for name in flags}, {}, [])
    table = _read(path) if path else {}
    tables = {name: table.pop(name) for name in flags if isinstance(table.get(name), dict)}
    for key, value in table.items():
        settings.set(shared, key, value, str(path))
    for name, table in tables.items():
        for key, value in table.items():
            settings.set({name: flags[name]}, key, value, str(path))
    keys = {key for known in shared.values() for key in known}
    variables = {f"{_PREFIX}{key.upper().replace('-', '_')}": key for key in keys}
    for name, value in os.environ.items():
        if name in variables:
            settings.set(shared, variables[name], value, name)
        # other programs' variables are passed over in silence
        elif (
            name.startswith(_PREFIX)
            and name != TRACEBACK
            and (meant := did_you_mean(name, variables))
        ):
            settings.notes.append(f"{name} sets no flag{meant}")
    return settings


def config_file() -> Path | None:
    """Return where the file is looked for; None where there is no home."""
    folder = os.environ.get("XDG_CONFIG_HOME")
    try:
        return Path(folder or Path.home() / ".config") / "offload" / "config.toml"
    except RuntimeError:
        return None


def _settings(command: Any) -> dict[str, Any]:
    """Return the options of a command that may be set, by key."""
    known = {_key(param): param for param in command.params if _may_be_set(param)}
    return {key: param for key, param in known.items() if key not in ("", "help", "help-all")}


def _may_be_set(param: Any) -> bool:
    return param.name not in DECLARED or DECLARED[param.name].is_setting


def _key(param: Any) -> str:
    """Return the first long name without its dashes; empty where there is none."""
    long = longest_name(param)
    return long[2:] if long.startswith("--") else ""


def _read(path: Path) -> dict[str, Any]:
    import tomllib  # `--help` reads no file

    try:
        return tomllib.loads(read_small(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:  # among them what is no UTF-8 or no TOML
        raise UserError(f"cannot read {path} ({reason(error)}): mend it or move it away") from None
