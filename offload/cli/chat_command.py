"""The command `chat`."""

from offload.cli import flags
from offload.cli.app import app
from offload.cli.console import Console, Loading
from offload.cli.launch import is_worker
from offload.cli.libraries import libraries
from offload.cli.sampling import GivenSampling
from offload.cli.session_file import found_session
from offload.options import ModelOptions, OutputOptions, SamplingOptions, TalkingModels, TextOptions


@flags.command(
    app,
    epilog="""Examples:

    offload chat -m Llama-3.1-70B-Instruct -d Llama-3.2-1B-Instruct --ram 32GiB

    offload chat -m big -d small --system "Answer in one sentence." --temp 0.7

    offload chat --demo    # a packaged toy, when there is no model at hand

    offload chat -m big -d small --session talk.session

    offload chat -m big -d small --quiet < questions.txt""",
)
def chat(
    models: TalkingModels,
    model_options: ModelOptions,
    text_options: TextOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
) -> None:
    """Chat with a model larger than memory; every line is a question, and only what is new is read."""
    given = GivenSampling.of(sampling)
    found_session(text_options.session, model_options.ranks)
    from offload.engine.precheck import check_run
    from offload.engine.request import Request
    from offload.planning.load_options import LoadOptions

    model, draft = models.given
    options = LoadOptions.of(model_options)
    Request(stop=text_options.stop).check()
    check_run(model, draft, options, needs_template=True)
    from offload.cli.chat_input import SilentTerminal

    is_elsewhere = is_worker(model_options.ranks)
    shown = Console(output, model_options.ram, is_silent=is_elsewhere)
    with shown as console, SilentTerminal() as terminal:
        chosen, note = given.settled(str(model_options.config or model), console.wait)
        with libraries(console, before_leaving=terminal.end):
            from offload.cli.repl import converse

            if models.demo:
                from offload.cli.demo import packaged_chat

                with console.making_target() as landed:
                    model, options = packaged_chat(options, landed)
            converse(Loading(model, draft, options, note), console, text_options, chosen, terminal)
