"""`offload serve`: a model for many callers, over OpenAI's protocol."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from offload.cli import flags
from offload.cli.app import app
from offload.cli.console import Console
from offload.cli.libraries import libraries
from offload.errors import UserError


@app.command(
    short_help="Serve a model larger than memory over OpenAI's protocol.",
    epilog="""Examples:

    offload serve -m Llama-3.1-70B-Instruct -d Llama-3.2-1B-Instruct --ram 32GiB

    offload serve -m big -d small --port 8000 --queue 16

    offload serve -m big --host 0.0.0.0 --api-key-file keys.txt    # others are let in with a key alone""",
)
def serve(
    model: flags.Model,
    draft: flags.Draft = None,
    config: flags.Config = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="to listen on; any but loopback needs a key")
    ] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(metavar="N", help="to listen on; 0 takes a free one")] = 8080,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="keys that let in, one a line; default: none is asked for"
        ),
    ] = None,
    parallel: Annotated[
        int,
        typer.Option(
            metavar="B",
            min=1,
            help="texts that are written at a time; memory is planned for so many",
        ),
    ] = 4,
    queue: Annotated[
        int,
        typer.Option(metavar="Q", min=1, help="requests that may wait; more are refused with 429"),
    ] = 64,
    grace: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            max=86_400,
            help="for texts under way when the server is ended",
        ),
    ] = 30.0,
    max_body: Annotated[
        str, typer.Option(metavar="SIZE", help="largest body of a request")
    ] = "4MiB",
    device: flags.Device = "auto",
    gpu_mem: flags.GpuMem = None,
    ram: flags.Ram = None,
    context: flags.Context = None,
    dtype: flags.Dtype = "auto",
    draft_dtype: flags.DraftDtype = None,
    experts: flags.Experts = "auto",
    tree: flags.Tree = "auto",
    rule: flags.RuleName = "match",
    lenience: flags.Lenience = 1.0,
    lookup: flags.Lookup = None,
    lookup_length: flags.LookupLength = "1:16",
    ngram: flags.Ngram = None,
    datastore: flags.Datastore = None,
    threads: flags.Threads = None,
    profile: flags.ProfileFile = None,
    invariant: flags.Invariant = None,
    link_limit: flags.LinkLimit = None,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> None:
    """Answer OpenAI's protocol with a model larger than memory, until SIGTERM or Ctrl-C."""
    if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
        raise UserError(
            f"offload serve needs {' and '.join(missing)}: pip install 'offload[serve]'"
        )
    from offload.planning.options import LoadOptions, check_models

    options = LoadOptions(
        config=config,
        device=device,
        gpu_memory=gpu_mem,
        ram=ram,
        dtype=dtype,
        context=context,
        tree=tree,
        rule=rule,
        threads=threads,
        profile=profile,
        link_limit=link_limit,
        invariant=invariant,
        lookup=lookup,
        lookup_length=lookup_length,
        ngram=ngram,
        datastore=datastore,
        lenience=lenience,
        draft_dtype=draft_dtype,
        experts=experts,
        parallel=parallel,
    )
    check_models(model, draft, options)
    with Console(is_quiet=quiet, is_verbose=verbose, sizes_like=ram) as console, libraries(console):
        from offload.cli.serving import ServerWishes, serve_model

        serve_model(
            model,
            draft,
            options,
            console,
            ServerWishes(host, port, api_key_file, queue, grace, max_body),
        )
