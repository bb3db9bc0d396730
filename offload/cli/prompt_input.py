"""Where a text begins: a flag, a file or a pipe, all UTF-8, or a session's file."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from offload.checkpoint.files import read_all_of, read_text, text_of
from offload.errors import UserError, os_errors_as_user_error, require
from offload.options import ModelOptions, TextOptions
from offload.rank_roles import shared_by

if TYPE_CHECKING:
    from offload.engine.request import Prompt

_MANY = ".jsonl"
_WHAT = "the prompt"


def prompts_of(text: TextOptions, *, as_json: bool) -> Path | None:
    """Return a file of many prompts, by its name, else None. Raises `UserError` for misuse."""
    file = text.file
    prompts = file if file is not None and file.suffix == _MANY else None
    if file is not None and text.prompt is not None:
        raise UserError("-p and -f exclude each other: give one of them")
    is_unsaid = text.out is None or prompts is not None
    requirement = f"`out` is for results of many prompts, -f FILE{_MANY}"
    require(is_unsaid, requirement, file or "one prompt", "leave it out, stdout has the text")
    is_alone = text.session is None or (prompts is None and text.samples == 1)
    got = "many prompts" if prompts else f"`samples` {text.samples}"
    require(is_alone, "`session` keeps one text", got, "leave one of them out")
    is_told = text.num_logprobs is None or as_json or prompts is not None
    requirement = "`num_logprobs` are part of what --json prints"
    require(is_told, requirement, text.num_logprobs, "give --json")
    return prompts


def read_prompt(prompt: str | None, file: Path | None, *, is_needed: bool = True) -> str:
    """Return the one prompt of `-p`, `-f` or standard input. Raises `UserError`."""
    if prompt not in (None, "-"):
        name = "-p"
        text = text_of(os.fsencode(str(prompt)), _WHAT, name)
    elif file is not None:
        name = str(file)
        text = read_text(file, _WHAT)
    elif not sys.stdin.isatty():
        name = "standard input"
        with os_errors_as_user_error(f"cannot read {_WHAT} from {name}", "check the path"):
            piped = read_all_of(sys.stdin.buffer)
        # The newline that `echo` adds is dropped; a file's is kept.
        text = text_of(piped.removesuffix(b"\n").removesuffix(b"\r"), _WHAT, name)
    elif is_needed:
        raise UserError("no prompt: give -p TEXT, -f FILE or pipe text into standard input")
    else:
        return ""
    if not text and is_needed:
        raise UserError(f"the prompt is empty, {name} holds nothing: give some text")
    return text


def with_system(text: str, system: str | None, *, raw: bool) -> "Prompt | None":
    """Return a prompt behind a `system` one; None if a session has both. Raises `UserError`."""
    if not system:
        return text or None
    if raw:
        requirement = "`system` is put in by the chat template, which `raw` leaves out"
        raise UserError(f"{requirement}: leave one of them out")
    if not text:
        requirement = "`system` is told before a prompt, and there is none"
        raise UserError(f"{requirement}: give -p, or leave it out")
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def found_session(path: Path | None, models: ModelOptions) -> Path | None:
    """Return the session's file, None if it is not there. Raises `UserError` if it cannot be written."""
    if path is None:
        return None
    if (sharing := shared_by(models.device, models.ranks)) is not None:
        requirement = "`session` keeps what one process has computed"
        raise UserError(f"{requirement}, got {sharing}: leave one of them out")
    folder = path.absolute().parent
    obstacle = ""
    if path.is_dir():
        obstacle = "it is a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        obstacle = f"{folder} is no folder that can be written to"
    if obstacle:
        raise UserError(f"cannot keep a session in {path} ({obstacle}): name another file")
    return path if path.exists() else None
