"""`offload verify`: is a model what it was, and does it hold numbers?"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli import flags
from offload.cli.app import app
from offload.cli.console import Console
from offload.cli.failures import machine_failure
from offload.cli.terminal import print_result
from offload.errors import UserError
from offload.options import OutputOptions, VerifyOptions
from offload.units import format_bytes, plural

if TYPE_CHECKING:
    from offload.integrity import Report

_DAMAGED = 1
_LOST = 2
_SHOWN = 10
_MODEL = "folder, GGUF file, or hub id that was downloaded"


@flags.command(
    app,
    epilog="""Examples:

    offload verify Llama-3.1-70B

    offload verify meta-llama/Llama-3.1-8B --json

    offload verify Llama-3.1-70B --write    # keeps checksums for the next time

    offload verify copy/Llama-3.1-70B --manifest Llama-3.1-70B/offload_sums.json""",
)
def verify(
    model: Annotated[Path, typer.Argument(metavar="MODEL", parser=flags.path, help=_MODEL)],
    compared: VerifyOptions,
    output: OutputOptions,
) -> None:
    """Read all of a model at the speed of the disk, and write nothing: its sizes, its numbers, and
    the checksums of the hub and of an earlier time. --write keeps checksums for the next time.

    Exits with 0 where it is sound, with 1 where it is damaged, with 2 where that cannot be told,
    or its checksums cannot be kept.
    """
    with Console(output) as console:
        console.wait("reading headers")
        from offload.checkpoint.whole import open_whole
        from offload.integrity import verify as check

        show = partial(console.bytes_landed, label="verifying")
        with _not_as_damage():
            place = compared.manifest and compared.manifest.expanduser()
            report = check(open_whole(str(model)), place, may_write=compared.write, progress=show)
    print_result("\n".join(_lines(report)), report.as_dict(), as_json=output.as_json)
    if report.damage:
        raise typer.Exit(_DAMAGED)
    if report.is_lost:
        raise typer.Exit(_LOST)


@contextmanager
def _not_as_damage() -> Iterator[None]:
    """Raise `UserError` where the machine fails: the usual exit code would mean damage here."""
    try:
        yield
    except BrokenPipeError:
        raise
    except Exception as error:
        line = machine_failure(error)
        if line is None:
            raise
        raise UserError(line) from error


def _lines(report: "Report") -> list[str]:
    """Return the damage in short, oddities, and the verdict."""
    speed = f"{format_bytes(report.num_bytes / max(report.elapsed_s, 1e-9))}/s"
    size = f"{format_bytes(report.num_bytes)} in {plural(report.num_files, 'file')} read at {speed}"
    if not report.damage:
        return [*report.notes, f"{report.path}: sound; {size}; {_compared(report)}"]
    lines = list[str]()
    for damage in report.damage[:_SHOWN]:
        where = f"{damage.file}: {damage.tensor:.200}" if damage.tensor else damage.file
        lines.append(f"{where}: {damage.fault}")
    if rest := report.damage[_SHOWN:]:
        files = plural(len({damage.file for damage in rest}), "file")
        lines.append(f"and {len(rest):,} more, in {files}: --json has all")
    files = plural(len({damage.file for damage in report.damage}), "file")
    read = size if report.num_files else "no file was read"
    return [*lines, *report.notes, f"{report.path}: DAMAGED in {files}; {read}"]


def _compared(report: "Report") -> str:
    """Return the sums that the bits were compared with, and where checksums were written."""
    counts = {
        "as the hub has them": report.num_as_hub,
        "decoded, with the checksums of packing": report.num_decoded,
        f"as in {report.manifest.name}": report.num_as_before,
    }
    summary = ", ".join(f"{count} {label}" for label, count in counts.items() if count)
    written = f"checksums written to {report.manifest}" if report.is_written else ""
    if not summary:
        summary = "nothing to compare its bits with"
        if not report.is_written and not report.is_lost:
            written = "--write keeps checksums to compare them with next time"
    return "; ".join(filter(None, [summary, written]))
