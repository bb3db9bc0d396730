"""Many texts from one decoder: prompts of a file with a line for each, or samples of one prompt.

Invariant: what is finished is written at once and whole, however the command ends.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial

from offload.checkpoint.hub import is_here, open_headers
from offload.cli.batch_file import BatchTask, ResultsFile
from offload.cli.console import Console, Loading, place_line
from offload.cli.flags import as_flags
from offload.cli.live_line import BatchProgress, duration, plural
from offload.engine.decoder import Decoder
from offload.engine.generation import Generation
from offload.engine.identities import Identities
from offload.engine.request import Request
from offload.engine.scheduler import Finished, write_all
from offload.errors import RunError, UserError
from offload.planning.near_copy import read_models


def write_batch(
    loading: Loading, console: Console, tasks: Sequence[BatchTask], results: ResultsFile
) -> None:
    """Write what is not done yet, a line for each text. Raises `RunError` if some have failed."""
    follows_draft = loading.options.lenience < 1
    identities = _identities(loading, console) if results.models else None
    if identities is not None:
        results.require(partial(identities.difference, follows_draft=follows_draft))
    todo = [task for task in tasks if (task.index, task.sample) not in results.done]
    if results.done:
        console.say(
            f"{results.name} has {len(results.done):,} of {plural(len(tasks), 'text')} already"
        )
    if todo:
        first = Request(sampling=todo[0].request.sampling, is_named=bool(results.name))
        with _opened(loading, first, console) as decoder:
            if identities is None:  # files had to be fetched first
                results.require(partial(decoder.identities.difference, follows_draft=follows_draft))
            # while files are those that were opened
            decoder.identities.identity(follows_draft=follows_draft)
            for index, outcome in _finished(decoder, [task.request for task in todo], console):
                results.model = decoder.identities.identity(follows_draft=follows_draft).as_dict()
                results.add(todo[index], _result(outcome))
    if results.num_failed:
        where = f" in {results.name}" if results.name else ""
        what = f"{results.num_failed:,} of {plural(len(tasks), 'text')} could not be written"
        raise RunError(
            f'{what}: their lines{where} have an "error"; mend the prompts, and take those lines out'
        )


def write_samples(
    loading: Loading, console: Console, requests: Sequence[Request], *, as_json: bool
) -> None:
    """Write texts of one prompt as they finish, each under a heading, or at the end as one list."""
    objects = dict[int, dict[str, object]]()
    with _opened(loading, requests[0], console) as decoder:
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


def _identities(loading: Loading, console: Console) -> Identities | None:
    """Return the identities of models whose files are here, before anything is loaded."""
    console.wait("comparing models")
    options = loading.options
    files = read_models(loading.model, loading.draft, options, open_headers)
    if not all(map(is_here, filter(None, files))):
        return None
    return Identities(files, limit_bytes_per_s=options.limit_bytes_per_s)


@contextmanager
def _opened(loading: Loading, request: Request, console: Console) -> Iterator[Decoder]:
    with loading.open(console, request) as decoder:
        console.clear()
        name = loading.names.model
        place = place_line(name, decoder.plan, is_decimal=console.is_decimal)
        console.say("\n".join([*decoder.notes, place]))
        console.say(loading.note)
        yield decoder


def _finished(
    decoder: Decoder, requests: Sequence[Request], console: Console
) -> Iterator[Finished]:
    """Yield results as they finish; in the end, interrupted or not, a line tells how fast."""
    progress = BatchProgress(len(requests), len(decoder.plan.layer_bytes))
    num_cut = 0
    console.show(progress)
    try:
        with closing(write_all(decoder, requests, progress.advance)) as finished:
            for one in finished:
                written = None if isinstance(one.outcome, UserError) else one.outcome
                num_cut += written is not None and written.finish_reason == "length"
                progress.finish(0 if written is None else len(written.token_ids))
                yield one
    finally:
        console.clear()
        texts = f"{progress.num_done:,} of {plural(progress.num_texts, 'text')}"
        texts += f", {num_cut:,} of them cut off by -n" if num_cut else ""
        took = f"{plural(progress.num_tokens, 'token')} in {duration(progress.elapsed_s)}"
        speed = f"{progress.tokens_per_s:.2f} tokens/s over all"
        console.say(f"{texts}, {took}: {speed}, {progress.tokens_per_pass:.2f} tokens/pass")


def _result(outcome: Generation | UserError) -> dict[str, object]:
    if isinstance(outcome, UserError):
        return {"error": as_flags(str(outcome))}
    sampling = asdict(outcome.sampling)
    return {
        "text": outcome.text,
        "token_ids": outcome.token_ids,
        "finish_reason": outcome.finish_reason,
        "seed": sampling.pop("seed"),
        "sampling": sampling,
        "tokens": {"prompt": outcome.stats.num_prompt_tokens, "new": len(outcome.token_ids)},
        **({} if outcome.logprobs is None else {"logprobs": outcome.logprobs_told()}),
        **({} if outcome.is_exact else {"lenience": outcome.lenience}),
    }
