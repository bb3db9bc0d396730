"""The commands that make a model in 16 bits smaller without loss, and give it back."""

import json
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli import flags
from offload.cli.app import app
from offload.cli.console import Console
from offload.cli.libraries import libraries
from offload.errors import require
from offload.options import OutputOptions, PackOptions
from offload.units import format_bytes, plural

if TYPE_CHECKING:
    from offload.packing.pack import PackResult

_MODEL = "folder or hub id of a model in bf16; to --verify, of a packed one"
_PACKED = "folder that offload pack has made"
_SLOWLY = "without numba packing is slow: pip install 'offload[fast]'"


@flags.command(
    app,
    epilog="""Examples:

    offload pack -m Llama-3.1-70B --out Llama-3.1-70B-packed

    offload pack -m Llama-3.1-70B --out Llama-3.1-70B-beside --beside int4

    offload pack -m Llama-3.1-70B-packed --verify""",
)
def pack(
    model: Annotated[
        Path, typer.Option("--model", "-m", metavar="MODEL", parser=flags.path, help=_MODEL)
    ],
    done: PackOptions,
    output: OutputOptions,
) -> None:
    """Make a bf16 model a quarter smaller, without loss. It runs as it is, and streams in three
    quarters of the time.

    An fp16 model is packed, too, if its weights stem from bf16, as a sample of them shows.

    The same command goes on where it was interrupted.
    """
    out = done.out
    given = "neither" if out is None else "both"
    requirement = "one of `out` and `verify` must be given"
    require(done.verify == (out is None), requirement, given, "--out names a folder to make")
    from offload.packing.folders import check_pack, read_manifest

    if out is None:
        read_manifest(model.expanduser())
    else:
        check_pack(model, out, done.beside)
    with Console(output) as console, libraries(console):
        from offload.kernels.compiled import runs_numba
        from offload.packing import pack as packing

        console.say("" if runs_numba() else _SLOWLY)
        started_s = time.monotonic()
        if out is None:
            show = partial(console.bytes_landed, label="verifying")
            outcome = packing.verify(model, progress=show)
        else:
            show = partial(console.bytes_landed, label="packing")
            outcome = packing.pack(model, out, beside=done.beside, progress=show)
        elapsed_s = time.monotonic() - started_s
        console.clear()
        console.say(_outcome_line(outcome, is_decimal=console.is_decimal, is_verified=out is None))
    if output.as_json:
        proved = {} if outcome.num_kept else {"is_sound": True}
        print(json.dumps({**outcome.as_dict(), **proved, "elapsed_s": elapsed_s}))


@flags.command(
    app,
    epilog="""Examples:

    offload unpack -m Llama-3.1-70B-packed --out Llama-3.1-70B""",
)
def unpack(
    model: Annotated[
        Path, typer.Option("--model", "-m", metavar="DIR", parser=flags.path, help=_PACKED)
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", parser=flags.path, help="folder to make")],
    output: OutputOptions,
) -> None:
    """Write the files that a model was packed from, byte for byte. The same command goes on where it
    was interrupted.
    """
    from offload.packing.folders import check_unpack

    check_unpack(model, out)
    with Console(output) as console, libraries(console):
        from offload.packing.pack import unpack as restore

        started_s = time.monotonic()
        show = partial(console.bytes_landed, label="unpacking")
        folder = restore(model, out, progress=show)
        elapsed_s = time.monotonic() - started_s
        console.clear()
        console.say(f"{folder}: the files that {model} was packed from, byte for byte")
    if output.as_json:
        print(json.dumps({"folder": str(folder), "elapsed_s": elapsed_s}))


def _outcome_line(outcome: "PackResult", *, is_decimal: bool, is_verified: bool) -> str:
    """Return a line on what packing wrote, kept or verified."""
    size, before = (
        format_bytes(n, is_decimal=is_decimal) for n in (outcome.packed_bytes, outcome.source_bytes)
    )
    share = f"{size} instead of {before}, {outcome.packed_bytes / max(1, outcome.source_bytes):.1%}"
    done = f"{outcome.folder}: {share}, in {plural(outcome.num_files, 'file')}"
    if is_verified:
        return f"{done}; decoded, every checksum is right"
    if outcome.was_there:
        return f"{done}; was there already: --verify reads it"
    kept = f", {outcome.num_kept} of them finished before" if outcome.num_kept else ""
    return f"{done}{kept}; {'the others ' if kept else ''}read back and decoded, the same bits"
