"""The command `chat`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from offload.cli import flags
from offload.cli.app import app
from offload.cli.console import Console
from offload.cli.libraries import libraries
from offload.cli.loading import Loading
from offload.cli.prompt_input import found_session
from offload.cli.sampling import GivenSampling
from offload.options import ModelOptions, OutputOptions, SamplingOptions, TalkingModels, TextOptions
from offload.rank_roles import is_worker

if TYPE_CHECKING:
    from offload.engine.request import Request


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
    given = GivenSampling.from_options(sampling)
    session = found_session(text_options.session, model_options)
    first = _sample_question(text_options, session)
    loading = Loading.from_options(models, model_options, needs_template=True)
    from offload.cli.chat_input import SilentTerminal

    shown = Console(output, *model_options.budgets, is_silent=is_worker(model_options.ranks))
    with shown as console, SilentTerminal() as terminal:
        chosen, note = given.settled(loading.config_place, console.wait)
        with libraries(console, before_leaving=terminal.end):
            from offload.cli.repl import converse

            made = replace(loading.made(console), note=note)
            converse(made, console, text_options, replace(first, sampling=chosen), terminal)


def _sample_question(text: TextOptions, session: Path | None) -> "Request":
    """Return a question with the settings of all questions, checked. Raises `UserError`."""
    from offload.engine.request import Request

    opening = [{"role": "system", "content": text.system}] if text.system else []
    question = [*opening, {"role": "user", "content": "Hello"}]
    is_kept = text.session is not None
    first = Request(
        question,
        max_new_tokens=1,
        stop=text.stop,
        session=session,
        is_kept=is_kept,
        think=text.think,
    )
    first.check()
    return first
