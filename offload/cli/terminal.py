"""The terminal as lines see it: its width, the column of its cursor, and lines that fit."""

import json
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from typing import Any, TextIO

from offload.cli.flags import as_flags, error_line

# a list's name, and the blanks before its text
_NAMED = re.compile(r" *(?=\S)[^\n]{1,20}?\S {2,}(?=\S)")


def columns(stream: TextIO) -> int:
    """Return the columns of the terminal behind a stream; 80 if they are unknown."""
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        width = 0
    return width or shutil.get_terminal_size().columns


def fitted(text: str, stream: TextIO) -> str:
    """Return lines broken between words where a terminal is narrower.

    Text after a name and two spaces is aligned below itself. Lines to a file or a pipe are not
    broken.
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
    """Print a command's result on stdout: lines for a person, or one JSON object.

    Both name options as flags.
    """
    print(json.dumps(_as_flags(figures)) if as_json else fitted(as_flags(lines), sys.stdout))


def _as_flags(figures: Any) -> Any:
    """Return figures whose texts name options as flags."""
    if isinstance(figures, dict):
        return {name: _as_flags(value) for name, value in figures.items()}
    if isinstance(figures, list | tuple):
        return [_as_flags(value) for value in figures]
    return as_flags(figures) if isinstance(figures, str) else figures


def print_error(message: str) -> None:
    """Print an error's line on stderr, as wide as the terminal."""
    print(fitted(error_line(message), sys.stderr), file=sys.stderr)


def column_after(text: str, column: int, width: int) -> int:
    """Return the cursor's column after a text; `width` if the row is full."""
    for char in text:
        if char in "\r\n":
            column = 0
        elif char == "\t":
            column = min(column // 8 * 8 + 8, width - 1)
        # characters that take no room
        elif unicodedata.category(char) not in ("Cc", "Cf", "Me", "Mn"):
            cells = 2 if unicodedata.east_asian_width(char) in "WF" else 1
            column = cells if column + cells > width else column + cells
    return column
