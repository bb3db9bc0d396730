"""The commands that tell what a machine will do with a pair of models: `plan` and `tune`."""

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

from offload.cli import flags
from offload.cli.app import app
from offload.cli.console import Console, profile_lines
from offload.cli.libraries import libraries
from offload.cli.live_line import fitted
from offload.errors import require
from offload.options import ModelChoice, ModelOptions, OutputOptions, PlanOptions, TuneOptions
from offload.units import Sampling


@flags.command(
    app,
    short_help="Will it fit, and how fast will it be?",
    epilog="""Examples:

    offload plan -m Llama-3.1-70B -d Llama-3.2-1B

    offload plan -m 70b/config.json -d 7b/config.json --ram 32GiB --disk-speed 3GB

    offload plan -m 70b/config.json -d 7b/config.json --hardware l40 --tree 768x22 --tokens-per-sweep 12.2

    offload plan -m 70b/config.json -d 8b/config.json --ranks lab.json""",
)
def plan(
    names: ModelChoice, load: ModelOptions, machine: PlanOptions, output: OutputOptions
) -> None:
    """Will it fit, and how fast will it be? Reads headers only, of a folder, a hub id or a config.json."""
    from offload.model.headers import describe, is_built
    from offload.planning.near_copy import copy_bits
    from offload.planning.options import LoadOptions

    if machine.cluster is not None:
        own = {"hardware": machine.hardware, "disk_speed": machine.disk_speed}
        _require_no_machine(**own, ram=load.ram, gpu_memory=load.gpu_memory, device=load.device)
    model, draft = names.given
    options = LoadOptions.of(load)
    hardware, disk_speed, tokens_per_sweep = (
        machine.hardware,
        machine.disk_speed,
        machine.tokens_per_sweep,
    )
    with Console(is_quiet=output.as_json, sizes_like=load.ram) as console, ExitStack() as resources:
        if any(is_built(name) for name in (model, draft) if name and copy_bits(name) is None):
            resources.enter_context(libraries(console))
        console.wait("reading headers")  # the hub may be asked
        if machine.cluster is not None:
            from offload.cli.ranks_lines import cluster_lines
            from offload.reports.forecast import forecast

            of_cluster = forecast(model, draft, options, machine.cluster, tokens_per_sweep)
            figures, lines = (
                of_cluster.as_dict(),
                cluster_lines(of_cluster, is_verbose=output.verbose),
            )
        else:
            from offload.cli.plan_lines import answer_lines
            from offload.reports.drafts import compare_drafts
            from offload.reports.estimate import estimate

            read = cache(describe)  # all estimates are of the same models
            found = estimate(
                model,
                draft,
                options,
                hardware=hardware,
                disk_speed=disk_speed,
                tokens_per_sweep=tokens_per_sweep,
                read=read,
            )
            drafts = (
                []
                if tokens_per_sweep
                else compare_drafts(model, draft, options, hardware, disk_speed, read)
            )
            figures = {**found.as_dict(), "drafts": [one.as_dict() for one in drafts]}
            lines = answer_lines(
                found, drafts, is_verbose=output.verbose, is_decimal=console.is_decimal
            )
    print(
        flags.as_flags(json.dumps(figures))
        if output.as_json
        else fitted(flags.as_flags(lines), sys.stdout)
    )


def _require_no_machine(**given: object) -> None:
    """Raises `UserError` for a flag that is of one machine."""
    own = next((f"`{name}`" for name, value in given.items() if value not in (None, "auto")), None)
    require(own is None, "`ranks` describes all machines", f"{own} as well", "leave that out")


@flags.command(
    app,
    short_help="Measure a pair of models on this machine.",
    epilog="""Examples:

    offload tune -m Llama-3.1-70B -d Llama-3.2-1B --ram 32GiB --text book.txt --text mails.txt

    offload tune -m big -d small --text code.py --temp 0.6 --top-p 0.9 --tokens 4096 --json""",
)
def tune(
    names: ModelChoice,
    load: ModelOptions,
    sampling: Sampling,
    trace: TuneOptions,
    output: OutputOptions,
) -> None:
    """Measure a pair of models on this machine, so that --tree auto chooses by what is true here."""
    from offload.engine.precheck import check_run
    from offload.planning.options import LoadOptions

    model, draft = names.given
    assert draft is not None, "its flag is required here"
    options = LoadOptions.of(replace(load, tree=load.tree or "auto"))
    # a tune sets its own
    check_run(model, draft, options, needs_context=False)
    with (
        Console(is_quiet=output.quiet or output.as_json, sizes_like=load.ram) as console,
        libraries(console),
    ):
        from offload.planning.profile import format_json
        from offload.reports.tune import tune as measure

        tuned = measure(
            model, draft, trace.text, sampling, options,
            num_tokens=trace.tokens, is_teacher_forced=trace.teacher_forced, hooks=console.hooks,
        )  # fmt: skip
    table = f"{profile_lines(tuned.profile, tuned.choice.candidates)}\nsaved in {tuned.path}"
    print(format_json(tuned.profile.as_dict()) if output.as_json else fitted(table, sys.stdout))
