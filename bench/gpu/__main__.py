"""The minutes that one has with a GPU, spent in order of value.

    python3 -m offload.bench.gpu --out first --budget 560
    python3 -m offload.bench.gpu --out second --budget 560 --resume first/rows.jsonl

From a checkout with what the image has, nothing installed. Every row is on disk as it is measured,
whatever is killed.
"""

import argparse
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from offload.bench.gpu.runner import Files, Step, all_steps, run_steps, write_summary

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(
    arguments: Sequence[str] | None = None, find_steps: Callable[[bool], Sequence[Step]] = all_steps
) -> int:
    """Run the steps and print the summary; the exit status is 130 after Ctrl-C or SIGTERM."""
    names = [step.name for step in find_steps(False)]
    parser = argparse.ArgumentParser(
        prog="python3 -m offload.bench.gpu", description=__doc__.partition("\n")[0]
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="for rows, summary and log")
    add("--budget", type=float, default=560.0, metavar="S", help="seconds for all steps together")
    add("--steps", nargs="+", choices=names, default=names, help="these alone")
    add("--resume", type=Path, metavar="FILE", help="a rows.jsonl: what is done is not repeated")
    add("--rehearse", action="store_true", help="on a device that is the host: whether steps run")
    options = parser.parse_args(arguments)
    steps = find_steps(options.rehearse)
    files = Files(options.out.absolute())
    if refusal := _prepare(files, options.resume):
        print(f"error: {refusal}", file=sys.stderr)
        return EXIT_USAGE
    # Shells start background jobs with SIGINT ignored, and children would inherit that.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        run_steps([step for step in steps if step.name in options.steps], files, options.budget)
        return 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        print(write_summary(steps, files), end="", flush=True)


def _prepare(files: Files, resumed: Path | None) -> str | None:
    """Bring the rows of an earlier run along; return what the user must mend."""
    if resumed is not None and not resumed.is_file():
        return f"--resume {resumed} is no file: name the rows.jsonl of an earlier run"
    is_same = resumed is not None and files.rows.exists() and resumed.samefile(files.rows)
    if files.rows.exists() and not is_same:
        return f"--out {files.folder} holds the rows of another run: name another folder, or --resume {files.rows}"
    files.folder.mkdir(parents=True, exist_ok=True)
    if resumed is not None and not is_same:
        shutil.copyfile(resumed, files.rows)
    return None


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
