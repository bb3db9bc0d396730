"""One text from a model: opened, continued where a session says so, written to stdout as it comes,
accounted for.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from offload.cli.console import Console, Loading, alpha_line, clipped_line, closing_lines, cut_line
from offload.cli.session_file import begun_text, kept_text
from offload.engine.generation import Run
from offload.engine.load import open_decoder
from offload.engine.request import Request
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
    request.check()  # also where a session brings the prompt
    models = (loading.model, loading.draft)
    with open_decoder(*models, loading.options, request, hooks=console.hooks) as decoder:
        if continues := session is not None:
            console.wait("reading the session")
        begun = begun_text(decoder, session, request.prompt)
        run = decoder.start(replace(request, prompt=begun), continues=continues)
        console.open(loading.names, decoder, run.tree_choice)
        console.say(loading.note)
        num_new = run.sequence.limits.max_new_tokens
        if request.max_new_tokens < sys.maxsize:
            num_prompt = run.sequence.stats.num_prompt_tokens
            console.say(clipped_line(request.max_new_tokens, num_new, num_prompt, decoder.plan))
        console.follow(run, decoder.plan, num_new)
        with kept_text(decoder, run, session, console):
            _write_run(run, console, own_bytes, decoder.target if as_json else None)


def _write_run(run: Run, console: Console, own_bytes: int, target: Target | None) -> None:
    """Print pieces as they come; whatever ends the run, what was accepted is printed.

    Args:
        target: what ran, for one object at the end instead of text.
    """
    failure: BaseException | None = None
    try:
        for piece in run:
            if target is None:
                console.text(piece)
    except BaseException as error:  # whatever it is, it is raised again behind the text
        failure = error
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
