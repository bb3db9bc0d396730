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
# told by their help alone, where no other command has it
_ALONE = {("serve",), ("plan",), ("tune",), ("demo",), ("pack",), ("verify",)}
# the larger set first
_SETS = {
    "*loading*": ("generate", "chat", "serve", "plan", "tune"),
    "*writing*": ("generate", "chat", "serve"),
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
    """return the page with its table renewed."""
    head, _, rest = text.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    return f"{head}{_BEGIN}\n{''.join(map(_table, GROUPS))}{_END}{tail}"


def text_arguments() -> str:
    """Return the source of a module with keywords and their types."""
    types = {
        option.name: option.type for record in (TextOptions, Sampling) for option in fields(record)
    }
    # Python has a default of its own for it, and None is none
    types["max_new_tokens"] = int
    lines = []
    for name, option in {**options_at("python", TextOptions), **options_of(Sampling)}.items():
        kind = types[name]
        lines += [f"    # {line}" for line in textwrap.wrap(option.for_command("python").help, 92)]
        lines.append(f"    {name}: {kind.__name__ if isinstance(kind, type) else kind}")
    return _HEAD + "\n".join(lines) + "\n"


def _table(group: str) -> str:
    rows = "".join(_rows(group))
    head = "| flag | of | default | meaning |\n|---|---|---|---|\n"
    return f"**{group}**\n\n{head}{rows}\n" if rows else ""


def _rows(group: str) -> Iterator[str]:
    """Yield a row for each option.

    Where a record leaves those of another open, they stand with the first.
    """
    seen = set[tuple[tuple[str, ...], ...]]()
    for record in RECORDS:
        for option in options_of(record).values():
            if option.group != group or option.is_hidden or option.commands in _ALONE:
                continue
            if (option.flags, option.commands) not in seen:
                seen.add((option.flags, option.commands))
                yield _row(option)


def _row(option: Option) -> str:
    names = ", ".join(f"`{flag}`" for flag in option.flags)
    names += f" `{option.metavar}`" if option.metavar else ""
    defaults = {option.default: ""}
    for command in option.commands:
        defaults.setdefault(option.for_command(command).default, f" ({command})")
    is_none = ("None", "False", "", "()")
    shown = [f"`{value}`{place}" for value, place in defaults.items() if str(value) not in is_none]
    commands = ", ".join(option.commands)
    for name, members in _SETS.items():
        commands = commands.replace(", ".join(members), name)
    row = (names, commands, ", ".join(shown), option.doc or option.help)
    cells = (cell.replace("|", r"\|") for cell in row)
    return "".join(f"| {cell} ".replace("  ", " ") for cell in cells) + "|\n"


if __name__ == "__main__":
    main()
