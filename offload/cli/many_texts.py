"""`offload generate` where it is asked for more than one text: what goes together, and what is read
before it loads.
"""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from offload.cli.batch_file import read_tasks, varied
from offload.cli.console import Console
from offload.cli.libraries import libraries
from offload.cli.rank_process import is_worker
from offload.cli.results_file import open_results
from offload.errors import UserError
from offload.units import require

if TYPE_CHECKING:
    from offload.engine.request import Request
    from offload.planning.options import LoadOptions

_SUFFIX = ".jsonl"


class ManyWishes(NamedTuple):
    """What is asked for beside one text."""

    prompts: Path | None  # a file of many
    out: Path | None
    num_samples: int
    system: str | None  # told before every prompt

    @classmethod
    def of(
        cls,
        prompt: str | None,
        file: Path | None,
        out: Path | None,
        num_samples: int,
        session: Path | None,
        system: str | None = None,
    ) -> "ManyWishes":
        """Many prompts are in a file whose name says so. Raises `UserError` for what does not go
        together.
        """
        prompts = file if file is not None and file.suffix == _SUFFIX else None
        if prompts is not None and prompt is not None:
            raise UserError("-p and -f exclude each other: give one of them")
        rule = f"`out` is for results of many prompts, -f FILE{_SUFFIX}"
        require(
            out is None or prompts is not None,
            rule,
            file or "one prompt",
            "leave it out, stdout has the text",
        )
        is_one = prompts is None and num_samples == 1
        rule = "`session` keeps one text"
        got = "many prompts" if prompts else f"`samples` {num_samples}"
        require(is_one or session is None, rule, got, "leave one of them out")
        return cls(prompts, out, num_samples, system)

    @property
    def are_wished(self) -> bool:
        return self.prompts is not None or self.num_samples > 1


def write_many(
    model: str,
    draft: str | None,
    options: "LoadOptions",
    console: Console,
    common: "Request",
    many: ManyWishes,
    *,
    note: str,
    as_json: bool,
) -> None:
    """Write all that is wished; `common` has the settings of all, and the prompt of samples.

    Raises `UserError` before anything is loaded, `RunError` in the end where prompts have failed.
    """
    # a worker reads nothing, and serves whatever it is
    if many.prompts is None or is_worker(options.ranks):
        requests = [*varied(common, many.num_samples)]
        with libraries(console):
            from offload.cli.batch_run import Loading, write_samples

            write_samples(Loading(model, draft, options, note), console, requests, as_json=as_json)
        return
    written_by = f"{options.dtype} {options.rule} {options.lenience:g}"
    console.wait("reading prompts")
    tasks = read_tasks(many.prompts, common, many.num_samples, written_by, many.system)
    with open_results(many.out, tasks, many.prompts, console.text) as results, libraries(console):
        from offload.cli.batch_run import Loading, write_batch

        write_batch(Loading(model, draft, options, note), console, tasks, results)
