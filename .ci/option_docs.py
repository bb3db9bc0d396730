"""What is written of the declared options: the table in docs/flags.md, and keywords of `Decoder.generate` for editors.

    python .ci/option_docs.py

writes both into a checkout; a test compares them.
"""

import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from offload.declaration import GROUPS, Option, options_at, options_of
from offload.options import RECORDS, TextOptions
from offload.sampling_options import Sampling

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ROOT / "docs" / "flags.md"
ARGUMENTS = ROOT / "offload" / "engine" / "text_arguments.py"
_BEGIN = "<!-- options: made by python .ci/option_docs.py -->\n"
_END = "<!-- end of options -->\n"
_DOORS = {
    "python": "Python",
    "http": "HTTP",
    "batch": "files",
    "chat": "`/set`",
    "harness": "lm-eval",
}
_HEAD = '''"""Keywords of `Decoder.generate` and `stream`, for editors and type checkers.

Made by `python .ci/option_docs.py` of what is declared: change that.
"""

import collections.abc
import typing


class TextArguments(typing.TypedDict, total=False):
    """What may be asked of a text; all may be left out."""

'''


def main() -> None:
    """Write both files anew."""
    FLAGS.write_text(with_table(FLAGS.read_text("utf-8")), "utf-8")
    ARGUMENTS.write_text(text_arguments(), "utf-8")


def with_table(text: str) -> str:
    """Return the page with the table as it is to be."""
    head, _, rest = text.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    return f"{head}{_BEGIN}\n{''.join(map(_table, GROUPS))}{_END}{tail}"


def text_arguments() -> str:
    """Return the source of a module with keywords and their types."""
    types = {one.name: one.type for record in (TextOptions, Sampling) for one in fields(record)}
    # Python has a default of its own for it, and None is none
    types["max_new_tokens"] = int
    lines = []
    for name, one in {**options_at("python", TextOptions), **options_of(Sampling)}.items():
        kind = types[name]
        lines += [f"    # {line}" for line in textwrap.wrap(one.of("python").help, 92)]
        lines.append(f"    {name}: {kind.__name__ if isinstance(kind, type) else kind}")
    return _HEAD + "\n".join(lines) + "\n"


def _table(group: str) -> str:
    head = "| flag | of | default | also | meaning |\n|---|---|---|---|---|\n"
    return f"**{group}**\n\n{head}{''.join(_rows(group))}\n"


def _rows(group: str) -> Iterator[str]:
    """Yield a row for each option.

    Where a record leaves those of another open, they stand with that one.
    """
    seen = set[tuple[tuple[str, ...], ...]]()
    for record in RECORDS:
        for one in options_of(record).values():
            if one.group != group or one.is_hidden:
                continue
            if (one.flags, one.commands) not in seen:
                seen.add((one.flags, one.commands))
                yield _row(one)


def _row(one: Option) -> str:
    names = ", ".join(f"`{flag}`" for flag in one.flags)
    names += f" `{one.metavar}`" if one.metavar else ""
    defaults = {one.default: ""}
    for command in one.commands:
        defaults.setdefault(one.of(command).default, f" ({command})")
    is_none = ("None", "False", "", "()")
    shown = [f"`{value}`{told}" for value, told in defaults.items() if str(value) not in is_none]
    doors = [f"{_DOORS[door]} `{one.at(door)}`" for door in one.doors if door in _DOORS]
    told = (", ".join(cell) for cell in (one.commands, shown, doors))
    cells = (cell.replace("|", r"\|") for cell in (names, *told, one.doc or one.help))
    return "".join(f"| {cell} ".replace("  ", " ") for cell in cells) + "|\n"


if __name__ == "__main__":
    main()
