"""The command line: flags become calls of Python, errors become one line and an exit code.

Text goes to stdout as it is accepted, all else to stderr. Only commands that compute import torch.
"""

import errno
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import typer

from offload.cli import defaults, flags, rank_process
from offload.cli.app import app, every_command
from offload.cli.failures import is_stuck, leave, machine_failure
from offload.cli.flags import error_line
from offload.cli.terminal import print_error
from offload.errors import RankError, RunError, UserError, did_you_mean, plain_requirement
from offload.machine import allow_open_files
from offload.rank_roles import RankInfo

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command that `sys.argv` names, and leave by `sys.exit`."""
    given = sys.argv[1:] or ["--help"]
    allow_open_files()
    settings = defaults.Defaults({}, {}, {}, [])
    place = None
    try:
        command: Any = typer.main.get_command(app)
        # the live line tells what is under way
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        if "_OFFLOAD_COMPLETE" in os.environ:
            command.main(prog_name="offload")
        if not {"-h", "--help", "--help-all", "--version"} & {*given}:
            if defaults.may_have_defaults():
                commands = every_command()
                commands.pop("bench", None)
                settings = defaults.find_defaults(commands)
            place = rank_process.begin(given, settings.by_command.get(given[0], {}))
            if settings.notes and not flags.ask_for_silence(given):
                print(*map(error_line, settings.notes), sep="\n", file=sys.stderr)
        # Not command.main(), which has its own idea of what a closed pipe and Ctrl-C mean.
        # A copy, since the option parser takes words away from what it is given.
        with command.make_context("offload", [*given], default_map=settings.by_command) as context:
            command.invoke(context)
        sys.stdout.flush()
        sys.exit(0)
    except typer.Exit as finished:
        if is_stuck():
            _fail_to_write(errno.EBADF)
        sys.exit(finished.exit_code)
    except UserError as error:
        _fail(settings.blame(flags.as_flags(str(error)), given), EXIT_USER_ERROR, place, error)
    except RankError as error:
        _fail(str(error), EXIT_USER_ERROR if error.is_refusal else EXIT_FAILED, place, error)
    except RunError as error:
        _fail(str(error), EXIT_FAILED, place, error)
    except KeyboardInterrupt:
        _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        leave(0)
    except Exception as error:
        _fail_if_known(error, command, given, settings, place)
        raise


def _fail_if_known(
    error: Exception,
    command: Any,
    given: list[str],
    settings: defaults.Defaults,
    place: RankInfo | None,
) -> None:
    """End with a line for an error of the machine or of the option parser; return for any other."""
    if isinstance(error, OSError) and is_stuck():
        _fail_to_write(error.errno or errno.EIO)
    if (line := machine_failure(error)) is not None:
        # a name that is too long was given by the user
        is_given = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
        _fail(line, EXIT_USER_ERROR if is_given else EXIT_FAILED, place, error)
    # the option parser's errors have this method
    if hasattr(error, "format_message"):
        # the command whose options were not understood
        misread = getattr(error, "ctx", None)
        command_path = misread.command_path if misread else _named_command(command, given)
        line = _usage_line(error, given, settings.by_command.get(given[0], {})).rstrip(".")
        line = f"{line} (see {command_path} --help)"
        _fail(settings.blame(line, given), EXIT_USER_ERROR, place, error)


def _fail_to_write(number: int) -> NoReturn:
    """End for a standard output that is closed or full: the text that was asked for is lost."""
    is_closed = number == errno.EBADF
    why = "it is closed" if is_closed else os.strerror(number)
    print(error_line(f"cannot write to standard output ({why})"), file=sys.stderr)
    leave(EXIT_FAILED)


def _named_command(command: Any, given: list[str]) -> str:
    """Return the words that name a command, where the option parser does not tell."""
    words = ["offload"]
    for word in given:
        known = command.list_commands(None) if hasattr(command, "list_commands") else []
        if word not in known:
            break
        # a bench's own parser may take seconds to import
        command = None if words[-1] == "bench" else command.get_command(None, word)
        words.append(word)
    return " ".join(words)


def _usage_line(error: Any, given: list[str], settings: Mapping[str, Any]) -> str:
    """Return the option parser's line, with a question where the words were nearly right.

    `settings` are values from the environment and config.toml, by parameter.
    """
    if known := getattr(error, "possibilities", None):
        return f"{error.message}{did_you_mean(error.option_name, known)}"
    missing = None if error.message else getattr(error, "param", None)
    if missing is not None and "--model" in missing.opts:
        return "--model says what is to run, got none: give a folder, a GGUF file or a hub id"
    requirement = plain_requirement(str(error.message))
    if not requirement or not getattr(error, "param", None):
        return str(error.format_message())
    names = error.param.opts
    if error.param.param_type_name == "argument":
        names = [error.param.metavar]
    line = f"{'/'.join(names)} {requirement}"
    # the last one of a repeated flag counts
    for word, behind in reversed([*zip(given, [*given[1:], ""], strict=True)]):
        name, equals, value = word.partition("=")
        if name in names:
            return f"{line}, got {(value if equals else behind)!r:.80}"
    is_set = error.param.name in settings
    return f"{line}, got {settings[error.param.name]!r:.80}" if is_set else line


def _fail(
    message: str, code: int, place: RankInfo | None = None, error: Exception | None = None
) -> NoReturn:
    """Leave with a message and a code; with a traceback if the environment asks for one."""
    if error is not None and os.environ.get(defaults.TRACEBACK):
        import traceback

        # its causes, too, also where a message of ours took their place
        cause: BaseException | None = error
        while cause is not None:
            cause.__suppress_context__ = False
            cause = cause.__context__
        traceback.print_exception(error)
    if place is not None and error is not None:
        sys.exit(rank_process.leave(place, error, message, code))
    print_error(message)
    sys.exit(code)
