"""Texts written to stdout, with their figures: one, which may continue a session, or many, from a
file of prompts or as samples of one prompt.

Invariant: what is finished is written at once and whole, however the command ends.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from offload.cli.batch_file import KEYS, BatchTask, ResultsFile
from offload.cli.console import BatchProgress, Console
from offload.cli.flags import as_flags
from offload.cli.loading import Loading
from offload.cli.run_lines import (
    alpha_line,
    clipped_line,
    closing_lines,
    cut_line,
    fills_context,
)
from offload.declaration import renamed
from offload.engine.decoder import Decoder
from offload.engine.generation import Generation, Run
from offload.engine.request import Prompt, Request
from offload.engine.scheduler import Finished, write_all
from offload.errors import RunError, UserError
from offload.machine import rss_bytes
from offload.model.target import Target
from offload.units import duration, plural


def write_text(
    loading: Loading, console: Console, request: Request, *, session: Path | None, as_json: bool
) -> None:
    """Load a model and write the requested text. Raises `UserError` and `RunError`.

    Args:
        session: the file that the text is kept in.
    """
    own_bytes = rss_bytes()
    with loading.open(console, request) as decoder:
        if continues := session is not None:
            console.wait("reading the session")
        begun = _begun_text(decoder, session, request.prompt)
        run = decoder.start(replace(request, prompt=begun), continues=continues)
        num_new = run.sequence.limits.max_new_tokens
        num_prompt = run.sequence.stats.num_prompt_tokens
        console.say(clipped_line(request.max_new_tokens, num_new, num_prompt, decoder.plan))
        console.follow(run, decoder.plan, num_new)
        with _kept_text(decoder, run, session, console):
            _write_run(run, console, own_bytes, decoder.target if as_json else None)


def _begun_text(decoder: Decoder, path: Path | None, prompt: Prompt | None) -> Prompt:
    """Return the prompt of a run with this session file; None continues the file's text."""
    if path is None or not path.exists():
        return prompt or ""
    tokens, messages, _ = decoder.load_session(path)
    if messages is not None:
        problem = f"{path} holds a conversation: go on with it by offload chat"
        raise UserError(f"{problem}, or name another file")
    if not prompt and tokens[-1:] and tokens[-1] in decoder.end_ids:
        problem = f"the text in {path} has come to its end: give a prompt"
        raise UserError(f"{problem}, or name another file")
    return prompt or tokens


@contextmanager
def _kept_text(decoder: Decoder, run: Run, path: Path | None, console: Console) -> Iterator[None]:
    """Keep a run's text in this file, however it ends; without a new token the file is unchanged."""
    try:
        yield
    finally:
        if path is not None and run.sequence.num_new:
            with console.keeping("the session"):
                decoder.save_session(path)


def _write_run(run: Run, console: Console, own_bytes: int, target: Target | None) -> None:
    """Print pieces as they come; whatever ends the run, accepted tokens are printed.

    Args:
        target: the models, to print one JSON object at the end instead of text.
    """
    failure = console.write(run if target is None else ("" for _ in run))
    result = run.result()
    rest = result.text[console.num_written :]
    if target is not None:
        # ranks' figures, unless a rank may be lost
        ranks = [] if failure else [figures._asdict() for figures in target.figures()]
        rest = json.dumps(result.as_dict() | ({"ranks": ranks} if ranks else {}))
    console.text(rest + "\n")
    console.clear()
    console.say(cut_line(result.stats, result.finish_reason, result.plan))
    console.say(closing_lines(result.stats, result.plan, own_bytes, is_decimal=console.is_decimal))
    console.detail(alpha_line(result.stats))
    if failure is not None:
        raise failure


def write_batch(
    loading: Loading, console: Console, tasks: Sequence[BatchTask], results: ResultsFile
) -> None:
    """Write the texts that are not done yet, a line for each. Raises `RunError` if some failed."""
    follows_draft = loading.options.lenience < 1
    if results.models:
        console.wait("comparing models")
        if (identities := loading.identities()) is not None:
            results.require(partial(identities.difference, follows_draft=follows_draft))
    todo = [task for task in tasks if (task.index, task.sample) not in results.done]
    if results.done:
        console.say(
            f"{results.name} has {len(results.done):,} of {plural(len(tasks), 'text')} already"
        )
    if todo:
        _write_results(loading, console, todo, results, follows_draft=follows_draft)
    if results.num_failed:
        where = f" in {results.name}" if results.name else ""
        failure = f"{results.num_failed:,} of {plural(len(tasks), 'text')} could not be written"
        raise RunError(
            f'{failure}: their lines{where} have an "error"; mend the prompts, and take those lines out'
        )


def _write_results(
    loading: Loading,
    console: Console,
    tasks: Sequence[BatchTask],
    results: ResultsFile,
    *,
    follows_draft: bool,
) -> None:
    """Load the models and write these texts as they finish. Raises `UserError` for other models."""
    first = Request(sampling=tasks[0].request.sampling, is_named=bool(results.name))
    with loading.open(console, first, tells_tree=False) as decoder:
        identities = decoder.identities
        # once more: other files may have been fetched meanwhile
        results.require(partial(identities.difference, follows_draft=follows_draft))
        # computed now, while the files are still those that were opened
        identities.identity(follows_draft=follows_draft)
        for index, outcome in _finished(decoder, [task.request for task in tasks], console):
            # with all that passes have read of the weights since
            results.model = identities.identity(follows_draft=follows_draft).as_dict()
            results.add(tasks[index], _result(outcome))


def write_samples(
    loading: Loading, console: Console, requests: Sequence[Request], *, as_json: bool
) -> None:
    """Write texts of one prompt as they finish, each under a heading, or one list at the end."""
    objects = dict[int, dict[str, object]]()
    first = requests[0]
    with loading.open(console, first, tells_tree=False) as decoder:
        ids = decoder.encode(first.prompt or "", raw=first.raw)
        num_new = first.num_new(ids, decoder.plan.context, decoder.target.start_ids)
        console.say(clipped_line(first.max_new_tokens, num_new, len(ids), decoder.plan))
        try:
            for index, outcome in _finished(decoder, requests, console):
                if isinstance(outcome, UserError):
                    raise outcome
                objects[index] = {"sample": index, **outcome.as_dict()}
                if not as_json:
                    head = f"--- sample {index}, seed {outcome.sampling.seed}"
                    console.text(f"{head}\n{outcome.text}\n")
        finally:
            if as_json:
                console.text(json.dumps([objects[index] for index in sorted(objects)]) + "\n")


def _finished(
    decoder: Decoder, requests: Sequence[Request], console: Console
) -> Iterator[Finished]:
    """Yield results as they finish; at the end, interrupted or not, a line gives the speed."""
    progress = BatchProgress(len(requests))
    num_cut = Counter[str]()
    console.show(progress)
    try:
        with closing(write_all(decoder, requests, progress.advance)) as finished:
            for done in finished:
                written = None if isinstance(done.outcome, UserError) else done.outcome
                if written is not None and written.finish_reason == "length":
                    is_full = fills_context(written.stats, written.plan)
                    num_cut["where the context ends" if is_full else "by -n or max_tokens"] += 1
                progress.finish(0 if written is None else len(written.token_ids))
                yield done
    finally:
        console.clear()
        texts = f"{progress.num_done:,} of {plural(progress.num_texts, 'text')}"
        texts += "".join(f", {num:,} of them cut off {ending}" for ending, num in num_cut.items())
        took = f"{plural(progress.num_tokens, 'token')} in {duration(progress.elapsed_s)}"
        speed = f"{progress.tokens_per_s:.2f} tokens/s over all"
        console.say(f"{texts}, {took}: {speed}, {progress.tokens_per_pass:.2f} tokens a pass")


def _result(outcome: Generation | UserError) -> dict[str, object]:
    """Return the JSON fields of a text, or of the error that took its place."""
    if isinstance(outcome, UserError):
        return {"error": as_flags(renamed(str(outcome), KEYS))}
    sampling = asdict(outcome.sampling)
    return {
        "text": outcome.text,
        "token_ids": outcome.token_ids,
        "finish_reason": outcome.finish_reason,
        "seed": sampling.pop("seed"),
        "sampling": sampling,
        "tokens": {"prompt": outcome.stats.num_prompt_tokens, "new": len(outcome.token_ids)},
        **({} if outcome.logprobs is None else {"logprobs": outcome.logprobs_dicts()}),
        **({} if outcome.lenience == 1 else {"lenience": outcome.lenience}),
    }
