"""What `--help` shows of a command: the options that matter first, the others by name; `--help-all` all.

The group of an option, and whether it matters first, belong to its declaration. Invariant: an option
that is not hidden is named by `--help`, and explained by `--help-all`.
"""

import textwrap
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from offload.declaration import GROUPS, Option

# a command with no more options shows them all
_FEW = 12
_ALL = "--help-all"


def grouped(declared: Mapping[str, Option]) -> type[TyperCommand]:
    """Return the class of a command with these options; others that it has matter first."""
    return type("GroupedCommand", (_GroupedCommand,), {"declared": declared})


def is_long(declared: Mapping[str, Option]) -> bool:
    """Return whether a command has so many options that its help shows the main ones alone."""
    return sum(not one.is_hidden for one in declared.values()) > _FEW


class _GroupedCommand(TyperCommand):
    """A command whose help is in groups."""

    declared: Mapping[str, Option] = {}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, and options by their groups."""
        told = [(one, one.get_help_record(ctx)) for one in self.get_params(ctx)]
        shown = [(one, record) for one, record in told if record is not None]
        arguments = [record for one, record in shown if one.param_type_name == "argument"]
        options = [(one, record) for one, record in shown if one.param_type_name == "option"]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        if not is_long(self.declared):
            with formatter.section("Options"):
                formatter.write_dl([record for _, record in options])
        elif ctx.meta.get(_ALL):
            for group in ("", *GROUPS):
                if rows := [record for one, record in options if self._group(one) == group]:
                    with formatter.section(group or "Options"):
                        formatter.write_dl(rows)
        else:
            with formatter.section("Options"):
                formatter.write_dl([record for one, record in options if self._is_main(one)])
            with formatter.section(f"More, which {ctx.command_path} {_ALL} explains"):
                for group, names in self._names([one for one, _ in options]):
                    formatter.write(_row(group, names, formatter))

    def _group(self, param: Any) -> str:
        return self.declared[param.name].group if param.name in self.declared else ""

    def _is_main(self, param: Any) -> bool:
        return param.name not in self.declared or self.declared[param.name].is_main

    def _names(self, options: list[Any]) -> list[tuple[str, str]]:
        """Return the options that are left out, by group."""
        rest = [one for one in options if not self._is_main(one)]
        names = {
            group: [_longest(one) for one in rest if self._group(one) == group] for group in GROUPS
        }
        return [(group, ", ".join(own)) for group, own in names.items() if own]


def _row(group: str, names: str, formatter: Any) -> str:
    """Return a line, or several that are not broken within a name."""
    head = f"{'':{formatter.current_indent}}{group:<10}"
    lines = textwrap.wrap(
        names,
        formatter.width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
    )
    return "\n".join([*lines, ""])


def _longest(param: Any) -> str:
    """Return the name that an option is looked for by."""
    return next((name for name in param.opts if name.startswith("--")), param.opts[0])


def _show_all(ctx: typer.Context, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        print(ctx.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option(
        _ALL,
        is_eager=True,
        expose_value=False,
        callback=_show_all,
        help="Show what every option does.",
    ),
]
