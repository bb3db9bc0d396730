"""One runner of all benches: flags, models, turns, proof, table, checks, picture, result.

A bench is a function of a `Bench` and of the flags that it alone has; it returns its `Findings`.

Invariant: what `--compare` or `--json` could refuse is refused before anything is measured; no
figure is printed before every token was proved; with `--rows` a row is on disk when it is known.
"""

import inspect
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from offload.bench.harness.gate import Written
from offload.bench.harness.models import PRETEND, find_setting, place_of, synthetic_setting
from offload.bench.harness.picture import require_pictures
from offload.bench.harness.prompts import Prompt, prompts
from offload.bench.harness.rates import PLAIN_READER, plain_read_s
from offload.bench.harness.record import (
    STDOUT,
    ProcessorClock,
    Result,
    add_row,
    is_worse,
    read,
    require_same,
    store,
    writable,
)
from offload.bench.harness.setting import Need, Setting
from offload.bench.harness.tables import Column, Guard, Row, Screen, say_checks, say_table
from offload.calibration.link import device_link_bytes_per_s
from offload.errors import UserError
from offload.memory.plan import MemoryPlan
from offload.rank_roles import find_place

Thing = TypeVar("Thing")


def flag(metavar: str | None, help_text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=help_text, **settings)


def shared(
    metavar: str | None, help_text: str, *names: str, default: Any = None, **settings: Any
) -> Any:
    return field(default=default, metadata={"option": flag(metavar, help_text, *names, **settings)})


def _json_file(path: Path | None) -> Path | None:
    return path if path == STDOUT else writable(path)


_SOURCES = "code, copy, or a text or .jsonl file; several"
_DEVICES = f"auto, cpu, cuda, cuda:N, or {PRETEND}, to rehearse"
_LAYERS = "instead: so many layers of a synthetic Llama-2-70B, made in memory"
_ROWS = "append each row when it is known, one JSON object a line"
_JSON = "store the result; '-': print it, as is done where no terminal is"
_COMPARE = "flag what is slower than there beyond noise; exits with 1"


@dataclass(frozen=True, kw_only=True)
class Given:
    """The flags that several benches have; where a bench lacks one, it has the default."""

    model: str | None = shared(
        "MODEL", "target; default: the packaged one, inflated", "--model", "-m"
    )
    draft: str | None = shared("MODEL", "small model with the same vocabulary", "--draft", "-d")
    size: str = shared("SIZE", "how large to make the packaged target", default="2GB")
    layers: int | None = shared("N", _LAYERS)
    device: str = shared("DEVICE", _DEVICES, default="auto")
    gpu_mem: str | None = shared("SIZE", "memory budget on the GPU, such as 24GiB")
    ram: str | None = shared("SIZE", "memory budget; default: a quarter of the target")
    ranks: str | None = shared("ROLES", "of offload launch: shards", envvar="OFFLOAD_RANKS")
    source: list[str] | None = shared("SET", _SOURCES, "--prompts")
    num_prompts: int | None = shared("N", "of every set", min=1)
    max_tokens: int | None = shared("N", "new ones per prompt", "-n", "--max-tokens", min=2)
    picture: Path | None = shared("FILE", "draw what was measured", callback=writable)
    quick: bool = shared(None, "some minutes on two cores, larger errors", "--quick", default=False)
    rows_file: Path | None = shared("FILE", _ROWS, "--rows", callback=writable)
    json_file: Path | None = shared("FILE", _JSON, "--json", callback=_json_file)
    compare: Path | None = shared("OLD.json", _COMPARE)


# in the order of writing
_WRITTEN = {"rows_file": "rows", "picture": "picture", "json_file": "json"}
# names of several of these flags
_GROUPS = {"models": "model draft size layers", "place": "device gpu_mem ram"}
_USUAL = Need()
# bytes of one reading of the link
CEILING_BYTES = 400_000_000


@dataclass(kw_only=True)
class Findings:
    """What a bench has found: the runner proves, shows and keeps it."""

    rows: Sequence[Row]
    # beside those that it began with
    settings: Row = field(default_factory=dict)
    # what nothing can be faster than; by default the link, as it was at the start
    ceiling: Row | None = None
    tables: Sequence[tuple[Sequence[Column], Sequence[Row]]] = ()
    # texts to be proved
    written: Sequence[Written] = ()
    # figures beside what was wanted of them, see `tables.check`
    checks: Sequence[Row] = ()
    guards: Mapping[str, Guard] = field(default_factory=dict)
    # lines behind the tables
    notes: Sequence[str] = ()
    # draws the picture where it is asked for, with the settings
    draw: Callable[[Row, Path], None] | None = None
    # exit with 1
    has_failed: bool = False

    def add(self, rows: Sequence[Row], columns: Sequence[Column]) -> None:
        """Add rows with a table of their own."""
        self.rows = [*self.rows, *rows]
        self.tables = [*self.tables, (columns, rows)]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured; a bench reads of it what it needs."""

    num_prompts: int = 1
    # new ones of every text with a tree
    num_tokens: int = 0
    # ... of one without, whose passes are all alike
    num_plain: int = 0
    rounds: int = 1
    trees: tuple[str, ...] = ()
    # after which a run is cut
    limit_s: float = math.inf

    def length(self, tree: str) -> int:
        return self.num_plain if tree == "none" else self.num_tokens


class Bench:
    def __init__(self, name: str, given: Given, resources: ExitStack) -> None:
        self.name = name
        self.given = given
        self.quick = given.quick
        self._resources = resources
        self._clock = ProcessorClock()
        self._noted = list[Row]()
        self._setting: Setting | None = None
        self._settings: Row = {}
        self.ceiling: Row = {}
        self._check_files()
        # other ranks follow the first until it ends, and end then
        place = None if given.ranks is None else find_place()
        self.screen = Screen(is_quiet=place is not None and place.rank > 0)
        self._old = None if given.compare is None else read(given.compare)
        if self._old is not None:
            require_same(self._old, name, {})
        if given.picture is not None:
            require_pictures(given.picture)

    def _check_files(self) -> None:
        """Raise `UserError` where one file would be written over by another."""
        known = dict[Path, str]()
        for name, word in _WRITTEN.items():
            path: Path | None = getattr(self.given, name)
            if path is None or path == STDOUT:
                continue
            other = known.setdefault(path.absolute(), word)
            if other != word:
                requirement = f"--{other} {path} would be written over by --{word} {path}"
                raise UserError(f"{requirement}: name another file")

    def effort(self, full: Thing, quick: Thing) -> Thing:
        """Return one of both, with as many prompts as are asked for where a flag says so."""
        effort = quick if self.quick else full
        if self.given.num_prompts is not None and isinstance(effort, Effort):
            effort = replace(effort, num_prompts=self.given.num_prompts)
        return effort

    def setting(
        self,
        *,
        needs_draft: bool = False,
        need: Need = _USUAL,
        size: str | None = None,
        ram: str | None = None,
    ) -> Setting:
        """Return the models and the place that the flags name. Raises `UserError`.

        A budget that is not given has room for what is needed.
        """
        given = self.given
        ram = ram or given.ram
        place = place_of(given.device, given.gpu_mem)
        if given.layers is not None and (given.model or given.draft):
            requirement = "--layers makes the models"
            raise UserError(f"{requirement}: leave out --model and --draft, or leave it out")
        with self.screen as screen:
            if given.layers is not None:
                synthetic = synthetic_setting(given.layers, ram, place["opened"])
                setting = self._resources.enter_context(synthetic)
            else:
                size = size or given.size
                setting = find_setting(given.model, given.draft, size, ram, screen, need)
        if needs_draft and setting.draft is None:
            raise UserError(f"bench {self.name} compares trees, which a draft fills: give --draft")
        return setting._replace(ranks=given.ranks, **place)

    def prompts(
        self, num_each: int, part: slice = slice(None), sources: Sequence[str] = ("code",)
    ) -> list[Prompt]:
        """Return the prompts that the flags name, or those of `sources`; the result tells them."""
        chosen = prompts(self.given.source or sources, num_each, part)
        self._settings["prompts"] = [prompt.name for prompt in chosen]
        return chosen

    def begin(self, setting: Setting, **settings: object) -> None:
        """Say the ceiling, once a stored result can be compared with these models and settings.

        The result has them. What is sent to a device depends on a plan, see `say_link`. Raises
        `UserError`.
        """
        self._setting = setting
        self._settings |= settings
        if self._old is not None:
            require_same(self._old, self.name, {**setting.as_dict(), **self._settings})
        if not setting.opened.has_own_memory:
            self.say_link(setting)

    def say_link(self, setting: Setting, plan: MemoryPlan | None = None) -> None:
        """Print what nothing can be faster than: a plain reader, or a plan's copies to a device.

        With a plan it is said for a device only: on the host it was said before.
        """
        if plan is not None and not setting.opened.has_own_memory:
            return
        label = PLAIN_READER if plan is None else f"layers to {setting.device}"
        rate = link_ceiling(setting, plan)
        rate_words = "nothing is streamed" if rate is None else f"{rate / 1e9:.3f} GB/s"
        print(f"ceiling: {label}, {rate_words}", flush=True)
        self.ceiling = {"bytes_per_s": rate}

    def turns(
        self, rounds: Iterable[Thing], cases: Sequence[Any], label: str
    ) -> Iterator[tuple[Thing, Any]]:
        """Yield every case in every round: what drifts is shared by all of them."""
        every = [*rounds]
        for number, item in enumerate(every):
            for at, case in enumerate(cases):
                self.screen.count(number * len(cases) + at, len(every) * len(cases), label)
                yield item, case

    def row(self, row: Row) -> Row:
        """Keep a row on disk, once, whatever happens next; return it."""
        if not any(row is noted for noted in self._noted):
            self._noted.append(row)
            self._add(row)
        return row

    def note(self, row: Row) -> None:
        """Keep a row on disk before its tokens are proved; the proved one comes at the end."""
        self._add({**row, "is_proved": False})

    def _add(self, row: Row) -> None:
        if self.given.rows_file is not None:
            add_row(self.given.rows_file, {"bench": self.name, **row})

    def finish(self, findings: Findings) -> None:
        """Prove, show, store and compare; exits with 1 if anything has failed or is slower."""
        proof = None
        if findings.written:
            assert self._setting is not None, "an original proves the texts"
            with self.screen:
                self.screen.wait("proving every token")
                proof = self._setting.prove(findings.written)
        rows = [self.row(row) for row in findings.rows]
        for columns, shown in findings.tables:
            if shown:
                say_table(columns, shown)
        print(*findings.notes, sep="\n", end="\n" if findings.notes else "")
        guards = {**findings.guards, **say_checks(findings.checks)}
        models = {} if self._setting is None else self._setting.as_dict()
        settings = {**models, **self._settings, **findings.settings, "quick": self.quick}
        if findings.draw is not None and self.given.picture is not None:
            findings.draw(settings, self.given.picture)
        if proof is not None:
            print(proof.line)
            settings["proof"] = proof._asdict()
        ceiling = self.ceiling if findings.ceiling is None else findings.ceiling
        # what was said at the start was one more reading, and a link's speed changes
        if "samples" in ceiling:
            rate_words = f"{ceiling['bytes_per_s'] / 1e9:.3f} GB/s, by {len(ceiling['samples'])}"
            print(f"ceiling: {rate_words} readings since then")
        result = Result(
            bench=self.name,
            settings=settings,
            ceiling=ceiling,
            rows=rows,
            guards={name: guard for name, guard in guards.items() if guard.samples},
        )
        others = self._clock.others_share()
        print(f"others took {others:.2f} of the processors' time")
        result.machine["others_cpu_share"] = others
        self._store(result.as_dict())
        has_failed = findings.has_failed
        if self._old is not None and is_worse(self._old, result):
            has_failed = True
        self._print(result.as_dict())
        if has_failed:
            raise typer.Exit(1)

    def end(self, result: Row) -> None:
        """Print the last line of a command with an object of its own, stored with `--json`."""
        self._store(result)
        self._print(result)

    def _store(self, result: Row) -> None:
        if self.given.json_file not in (None, STDOUT):
            store(result, self.given.json_file)

    def _print(self, result: Row) -> None:
        """Print kilobytes of JSON, unless a person looks on who has not asked for them."""
        if self.given.json_file == STDOUT or not sys.stdout.isatty():
            print(json.dumps(result), flush=True)


def command(
    name: str, *shared: str, examples: Sequence[str] = ()
) -> Callable[[Callable[..., Findings | None]], Callable[..., None]]:
    """Make `main(bench, own flags)` the command `offload bench NAME`, with these flags of `Given`."""
    words = " ".join((*shared, "rows_file json_file")).split()
    names = " ".join(_GROUPS.get(word, word) for word in words).split()
    given_flags = {field.name: field for field in fields(Given)}

    def wrap(main: Callable[..., Findings | None]) -> Callable[..., None]:
        own_parameters = list(inspect.signature(main, eval_str=True).parameters.values())[1:]

        @wraps(main)
        def run(**given: Any) -> None:
            mine = {parameter.name: given.pop(parameter.name) for parameter in own_parameters}
            with ExitStack() as resources:
                # what has no flag for it computes on the host
                bench = Bench(name, Given(**{"device": "cpu", **given}), resources)
                findings = main(bench, **mine)
                if findings is not None:
                    bench.finish(findings)

        kind = inspect.Parameter.KEYWORD_ONLY
        both = [parameter.replace(kind=kind) for parameter in own_parameters]
        for each in names:
            shared_flag = given_flags[each]
            annotation = Annotated[shared_flag.type, shared_flag.metadata["option"]]  # type: ignore[name-defined]
            both.append(
                inspect.Parameter(each, kind, default=shared_flag.default, annotation=annotation)
            )
        run.__signature__ = inspect.Signature(both)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in both}
        run.epilog = "\n\n".join(["Examples:", *examples]) if examples else None  # type: ignore[attr-defined]
        del run.__wrapped__
        return run

    return wrap


def one_of(names: Iterable[str], known: Iterable[str], flag: str) -> None:
    known = list(known)
    if unknown := [name for name in names if name not in known]:
        requirement = f"{flag} must be one of {', '.join(known)}, got {unknown[0]!r}"
        raise UserError(f"{requirement}: leave it out for all")


def link_ceiling(setting: Setting, plan: MemoryPlan | None) -> float | None:
    """Return bytes per second of a plain reader, or of a plan's copies to a device.

    It is None where the plan streams nothing, or layers are made where they are computed: then no
    link is a ceiling.
    """
    if plan is not None and not plan.is_streamed:
        return None
    if not setting.opened.has_own_memory:
        return None if setting.is_synthetic else plain_rate(setting)
    assert plan is not None, "what is sent to a device depends on its plan"
    is_read = plan.disk_streamed_bytes and not setting.is_synthetic
    disk = plain_rate(setting) if is_read else math.inf
    return device_link_bytes_per_s(setting.opened, plan, setting.shards, disk_bytes_per_s=disk)


def plain_rate(setting: Setting) -> float:
    return CEILING_BYTES / plain_read_s(setting.shards, CEILING_BYTES)
