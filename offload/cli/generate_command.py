"""The command `generate`: one text, or many."""

from offload.cli import flags
from offload.cli.app import app
from offload.cli.console import Console, Loading
from offload.cli.libraries import libraries
from offload.cli.prompt_input import asked_prompt
from offload.cli.rank_process import is_worker
from offload.cli.sampling import GivenSampling, found_grammar
from offload.cli.session_file import found_session
from offload.options import ModelChoice, ModelOptions, OutputOptions, SamplingOptions, TextOptions


@flags.command(
    app,
    epilog="""Examples:

    offload generate -m Llama-3.1-70B -d Llama-3.2-1B --ram 32GiB -p "Once upon a time"

    cat notes.txt | offload generate -m big -d small --temp 0.6 --seed 7 --tree dynamic:128x20

    offload generate -m big --datastore code.store -f main.py    # guesses from a store and the text

    offload generate -m big -d small -f prompt.txt --json > result.json

    offload generate -m big -d small -f prompts.jsonl --out results.jsonl    # many prompts; the same command goes on

    offload generate -m big -d small -p "Tell a joke." --temp 0.8 --samples 4""",
)
def generate(
    names: ModelChoice,
    load: ModelOptions,
    text: TextOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
) -> None:
    """Write text with a model larger than memory."""
    # they take a third of the time of `--help`
    from offload.cli.many_texts import prompts_of, write_many
    from offload.engine.precheck import check_run
    from offload.engine.request import Request
    from offload.planning.load_options import LoadOptions

    is_elsewhere = is_worker(load.ranks)
    prompts = prompts_of(text, as_json=output.as_json)
    session = found_session(text.session, load.ranks)
    given = GivenSampling.of(sampling)
    grammar = found_grammar(text)
    asked = None
    if prompts is None and not is_elsewhere:
        asked = asked_prompt(text, is_needed=session is None)
    model, draft = names.given
    options = LoadOptions.of(load)
    check_run(model, draft, options, needs_text=session is None)
    if grammar is not None and not is_elsewhere:
        from offload.sampling.grammar_source import tried_source

        tried_source(grammar)
    is_quiet = output.quiet or output.as_json or is_elsewhere
    with Console(is_quiet=is_quiet, is_verbose=output.verbose, sizes_like=load.ram) as console:
        chosen, note = given.settled(str(load.config or model), console.wait)
        loading = Loading(model, draft, options, note)
        request = Request(
            asked,
            chosen,
            text.num_wanted,
            is_clipped=True,
            stop=text.stop,
            raw=text.raw,
            session=session,
            is_kept=text.session is not None,
            num_logprobs=text.num_logprobs,
            grammar=grammar,
        )
        if prompts is not None or text.samples > 1:
            write_many(loading, console, request, text, as_json=output.as_json)
            return
        with libraries(console):
            from offload.cli.text_run import write_text

            write_text(loading, console, request, session=text.session, as_json=output.as_json)
