"""`--pipeline` in words: how runs of a pipeline of stages follow each other.

    plain                     one token at a time, no guesses
    sync                      a tree of guesses, one run, wait for it: pipeline-parallel speculation
    async                     PipeInfer: guesses go on while runs are on their way
    async,rows=8,runs=3       rows of a run (sync: nodes of a tree), runs on their way at most
    async,cut=0.3/0.4/0.01    the paper's cut-off (start/recovery/decay) instead of a price
    async,no-cancel           an ablation: dead runs are computed to their end
    async,no-continuous       another: one large batch of guesses at a time instead of micro-batches

Invariant: none of it changes what is emitted. No torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from offload.config import require
from offload.errors import UserError

Mode = Literal["plain", "sync", "async"]
MOST_ROWS = 1024  # rows of a run, and runs on their way: what caches are planned for
_LEAST_DECAY = 0.001  # by which a cut falls in an attempt: from 1 to nothing in a thousand
_PAPER_ROWS, _SYNC_NODES = 4, 64
TIMED_ROWS, _FREE = (1, 4, 8, 16, 32), 1.15  # runs that are timed, and what they may take beside one row
_FORM = "plain, sync or async, then for example ,rows=8,runs=3,cut=0.3/0.4/0.01,no-cancel,no-continuous"


class PaperCut(NamedTuple):
    """Numbers of PipeInfer's cut-off on the draft's own chance of a token."""

    start: float
    recovery: float
    decay: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineOptions:
    """How runs follow each other. Raises `UserError` for what does not fit together."""

    mode: Mode = "async"
    cancels: bool = True
    is_continuous: bool = True
    credits: int | None = None  # runs on their way at most; None is one more than there are stages
    micro_batch: int | None = None  # rows of a run; None is what costs next to no time
    cut: PaperCut | None = None  # None is a price

    def __post_init__(self) -> None:
        require(self.mode in get_args(Mode), "`pipeline` must be plain, sync or async", repr(self.mode), f"try {_FORM}")
        for name, count in (("rows", self.micro_batch), ("runs", self.credits)):
            is_count = count is None or 1 <= count <= MOST_ROWS
            require(is_count, f"{name} of `pipeline` must be 1 to {MOST_ROWS}", count, "leave it out")
        for part in self.cut or ():
            rule = "start, recovery and decay of `pipeline` must lie in [0, 1]"
            require(0 <= part <= 1, rule, part, "try cut=0.3/0.4/0.01")  # which NaN does not
        falls = self.cut is None or self.cut.decay == 0 or self.cut.decay >= _LEAST_DECAY
        rule = f"decay of `pipeline` must be 0 or {_LEAST_DECAY} at least"
        require(falls, rule, self.cut and self.cut.decay, "try cut=0.3/0.4/0.01")
        for is_set, name, mode in (
            (self.credits is not None and self.mode != "async", "runs", "async"),
            (not self.cancels and self.mode != "async", "no-cancel", "async"),
            (not self.is_continuous and self.mode != "async", "no-continuous", "async"),
            (self.micro_batch is not None and self.mode == "plain", "rows", "sync or async"),
            (self.cut is not None and self.mode == "plain", "cut", "sync or async"),
        ):
            require(not is_set, f"{name} of `pipeline` goes with {mode}", self.mode, f"leave {name} out")

    @property
    def speculates(self) -> bool:
        """Whether a draft is asked at all."""
        return self.mode != "plain"

    def num_runs(self, num_stages: int) -> int:
        """Runs on their way at most: more than one per stage and one that waits only add latency."""
        return (self.credits or num_stages + 1) if self.mode == "async" else 1

    def num_rows(self, num_free: int = _PAPER_ROWS) -> int:
        """Rows of a run at most, where a stage computes `num_free` at next to no extra time."""
        if self.mode == "plain":
            return 1
        return self.micro_batch or (_SYNC_NODES if self.mode == "sync" else num_free)


def free_rows(seconds: Sequence[float]) -> int:
    """Rows that take next to no extra time, of runs of `TIMED_ROWS`, or of the first of these."""
    return max(rows for rows, took_s in zip(TIMED_ROWS, seconds, strict=False) if took_s <= _FREE * seconds[0])


def parse_pipeline(text: str) -> PipelineOptions:
    """`--pipeline`. Raises `UserError` for text that is none of the forms, and for what does not fit together."""
    mode, *settings = str(text).strip().lower().split(",")
    fields: dict[str, object] = {}
    for setting in settings:
        name, _, value = setting.strip().partition("=")
        is_new = name in _SETTINGS and _SETTINGS[name][0] not in fields
        require(is_new, "`pipeline` must be a mode and settings, each once", text, _FORM)
        field, read = _SETTINGS[name]
        try:
            fields[field] = read(value)
        except ValueError:
            raise UserError(f"{name} of `pipeline` cannot be {value!r:.80}: {_FORM}") from None
    return PipelineOptions(mode=mode, **fields)  # type: ignore[arg-type]


def _cut(value: str) -> PaperCut:
    start, recovery, decay = map(float, value.split("/"))
    return PaperCut(start, recovery, decay)


def _switched_off(value: str) -> bool:
    if value:
        raise ValueError
    return False


_SETTINGS: dict[str, tuple[str, Callable[[str], object]]] = {
    "rows": ("micro_batch", int),
    "runs": ("credits", int),
    "cut": ("cut", _cut),
    "no-cancel": ("cancels", _switched_off),
    "no-continuous": ("is_continuous", _switched_off),
}
