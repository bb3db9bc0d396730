"""The file that `--session` names: looked at before anything is loaded, gone on from, and written again."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import UserError

if TYPE_CHECKING:
    from offload.engine.decoder import Decoder
    from offload.engine.request import Prompt


def found_session(path: Path | None) -> Path | None:
    """The file where it is there already. Raises `UserError` where none could be written."""
    if path is None:
        return None
    folder = path.absolute().parent
    if path.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        what = "it is a folder" if path.is_dir() else f"{folder} is no folder that can be written to"
        raise UserError(f"cannot keep a session in {path} ({what}): name another file")
    return path if path.exists() else None


@contextmanager
def kept_text(decoder: "Decoder", path: Path | None, text: str) -> "Iterator[Prompt]":
    """The prompt of a run whose text is kept in this file, however it ends; no prompt goes on where the file ends."""
    prompt: Prompt = text
    if path is not None and path.exists():
        tokens, messages, _ = decoder.load_session(path)
        if messages is not None:
            raise UserError(f"{path} holds a conversation: go on with it by offload chat, or name another file")
        prompt = text or tokens
        if not text and tokens[-1:] and tokens[-1] in decoder.end_ids:
            raise UserError(f"the text in {path} has come to its end: give a prompt, or name another file")
    is_refused = False
    try:
        yield prompt
    except UserError:
        is_refused = True
        raise
    finally:
        if path is not None and not is_refused:
            decoder.save_session(path)
