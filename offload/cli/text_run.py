"""One text from a model: opened, gone on from a session, written to stdout, accounted for."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from offload.cli.console import Console, Loading, alpha_line, clipped_line, closing_lines, cut_line
from offload.engine.decoder import Decoder
from offload.engine.generation import Run
from offload.engine.request import Prompt, Request
from offload.errors import UserError
from offload.machine import rss_bytes
from offload.model.target import Target


def write_text(
    loading: Loading, console: Console, request: Request, *, session: Path | None, as_json: bool
) -> None:
    """Load a model, and write what is asked for. Raises `UserError` and `RunError`.

    Args:
        session: the file that the text is kept in.
    """
    own_bytes = rss_bytes()
    with loading.open(console, request) as decoder:
        if continues := session is not None:
            console.wait("reading the session")
        begun = _begun_text(decoder, session, request.prompt)
        run = decoder.start(replace(request, prompt=begun), continues=continues)
        console.open(loading.names, decoder, run.tree_choice)
        console.say(loading.note)
        num_new = run.sequence.limits.max_new_tokens
        if request.max_new_tokens < sys.maxsize:
            num_prompt = run.sequence.stats.num_prompt_tokens
            console.say(clipped_line(request.max_new_tokens, num_new, num_prompt, decoder.plan))
        console.follow(run, decoder.plan, num_new)
        with _kept_text(decoder, run, session, console):
            _write_run(run, console, own_bytes, decoder.target if as_json else None)


def _begun_text(decoder: Decoder, path: Path | None, prompt: Prompt | None) -> Prompt:
    """Return the prompt of a run whose text is kept in this file; without one it goes on there."""
    if path is None or not path.exists():
        return prompt or ""
    tokens, messages, _ = decoder.load_session(path)
    if messages is not None:
        what = f"{path} holds a conversation: go on with it by offload chat"
        raise UserError(f"{what}, or name another file")
    if not prompt and tokens[-1:] and tokens[-1] in decoder.end_ids:
        what = f"the text in {path} has come to its end: give a prompt"
        raise UserError(f"{what}, or name another file")
    return prompt or tokens


@contextmanager
def _kept_text(decoder: Decoder, run: Run, path: Path | None, console: Console) -> Iterator[None]:
    """Keep a run's text in this file, however it ends; without a new token the file stays as it is."""
    try:
        yield
    finally:
        if path is not None and run.sequence.new_ids:
            with console.saving():
                decoder.save_session(path)


def _write_run(run: Run, console: Console, own_bytes: int, target: Target | None) -> None:
    """Print pieces as they come; whatever ends the run, what was accepted is printed.

    Args:
        target: what ran, for one object at the end instead of text.
    """
    failure = console.write(run if target is None else ("" for _ in run))
    result = run.result()
    rest = result.text[console.num_written :]
    if target is not None:
        # what each of several ranks has done, unless one may be gone
        ranks = [] if failure else [figures._asdict() for figures in target.figures()]
        rest = json.dumps(result.as_dict() | ({"ranks": ranks} if ranks else {}))
    console.text(rest + "\n")
    console.clear()
    console.say(cut_line(result.stats, result.finish_reason, result.plan))
    console.say(closing_lines(result.stats, result.plan, own_bytes, is_decimal=console.is_decimal))
    console.detail(alpha_line(result.stats))
    if failure is not None:
        raise failure
