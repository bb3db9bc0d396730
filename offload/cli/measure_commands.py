"""The commands that tell what a machine will do with a pair of models: `plan` and `tune`."""

import json
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from offload.cli import flags
from offload.cli.app import app
from offload.cli.console import Console, profile_lines
from offload.cli.libraries import libraries
from offload.cli.live_line import fitted
from offload.units import Sampling, require

_Hardware = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="another machine: l40, rtx4090, ..., h200 or FILE.json"),
]


@app.command(
    short_help="Will it fit, and how fast will it be?",
    epilog="""Examples:

    offload plan -m Llama-3.1-70B -d Llama-3.2-1B

    offload plan -m 70b/config.json -d 7b/config.json --ram 32GiB --disk-speed 3GB

    offload plan -m 70b/config.json -d 7b/config.json --hardware l40 --tree 768x22 --tokens-per-sweep 12.2

    offload plan -m 70b/config.json -d 8b/config.json --ranks lab.json""",
)
def plan(
    model: flags.Model,
    draft: flags.Draft = None,
    config: flags.Config = None,
    device: flags.Device = "auto",
    gpu_mem: flags.GpuMem = None,
    ram: flags.Ram = None,
    context: flags.Context = None,
    dtype: flags.Dtype = "auto",
    draft_dtype: flags.DraftDtype = None,
    experts: flags.Experts = "auto",
    parallel: flags.Parallel = 1,
    tree: flags.Tree = "auto",
    rule: flags.RuleName = "match",
    hardware: _Hardware = None,
    disk_speed: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="of the disk per second, such as 3GB; default: measured"),
    ] = None,
    tokens_per_sweep: Annotated[
        float | None,
        typer.Option(metavar="G", help="what the named tree yields; default: from the profile"),
    ] = None,
    profile: flags.ProfileFile = None,
    ranks: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="several machines, as a JSON file describes them; docs/ranks.md"
        ),
    ] = None,
    as_json: flags.Json = False,
    verbose: flags.Verbose = False,
) -> None:
    """Will it fit, and how fast will it be? Reads headers only, of a folder, a hub id or a
    config.json.
    """
    from offload.model.meta import describe, is_built
    from offload.planning.near_copy import copy_bits
    from offload.planning.options import LoadOptions

    if ranks is not None:
        _require_no_machine(
            hardware=hardware, ram=ram, gpu_memory=gpu_mem, disk_speed=disk_speed, device=device
        )
    options = LoadOptions(
        config=config,
        device=device,
        gpu_memory=gpu_mem,
        ram=ram,
        dtype=dtype,
        context=context,
        tree=tree,
        rule=rule,
        profile=profile,
        draft_dtype=draft_dtype,
        experts=experts,
        parallel=parallel,
    )
    with Console(is_quiet=as_json, sizes_like=ram) as console, ExitStack() as resources:
        if any(is_built(name) for name in (model, draft) if name and copy_bits(name) is None):
            resources.enter_context(libraries(console))
        console.wait("reading headers")  # the hub may be asked
        if ranks is not None:
            from offload.cli.ranks_lines import cluster_lines
            from offload.reports.forecast import forecast

            of_cluster = forecast(model, draft, options, ranks, tokens_per_sweep)
            figures = of_cluster.as_dict()
            lines = cluster_lines(of_cluster, is_verbose=verbose)
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
            lines = answer_lines(found, drafts, is_verbose=verbose, is_decimal=console.is_decimal)
    print(
        flags.as_flags(json.dumps(figures))
        if as_json
        else fitted(flags.as_flags(lines), sys.stdout)
    )


def _require_no_machine(**given: object) -> None:
    """Raises `UserError` for a flag that is of one machine."""
    own = next((f"`{name}`" for name, value in given.items() if value not in (None, "auto")), None)
    require(own is None, "`ranks` describes all machines", f"{own} as well", "leave that out")


@app.command(
    short_help="Measure a pair of models on this machine.",
    epilog="""Examples:

    offload tune -m Llama-3.1-70B -d Llama-3.2-1B --ram 32GiB --text book.txt --text mails.txt

    offload tune -m big -d small --text code.py --temp 0.6 --top-p 0.9 --tokens 4096 --json""",
)
def tune(
    model: flags.Model,
    draft: Annotated[
        str,
        typer.Option("--draft", "-d", metavar="MODEL", help="small model, or self:int4, self:int8"),
    ],
    text: Annotated[
        list[Path],
        typer.Option(metavar="FILE", help="UTF-8, of the kind to be decoded; several times"),
    ],
    temp: flags.Temp = 0.0,
    top_p: flags.TopP = 1.0,
    top_k: flags.TopK = 0,
    rule: flags.RuleName = "match",
    seed: flags.Seed = 0,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="positions to trace")] = 2048,
    config: flags.Config = None,
    teacher_forced: Annotated[
        bool, typer.Option("--teacher-forced", help="trace the text itself, quicker")
    ] = False,
    tree: flags.LargestTree = None,
    device: flags.Device = "auto",
    gpu_mem: flags.GpuMem = None,
    ram: flags.Ram = None,
    dtype: flags.Dtype = "auto",
    draft_dtype: flags.DraftDtype = None,
    experts: flags.Experts = "auto",
    threads: flags.Threads = None,
    link_limit: flags.LinkLimit = None,
    as_json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Measure a pair of models on this machine, so that --tree auto chooses by what is true here."""
    sampling = Sampling(temperature=temp, top_p=top_p, top_k=top_k, seed=seed)
    from offload.planning.options import LoadOptions, check_models

    options = LoadOptions(
        config=config,
        device=device,
        gpu_memory=gpu_mem,
        ram=ram,
        dtype=dtype,
        tree=tree or "auto",
        rule=rule,
        threads=threads,
        link_limit=link_limit,
        draft_dtype=draft_dtype,
        experts=experts,
    )
    check_models(model, draft, options)
    with Console(is_quiet=quiet or as_json, sizes_like=ram) as console, libraries(console):
        from offload.planning.profile import format_json
        from offload.reports.tune import tune as measure

        tuned = measure(
            model,
            draft,
            text,
            sampling,
            options,
            num_tokens=tokens,
            is_teacher_forced=teacher_forced,
            hooks=console.hooks,
        )
    table = f"{profile_lines(tuned.profile, tuned.choice.candidates)}\nsaved in {tuned.path}"
    print(format_json(tuned.profile.as_dict()) if as_json else fitted(table, sys.stdout))
