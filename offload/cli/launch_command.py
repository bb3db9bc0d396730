"""The command that starts others as many ranks: `launch`."""

from typing import Annotated

import typer

from offload.cli.app import app
from offload.cli.flags import grouped
from offload.cli.live_line import print_error

_COMMAND = "generate, chat or bench decode, with their flags"
_RANKS = "number of ranks on all hosts together; see docs/ranks.md"
_HOSTS = "hosts, on each of which the same command is started; rank 0 is on the first"
_INDEX = "which of the hosts this is; default: found by its name"
_PORT = "port at which hosts meet; default: 29500, or any on one host"


@app.command(
    cls=grouped({}),
    context_settings={"allow_interspersed_args": False},
    epilog="""Examples:

    offload launch -n 2 -- generate -m big -p "Once upon a time" --ranks shards

    offload launch -n 4 -- chat -m big -d small --ranks stages:0-2,draft:3

    offload launch -n 2 --hosts alpha,beta -- generate -m big -p Hello""",
)
def launch(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help=_COMMAND)],
    num_ranks: Annotated[int, typer.Option("-n", metavar="N", min=1, help=_RANKS)],
    hosts: Annotated[str | None, typer.Option(metavar="A,B", help=_HOSTS)] = None,
    host_index: Annotated[int | None, typer.Option(metavar="I", min=0, help=_INDEX)] = None,
    port: Annotated[int | None, typer.Option(metavar="PORT", min=1, max=65535, help=_PORT)] = None,
) -> None:
    """Run a command on many ranks, by torchrun's launcher; rank 0 reads and writes here."""
    from offload.cli.launch import plan_launch, run_ranks

    code, lines = run_ranks(plan_launch(num_ranks, hosts, host_index, port, command))
    for line in lines:
        print_error(line)
    raise typer.Exit(code)
