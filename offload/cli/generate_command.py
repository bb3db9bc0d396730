"""The command `generate`: one text, or many."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from offload.cli import flags
from offload.cli.app import app
from offload.cli.console import Console
from offload.cli.libraries import libraries
from offload.cli.loading import Loading
from offload.cli.prompt_input import found_session, prompts_of, read_prompt, with_system
from offload.cli.sampling import GivenSampling, found_grammar
from offload.options import ModelChoice, ModelOptions, OutputOptions, SamplingOptions, TextOptions
from offload.rank_roles import is_worker

if TYPE_CHECKING:
    from offload.engine.request import Request


@flags.command(
    app,
    epilog="""Examples:

    offload generate -m Llama-3.1-70B -d Llama-3.2-1B -p "Once upon a time"

    cat notes.txt | offload generate -m big -d small --temp 0.6 --seed 7

    offload generate -m big --datastore code.store -f main.py

    offload generate -m big -d small -f prompt.txt --json > result.json

    offload generate -m big -d small -f prompts.jsonl --out results.jsonl

    offload generate -m big -d small -p "Tell a joke." --temp 0.8 --samples 4""",
)
def generate(
    models: ModelChoice,
    model_options: ModelOptions,
    text_options: TextOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
) -> None:
    """Write text with a model larger than memory."""
    # it takes a third of the time of `--help`
    from offload.engine.request import Request

    is_elsewhere = is_worker(model_options.ranks)
    prompts = prompts_of(text_options, as_json=output.as_json)
    session = found_session(text_options.session, model_options)
    given = GivenSampling.from_options(sampling)
    grammar = found_grammar(text_options)
    prompt = None
    if prompts is None and not is_elsewhere:
        # as most programs have it
        file = None if str(text_options.file) == "-" else text_options.file
        text = read_prompt(text_options.prompt, file, is_needed=session is None)
        prompt = with_system(text, text_options.system, raw=text_options.raw)
    needs_template = text_options.system is not None
    needs = {"needs_text": session is None, "needs_template": needs_template}
    loading = Loading.from_options(models, model_options, **needs)
    if grammar is not None and not is_elsewhere:
        from offload.sampling.grammar import tried_source

        tried_source(grammar)
    with Console(output, *model_options.budgets, is_silent=is_elsewhere) as console:
        chosen, note = given.settled(loading.config_place, console.wait)
        loading = replace(loading, note=note)
        request = Request(
            prompt,
            chosen,
            text_options.num_wanted,
            is_clipped=True,
            stop=text_options.stop,
            raw=text_options.raw,
            think=text_options.think,
            session=session,
            is_kept=text_options.session is not None,
            num_logprobs=text_options.num_logprobs,
            grammar=grammar,
        )
        request.check()
        if prompts is not None or text_options.samples > 1:
            _write_many(loading, console, request, prompts, text_options, as_json=output.as_json)
            return
        with libraries(console):
            from offload.cli.text_run import write_text

            write_text(
                loading, console, request, session=text_options.session, as_json=output.as_json
            )


def _write_many(
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
    from offload.cli.batch_file import open_results, read_tasks, varied

    options = loading.options
    # a worker reads nothing, and serves whatever it is
    if prompts is None or is_worker(options.ranks):
        requests = [*varied(common, text.samples)]
        with libraries(console):
            from offload.cli.text_run import write_samples

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
        from offload.cli.text_run import write_batch

        write_batch(loading, console, tasks, results)
