"""The command `plan`."""

from contextlib import ExitStack
from functools import cache, partial

from offload.cli import flags
from offload.cli.app import app
from offload.cli.console import Console
from offload.cli.libraries import libraries
from offload.cli.terminal import print_result
from offload.options import ModelChoice, ModelOptions, OutputOptions, PlanOptions


@flags.command(
    app,
    epilog="""Examples:

    offload plan -m Llama-3.1-70B -d Llama-3.2-1B

    offload plan -m 70b/config.json --ram 32GiB --disk-speed 3GB

    offload plan -m 70b/config.json -d 8b/config.json --hardware l40""",
)
def plan(
    models: ModelChoice, model_options: ModelOptions, machine: PlanOptions, output: OutputOptions
) -> None:
    """Will it fit, and how fast will it be? Reads headers only, of a folder, a hub id or a config.json."""
    from offload.checkpoint.open import open_headers
    from offload.model.headers import describe, is_built
    from offload.planning.load_options import LoadOptions

    model, draft = models.names()
    options = LoadOptions.from_options(model_options, model=model, draft=draft)
    tokens_per_sweep = machine.tokens_per_sweep
    with Console(output, *model_options.budgets) as console, ExitStack() as resources:
        console.wait("reading headers")  # the hub may be asked
        headers = cache(open_headers)
        if any(options.headers(partial(is_built, read=headers))):
            resources.enter_context(libraries(console))
            console.wait("reading headers")
        if options.cards:
            from offload.cli.plan_lines import cards_lines
            from offload.planning.hardware import Assumptions
            from offload.reports.cards import plan_cards

            assumed = Assumptions.from_flags(machine.hardware, machine.disk_speed)
            of_cards = plan_cards(options, assumed)
            figures = of_cards.as_dict()
            lines = cards_lines(of_cards, is_decimal=console.is_decimal)
        else:
            from offload.cli.plan_lines import answer_lines
            from offload.reports.drafts import compare_drafts
            from offload.reports.estimate import estimate

            read = cache(partial(describe, read=headers))  # all estimates are for the same models
            where = (machine.hardware, machine.disk_speed)
            answer = estimate(options, *where, tokens_per_sweep=tokens_per_sweep, read=read)
            drafts = [] if tokens_per_sweep else compare_drafts(options, *where, read)
            figures = {**answer.as_dict(), "drafts": [draft.as_dict() for draft in drafts]}
            form = {"is_verbose": output.verbose, "is_decimal": console.is_decimal}
            lines = answer_lines(answer, drafts, **form)
    print_result(lines, figures, as_json=output.as_json)
