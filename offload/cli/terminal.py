"""What a terminal makes of lines: how wide it is, where its cursor stands, and lines that fit it."""

import json
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from typing import Any, TextIO

from offload.cli.flags import as_flags, error_line

# a name of a list, and the blanks before what is said of it
_NAMED = re.compile(r" *(?=\S)[^\n]{1,20}?\S {2,}(?=\S)")


def columns(stream: TextIO) -> int:
    """Return the width of the terminal behind a stream; 80 where it has none, or says nothing."""
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        width = 0
    return width or shutil.get_terminal_size().columns


def fitted(text: str, stream: TextIO) -> str:
    """Return lines broken between words where a terminal is narrower.

    What follows a name and two spaces goes on below itself. For a file or a pipe lines stay whole.
    """
    if not stream.isatty():
        return text
    width = columns(stream)
    lines = list[str]()
    for line in text.split("\n"):
        named = _NAMED.match(line)
        indent = " " * (named.end() if named else 2 + len(line) - len(line.lstrip()))
        layout = {"subsequent_indent": indent, "break_long_words": False, "break_on_hyphens": False}
        lines += textwrap.wrap(line, width, **layout) or [""]  # type: ignore[arg-type]
    return "\n".join(lines)


def print_result(lines: str, figures: Any, *, as_json: bool) -> None:
    """Print on stdout what a command has found: lines for a person, or one JSON object.

    Either names options as flags.
    """
    print(json.dumps(_as_flags(figures)) if as_json else fitted(as_flags(lines), sys.stdout))


def _as_flags(figures: Any) -> Any:
    """Return figures with all texts in them as the command line tells them."""
    if isinstance(figures, dict):
        return {name: _as_flags(value) for name, value in figures.items()}
    if isinstance(figures, list | tuple):
        return [_as_flags(value) for value in figures]
    return as_flags(figures) if isinstance(figures, str) else figures


def print_error(message: str) -> None:
    """Print an error's line on stderr, as wide as the terminal."""
    print(fitted(error_line(message), sys.stderr), file=sys.stderr)


def column_after(text: str, column: int, width: int) -> int:
    """Return where a terminal's cursor stands after a text; `width` says that the row is full."""
    for char in text:
        if char in "\r\n":
            column = 0
        elif char == "\t":
            column = min(column // 8 * 8 + 8, width - 1)
        elif unicodedata.category(char) not in ("Cc", "Cf", "Me", "Mn"):  # which take no room
            cells = 2 if unicodedata.east_asian_width(char) in "WF" else 1
            column = cells if column + cells > width else column + cells
    return column
