"""`offload generate` of more than one text: what goes together, what is read before it loads."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from offload.cli.batch_file import open_results, read_tasks, varied
from offload.cli.console import Console, Loading
from offload.cli.libraries import libraries
from offload.errors import UserError, require
from offload.options import TextOptions
from offload.rank_roles import is_worker

if TYPE_CHECKING:
    from offload.engine.request import Request

_SUFFIX = ".jsonl"


def prompts_of(text: TextOptions, *, as_json: bool) -> Path | None:
    """Return the file of many prompts, told by its name, if any. Raises `UserError` for odd flags."""
    file = text.file
    prompts = file if file is not None and file.suffix == _SUFFIX else None
    if prompts is not None and text.prompt is not None:
        raise UserError("-p and -f exclude each other: give one of them")
    is_unsaid = text.out is None or prompts is not None
    rule = f"`out` is for results of many prompts, -f FILE{_SUFFIX}"
    require(is_unsaid, rule, file or "one prompt", "leave it out, stdout has the text")
    is_alone = text.session is None or (prompts is None and text.samples == 1)
    got = "many prompts" if prompts else f"`samples` {text.samples}"
    require(is_alone, "`session` keeps one text", got, "leave one of them out")
    is_told = text.num_logprobs is None or as_json or prompts is not None
    rule = "`num_logprobs` are part of what --json prints"
    require(is_told, rule, text.num_logprobs, "give --json")
    return prompts


def write_many(
    loading: Loading,
    console: Console,
    common: "Request",
    prompts: Path | None,
    text: TextOptions,
    *,
    as_json: bool,
) -> None:
    """Write all texts that are asked for: of a file's prompts, or samples of that of `common`.

    Raises `UserError` before anything is loaded, `RunError` in the end where prompts have failed.
    """
    options = loading.options
    # a worker reads nothing, and serves whatever it is
    if prompts is None or is_worker(options.ranks):
        requests = [*varied(common, text.samples)]
        with libraries(console):
            from offload.cli.batch_run import write_samples

            write_samples(loading, console, requests, as_json=as_json)
        return
    written_by = f"{options.dtype} {options.rule} {options.lenience:g}"
    ends_with_context = text.max_new_tokens == -1
    written_by += f" {options.context or 'usual'}" if ends_with_context else ""
    # otherwise a prompt that has no room for what it asks for is told of in its line
    common = replace(common, is_clipped=ends_with_context)
    console.wait("reading prompts")
    tasks = read_tasks(prompts, common, text.samples, written_by, text.system)
    with open_results(text.out, tasks, prompts, console.text) as results, libraries(console):
        from offload.cli.batch_run import write_batch

        write_batch(loading, console, tasks, results)
