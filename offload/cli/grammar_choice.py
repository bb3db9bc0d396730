"""The grammar that flags name, its file read and looked at before anything is loaded."""

from pathlib import Path

from offload.checkpoint.files import read_given
from offload.errors import UserError
from offload.sampling.grammar import Grammar, find_grammar


def own_grammar(
    json_schema: Path | None, regex: str | None, grammar: Path | None
) -> Grammar | None:
    """What the flags say; files hold a schema, or rules in Lark's notation. Raises `UserError`."""
    schema_text = None if json_schema is None else _read(json_schema, "json_schema")
    return find_grammar(schema_text, regex, None if grammar is None else _read(grammar, "grammar"))


def _read(file: Path, name: str) -> str:
    try:
        return read_given(file).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"no UTF-8 at byte {error.start}"
        raise UserError(
            f"`{name}` must be a file that can be read, got {file} ({why}): check the path"
        ) from None
