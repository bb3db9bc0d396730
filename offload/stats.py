"""Figures of a run: what it moved, waited for and accepted, in counts, bytes and seconds.

Nothing that follows from other figures is stored.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import add, sub
from typing import NamedTuple

from offload.threads import StepModes

# figures that `--json` has by their own names
_TOLD = (
    *("num_sweeps", "tokens_per_sweep", "ttft_s", "tpot_s", "sweep_s", "draft_s", "verify_s"),
    *("stall_s", "bytes_streamed", "link_bytes_per_s", "peak_rss_bytes", "peak_device_bytes"),
    "accepted_per_sweep",
)


@dataclass(slots=True)
class RunningMean:
    """The mean of numbers that arrive one by one, with its standard error."""

    count: int = 0
    total: float = 0.0
    total_squares: float = 0.0

    def add(self, values: Iterable[float]) -> None:
        """Add more numbers."""
        for value in values:
            self.count += 1
            self.total += value
            self.total_squares += value * value

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    @property
    def standard_error(self) -> float | None:
        """As if the numbers were independent; None for fewer than two."""
        if self.count < 2:
            return None
        spread = max(0.0, self.total_squares - self.total * self.total / self.count)
        return math.sqrt(spread / (self.count - 1) / self.count)

    def as_dict(self) -> dict[str, object]:
        """Return the figures under the names of `--json`."""
        error = self.standard_error
        return {"mean": self.mean, "standard_error": error, "num_positions": self.count}


class RankFigures(NamedTuple):
    """Bytes moved and held by a rank since it loaded; two of them give an interval by difference."""

    ram_bytes: int  # the budget
    own_bytes: int  # what Python and its libraries took before loading
    peak_rss_bytes: int
    num_passes: int
    num_rows: int  # of all passes
    pass_bytes: int  # layers that one pass streams, by the plan
    bytes_streamed: int
    stall_s: float  # compute waited for the link
    row_bytes: int  # sent in exchanges for every row, by the formula
    # by type of order; `broadcast` and `gather` are exchanges
    bytes_sent: dict[str, int]
    exchange_s: float  # including waits for slower ranks


class Transfers(NamedTuple):
    """What passes moved and waited for."""

    num_bytes: int = 0
    stall_s: float = 0.0  # seconds that compute waited for the link
    expert_hits: int = 0  # requested experts that were in the pool
    expert_misses: int = 0
    reading_s: float = 0.0  # seconds of disk reading if the disk is the link; else 0

    def since(self, before: "Transfers") -> "Transfers":
        """Return the difference from an earlier moment."""
        return Transfers(*map(sub, self, before))

    def and_more(self, other: "Transfers") -> "Transfers":
        """Return the sum of both."""
        return Transfers(*map(add, self, other))


@dataclass(slots=True, repr=False)
class Stats:
    """Figures of one generation; times and bytes without the prompt's sweep, see `ttft_s`."""

    num_prompt_tokens: int = 0
    num_kept_tokens: int = 0  # prompt tokens whose keys and values were kept from the last run
    num_new_tokens: int = 0
    num_first_tokens: int = 0  # new tokens from the prompt's own sweep
    num_sweeps: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0  # from the first tokens to the last
    draft_s: float = 0.0
    sweep_s: float = 0.0
    verify_s: float = 0.0
    stall_s: float = 0.0  # part of sweep_s in which compute waited for the link
    bytes_streamed: int = 0
    expert_hits: int = 0  # see `Transfers`
    expert_misses: int = 0
    peak_rss_bytes: int = 0
    peak_device_bytes: int = 0
    threads: StepModes | None = None  # of the last step
    tree_num_nodes: int = 1
    tree_depth: int = 0
    is_tree_dynamic: bool = False  # if so, size and depth are bounds
    # new tokens of each sweep after the prompt's
    accepted_per_sweep: list[int] = field(default_factory=list)
    # chance that a node's first guess is accepted
    first_guess: RunningMean = field(default_factory=RunningMean)
    # with a pipeline: see `RunEvent`
    runs: list[tuple[float, str, int, int]] = field(default_factory=list)
    # whether verification knew the draft's q, so that `first_guess` is alpha
    is_draft_known: bool = True

    def __repr__(self) -> str:
        return (
            f"Stats({self.num_new_tokens} tokens, the first after {self.ttft_s:.2f} s; "
            f"{self.tokens_per_s:.2f} tokens/s, {self.tokens_per_sweep:.2f} tokens per sweep\n"
            f"  {self.decode_s:.2f} s: {self.draft_s:.2f} drafting, {self.sweep_s:.2f} in sweeps, of these "
            f"{self.stall_s:.2f} waiting for the link, {self.verify_s:.2f} verifying\n"
            f"  {self.bytes_streamed / 1e9:.2f} GB streamed at {self.link_bytes_per_s / 1e9:.2f} GB/s, "
            f"peak memory {self.peak_rss_bytes / 2**30:.2f} GiB)"
        )

    def begin_decoding(self, num_first_tokens: int, ttft_s: float) -> None:
        """End the prompt's sweep: its time only counts as time to the first token."""
        self.num_first_tokens = num_first_tokens
        self.ttft_s = ttft_s
        self.num_sweeps = self.bytes_streamed = self.expert_hits = self.expert_misses = 0
        self.draft_s = self.sweep_s = self.verify_s = self.stall_s = 0.0

    def add_step(
        self, moved: Transfers, *, draft_s: float, sweep_s: float, verify_s: float
    ) -> None:
        """Add one more sweep and what surrounded it."""
        self.num_sweeps += 1
        self.draft_s += draft_s
        self.sweep_s += sweep_s
        self.verify_s += verify_s
        self.bytes_streamed += moved.num_bytes
        self.stall_s += moved.stall_s
        self.expert_hits += moved.expert_hits
        self.expert_misses += moved.expert_misses

    @property
    def alpha(self) -> RunningMean | None:
        """E[sum of min(p, q)] over verified positions; None without any, or the draft's q."""
        return self.first_guess if self.is_draft_known and self.first_guess.count else None

    @property
    def expert_hit_rate(self) -> float | None:
        """Share of requested experts that were there; None without requests."""
        asked = self.expert_hits + self.expert_misses
        return self.expert_hits / asked if asked else None

    @property
    def tokens_per_sweep(self) -> float:
        """Return the new tokens per sweep, without the prompt's sweep."""
        return sum(self.accepted_per_sweep) / self.num_sweeps if self.num_sweeps else 0.0

    @property
    def tpot_s(self) -> float:
        """Return the seconds per new token after the first ones."""
        num_later = self.num_new_tokens - self.num_first_tokens
        return self.decode_s / num_later if num_later > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.tpot_s if self.tpot_s else 0.0

    @property
    def link_bytes_per_s(self) -> float:
        """Return the bytes streamed per second of decoding, drafting included."""
        return self.bytes_streamed / self.decode_s if self.decode_s else 0.0

    def as_dict(self) -> dict[str, object]:
        """Return the figures under the names of `--json`."""
        figures: dict[str, object] = {name: getattr(self, name) for name in _TOLD}
        figures["alpha"] = self.alpha and self.alpha.as_dict()
        figures["first_guess"] = self.first_guess.as_dict()
        if self.runs:
            figures["runs"] = self.runs
        if self.expert_hit_rate is not None:
            figures["expert_hits"] = self.expert_hits
            figures["expert_misses"] = self.expert_misses
        figures["threads"] = None
        if self.threads is not None:
            modes = self.threads._asdict().items()
            figures["threads"] = {name: mode._asdict() for name, mode in modes}
        figures["tree"] = {
            "num_nodes": self.tree_num_nodes,
            "depth": self.tree_depth,
            "is_dynamic": self.is_tree_dynamic,
        }
        return figures
