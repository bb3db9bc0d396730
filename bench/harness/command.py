"""How commands of `offload bench` begin and end: shared flags, models, proof, result.

A command is a function of a `Bench` and of the flags that it alone has.

Invariant: what `--compare` or `--json` could refuse is refused before anything is measured, and
with `--rows` a row is on disk when it is known.
"""

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from offload.bench.harness.compare import changes, require_same, tell
from offload.bench.harness.gate import Proof, Written
from offload.bench.harness.plain_reader import Reading, plain_rate
from offload.bench.harness.prompts import Prompt, prompts
from offload.bench.harness.record import STDOUT, Guard, Row, new_result, read, store, writable
from offload.bench.harness.row_log import add_row
from offload.bench.harness.setting import (
    CEILING_BYTES,
    Need,
    Setting,
    find_setting,
    place_of,
    synthetic_setting,
)
from offload.cli import flags
from offload.cli.console import Console
from offload.cli.rank_process import is_worker
from offload.errors import UserError
from offload.memory.plan import MemoryPlan


def _flag(kind: Any, told: str, *names: str, default: Any = None, **more: Any) -> tuple[Any, Any]:
    return Annotated[kind, typer.Option(*names, help=told, **more)], default


_TO_WRITE: dict[str, Any] = {"metavar": "FILE", "callback": writable}
# name: how the flag is given, and its default
_FLAGS: dict[str, tuple[Any, Any]] = {
    "model": _flag(
        str | None, "target; default: the packaged one, inflated", "--model", "-m", metavar="MODEL"
    ),
    "draft": _flag(
        str | None, "small model with the same vocabulary", "--draft", "-d", metavar="MODEL"
    ),
    "size": _flag(str, "how large to make the packaged target", metavar="SIZE", default="2GB"),
    "layers": _flag(
        int | None,
        "instead: so many layers of a synthetic Llama-2-70B, made in memory",
        metavar="N",
    ),
    "device": _flag(
        str, "auto, cpu, cuda, cuda:N, or pretend, to rehearse", metavar="DEVICE", default="auto"
    ),
    "gpu_mem": (flags.GpuMem, None),
    "ram": _flag(str | None, "memory budget; default: a quarter of the target", metavar="SIZE"),
    "ranks": _flag(
        str | None, "of offload launch: shards", metavar="ROLES", envvar="OFFLOAD_RANKS"
    ),
    "source": _flag(
        list[str] | None,
        "code, copy, or a text or .jsonl file; several",
        "--prompts",
        metavar="SET",
    ),
    "quick": _flag(
        bool, "up to four minutes on two cores, larger errors", "--quick", default=False
    ),
    "rows_file": _flag(
        Path | None,
        "append each row when it is known, one JSON object a line",
        "--rows",
        **_TO_WRITE,
    ),
    "json_file": _flag(
        Path | None,
        "store the result; '-': print it, as is done where no terminal is",
        "--json",
        **_TO_WRITE,
    ),
    "compare": _flag(
        Path | None, "flag what is slower than there beyond noise; exits with 1", metavar="OLD.json"
    ),
}
MODELS = "model draft size layers"
PLACE = "device gpu_mem ram"
ENDS = "rows_file json_file"
_USUAL = Need()
# takes how many are done, how many in all, and what
Tell = Callable[[int, int, str], None]


class Bench:
    """One command under way."""

    def __init__(self, name: str, given: Mapping[str, Any], resources: ExitStack) -> None:
        self.name = name
        self._given = given
        self._resources = resources
        self.quick: bool = given.get("quick", False)
        self.json_file: Path | None = given.get("json_file")
        self.screen = Console(is_quiet=is_worker(given.get("ranks")))
        self._old = None if given.get("compare") is None else read(given["compare"])
        if self._old is not None:
            require_same(self._old, name, {})

    def given(self, name: str) -> Any:
        return self._given[name]

    def setting(self, *, needs_draft: bool = False, need: Need = _USUAL) -> Setting:
        """Return the models and the place that the flags name. Raises `UserError`.

        A budget that is not given has room for what is needed.
        """
        ask = self._given.get
        device = self._given.get("device", "cpu")
        place = place_of(device, ask("gpu_mem"))
        with self.screen:
            if ask("layers") is not None and (ask("model") or ask("draft")):
                raise UserError(
                    "--layers makes the models: leave out --model and --draft, or leave it out"
                )
            if ask("layers") is not None:
                setting = self._resources.enter_context(
                    synthetic_setting(ask("layers"), ask("ram"), place["opened"])
                )
            else:
                setting = find_setting(
                    ask("model"), ask("draft"), ask("size") or "2GB", ask("ram"), self.screen, need
                )
        if needs_draft and setting.draft is None:
            raise UserError(f"bench {self.name} compares trees, which a draft fills: give --draft")
        return setting._replace(ranks=ask("ranks"), **place)

    def prompts(self, num_each: int) -> tuple[list[Prompt], list[str]]:
        """Return prompts of the sets that were asked for, and their names."""
        found = prompts(self._given.get("source") or ["code"], num_each)
        return found, [prompt.name for prompt in found]

    def check_same(self, setting: Setting, **others: object) -> None:
        """Refuse, before anything is measured, what could not be compared. Raises `UserError`."""
        if self._old is not None:
            require_same(self._old, self.name, {**setting.as_dict(), **others})

    def row(self, row: Row) -> Row:
        """Keep a row on disk, whatever happens next; return it."""
        if self._given.get("rows_file") is not None:
            add_row(self._given["rows_file"], {"bench": self.name, **row})
        return row

    def finish(
        self,
        rows: Sequence[Row],
        *,
        settings: Row,
        ceiling: Row,
        guards: Mapping[str, Guard] | None = None,
        proof: Proof | None = None,
    ) -> None:
        """Store, compare, and end with one JSON line where no person reads it.

        Exits with 1 if slower beyond noise.
        """
        if proof is not None:
            print(proof_line(proof))
            settings = {**settings, "proof": proof._asdict()}
        settings = {**settings, "quick": self.quick}
        # what was said at the start was one more reading, and a link's speed changes
        if "samples" in ceiling:
            print(
                f"ceiling: {ceiling['bytes_per_s'] / 1e9:.3f} GB/s, by {len(ceiling['samples'])} readings since then"
            )
        result = new_result(
            self.name, settings=settings, ceiling=ceiling, rows=rows, guards=guards or {}
        )
        self._store(result.as_dict())
        found = [] if self._old is None else changes(self._old, result)
        if self._old is not None:
            tell(self._old, result, found)
        self._print(result.as_dict())
        if any(one.is_worse for one in found):
            raise typer.Exit(1)

    def end(self, found: Row) -> None:
        """Print the last line of a command with an object of its own, stored with `--json`."""
        self._store(found)
        self._print(found)

    def _store(self, found: Row) -> None:
        if self.json_file is not None and self.json_file != STDOUT:
            store(found, self.json_file)

    def _print(self, found: Row) -> None:
        """Print kilobytes of JSON, unless a person looks on who has not asked for them."""
        if self.json_file == STDOUT or not sys.stdout.isatty():
            print(json.dumps(found), flush=True)

    def prove(self, setting: Setting, written: Sequence[Written]) -> Proof:
        """Prove all tokens, with a line on the screen."""
        with self.screen:
            self.screen.wait("proving every token")
            return setting.prove(written)


def command(
    name: str, *shared: str, examples: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make `main(bench, own flags)` the command `offload bench NAME`.

    These flags of `_FLAGS` come before its own.
    """
    names = [*" ".join((*shared, ENDS)).split()]

    def wrap(main: Callable[..., None]) -> Callable[..., None]:
        @wraps(main)
        def run(**given: Any) -> None:
            own = {key: given.pop(key) for key in list(given) if key not in names}
            with ExitStack() as resources:
                main(Bench(name, given, resources), **own)

        own = list(inspect.signature(main, eval_str=True).parameters.values())[1:]
        kind = inspect.Parameter.KEYWORD_ONLY
        common = [
            inspect.Parameter(n, kind, default=_FLAGS[n][1], annotation=_FLAGS[n][0]) for n in names
        ]
        both = [*(one.replace(kind=kind) for one in own), *common]
        run.__signature__ = inspect.Signature(both)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in both}
        run.epilog = "\n\n".join(["Examples:", *examples]) if examples else None  # type: ignore[attr-defined]
        del run.__wrapped__
        return run

    return wrap


def say_nothing(done: int, total: int, label: str) -> None:
    """Do nothing: a listener without a screen."""


def say_ceiling(text: str, rate: float) -> float:
    print(f"ceiling: {text}, {rate / 1e9:.3f} GB/s", flush=True)
    return rate


def say_link(setting: Setting) -> float:
    return say_ceiling(Reading().label, plain_rate(setting.shards, CEILING_BYTES))


def say_floor(setting: Setting, plan: MemoryPlan | None = None) -> None:
    """Print a place's ceiling at the start: on a CPU before opening, on a device with its plan."""
    if setting.opened is None and plan is None:
        say_link(setting)
    elif setting.opened is not None and plan is not None:
        say_ceiling(f"layers to {setting.device}", setting.ceiling(plan))


def say_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, first column to the left; shorter rows end in a note that stands as it is."""
    lines = [head, *rows]
    widths = [max(len(row[i]) for row in lines if len(row) == len(head)) for i in range(len(head))]
    widths[0] = max(len(row[0]) for row in lines)
    for first, *others in lines:
        figures = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=False)]
        print(
            "  ".join(
                [first.ljust(widths[0]), *(figures if len(figures) == len(head) - 1 else others)]
            ).rstrip()
        )


def one_of(names: Iterable[str], known: Iterable[str], flag: str) -> None:
    """Refuse a name that is not known. Raises `UserError`."""
    known = list(known)
    if unknown := [name for name in names if name not in known]:
        raise UserError(
            f"{flag} must be one of {', '.join(known)}, got {unknown[0]!r}: leave it out for all"
        )


def proof_line(proof: Proof) -> str:
    told = f"{proof.num_exact} tokens are the reference's own draw in float32, {proof.num_near} within bf16 rounding"
    others = (
        f"; {proof.num_by_law} follow its distribution, {proof.sigmas:+.1f} standard errors off"
    )
    return f"gate: {told}{others if proof.num_by_law else ''}"
