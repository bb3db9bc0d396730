"""The command `tune`."""

import sys
from dataclasses import replace

from offload.cli import flags
from offload.cli.app import app
from offload.cli.console import Console, profile_lines
from offload.cli.libraries import libraries
from offload.cli.live_line import fitted
from offload.options import ModelChoice, ModelOptions, OutputOptions, TuneOptions
from offload.sampling_options import Sampling


@flags.command(
    app,
    epilog="""Examples:

    offload tune -m Llama-3.1-70B -d Llama-3.2-1B --text book.txt

    offload tune -m big -d small --text a.py --text b.py --temp 0.6 --top-p 0.9""",
)
def tune(
    models: ModelChoice,
    model_options: ModelOptions,
    sampling: Sampling,
    trace: TuneOptions,
    output: OutputOptions,
) -> None:
    """Measure a pair of models on this machine, so that --tree auto chooses by what is true here."""
    from offload.engine.precheck import check_run
    from offload.planning.load_options import LoadOptions
    from offload.planning.profile import read_text

    for path in trace.text:
        read_text(path)
    model, draft = models.given
    assert draft is not None, "its flag is required here"
    options = LoadOptions.of(replace(model_options, tree=model_options.tree or "auto"))
    # a tune sets its own
    check_run(model, draft, options, needs_context=False)
    with Console(output, model_options.ram) as console, libraries(console):
        from offload.planning.profile import format_json
        from offload.reports.tune import tune as measure

        tuned = measure(
            model,
            draft,
            trace.text,
            sampling,
            options,
            num_tokens=trace.tokens,
            is_teacher_forced=trace.teacher_forced,
            hooks=console.hooks,
        )
    table = f"{profile_lines(tuned.profile, tuned.choice.candidates)}\nsaved in {tuned.path}"
    print(format_json(tuned.profile.as_dict()) if output.as_json else fitted(table, sys.stdout))
