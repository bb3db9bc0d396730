"""What a run has moved, waited for and accepted: counts, bytes and seconds, nothing derived is
stored.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from offload.threads import StepModes


@dataclass(slots=True)
class RunningMean:
    """A mean of numbers that come one by one, and how far it is to be trusted."""

    count: int = 0
    total: float = 0.0
    total_squares: float = 0.0

    def add(self, values: Iterable[float]) -> None:
        """More of them."""
        for value in values:
            self.count, self.total = self.count + 1, self.total + value
            self.total_squares += value * value

    def __add__(self, other: "RunningMean") -> "RunningMean":
        sums = self.total + other.total, self.total_squares + other.total_squares
        return RunningMean(self.count + other.count, *sums)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    @property
    def standard_error(self) -> float | None:
        """Of the mean, as if the numbers were independent; None where fewer than two cannot tell."""
        if self.count < 2:
            return None
        spread = max(0.0, self.total_squares - self.total * self.total / self.count)
        return math.sqrt(spread / (self.count - 1) / self.count)

    def as_dict(self) -> dict[str, object]:
        """The figures by the names that `--json` uses."""
        return {
            "mean": self.mean,
            "standard_error": self.standard_error,
            "num_positions": self.count,
        }


class RankFigures(NamedTuple):
    """What one of many ranks has moved and held since it loaded; what lies between two moments is
    the difference.
    """

    ram_bytes: int  # its budget
    own_bytes: int  # what Python and its libraries took before it loaded
    peak_rss_bytes: int
    num_passes: int
    num_rows: int  # of all passes
    pass_bytes: int  # of layers that one pass streams, by the plan
    bytes_streamed: int
    stall_s: float  # compute waited for the link
    row_bytes: int  # that it sends in exchanges for every row, by the formula
    # by kind of message, `broadcast` and `gather`: the last two are exchanges
    bytes_sent: dict[str, int]
    exchange_s: float  # waiting for slower ranks included


class Transfers(NamedTuple):
    """What passes have moved and waited for."""

    num_bytes: int = 0
    stall_s: float = 0.0  # compute waited for the link
    expert_hits: int = 0  # routed experts that were there when a pass asked for them
    expert_misses: int = 0

    def since(self, before: "Transfers") -> "Transfers":
        """What came after an earlier moment."""
        hits = self.expert_hits - before.expert_hits
        misses = self.expert_misses - before.expert_misses
        return Transfers(
            self.num_bytes - before.num_bytes, self.stall_s - before.stall_s, hits, misses
        )

    def and_more(self, other: "Transfers") -> "Transfers":
        """Both together."""
        hits = self.expert_hits + other.expert_hits
        misses = self.expert_misses + other.expert_misses
        return Transfers(
            self.num_bytes + other.num_bytes, self.stall_s + other.stall_s, hits, misses
        )


@dataclass(slots=True, repr=False)
class Stats:
    """Figures of one generation. Times and bytes leave out the prompt's sweep, which `ttft_s`
    covers.
    """

    num_prompt_tokens: int = 0
    num_kept_tokens: int = 0  # of the prompt's, whose keys and values the run before had left
    num_new_tokens: int = 0
    num_first_tokens: int = 0  # what the prompt's own sweep yielded
    num_sweeps: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0  # from the first tokens to the last
    draft_s: float = 0.0
    sweep_s: float = 0.0
    verify_s: float = 0.0
    stall_s: float = 0.0  # of sweep_s: compute waited for the link
    bytes_streamed: int = 0
    expert_hits: int = 0  # see `Transfers`
    expert_misses: int = 0
    peak_rss_bytes: int = 0
    peak_device_bytes: int = 0
    threads: StepModes | None = None  # of the last step
    tree_num_nodes: int = 1
    tree_depth: int = 0
    is_tree_dynamic: bool = False  # size and depth are bounds then
    # of `chain:auto`: guesses before each sweep
    chain_lengths: list[int] = field(default_factory=list)
    # new tokens of each sweep after the prompt's
    accepted_per_sweep: list[int] = field(default_factory=list)
    # chance that a node's first guess is accepted
    first_guess: RunningMean = field(default_factory=RunningMean)
    # of a pipeline: see `ranks.timings.RunEvent`
    runs: list[tuple[float, str, int, int]] = field(default_factory=list)
    # whether a draft made guesses of which verification knew q: then this is alpha
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
        """The prompt's sweep is over: what it took counts as time to the first token only."""
        self.num_first_tokens = num_first_tokens
        self.ttft_s = ttft_s
        self.num_sweeps = self.bytes_streamed = self.expert_hits = self.expert_misses = 0
        self.chain_lengths = []
        self.draft_s = self.sweep_s = self.verify_s = self.stall_s = 0.0

    def add_step(
        self, moved: Transfers, *, draft_s: float, sweep_s: float, verify_s: float
    ) -> None:
        """One more sweep and what surrounded it."""
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
        """E[sum of min(p, q)] over the positions that were verified; None where none was, or no
        draft's q was kept.
        """
        return self.first_guess if self.is_draft_known and self.first_guess.count else None

    @property
    def expert_hit_rate(self) -> float | None:
        """Of the routed experts that passes have asked for, how many were there; None where they
        come with layers.
        """
        asked = self.expert_hits + self.expert_misses
        return self.expert_hits / asked if asked else None

    @property
    def tokens_per_sweep(self) -> float:
        """New tokens that one sweep yields, the prompt's sweep left out."""
        return sum(self.accepted_per_sweep) / self.num_sweeps if self.num_sweeps else 0.0

    @property
    def tpot_s(self) -> float:
        """Seconds per new token after the first ones."""
        num_later = self.num_new_tokens - self.num_first_tokens
        return self.decode_s / num_later if num_later > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.tpot_s if self.tpot_s else 0.0

    @property
    def link_bytes_per_s(self) -> float:
        """Bytes streamed per second of decoding, drafting included."""
        return self.bytes_streamed / self.decode_s if self.decode_s else 0.0

    def as_dict(self) -> dict[str, object]:
        """The figures by the names that `--json` uses."""
        names = (
            "num_sweeps",
            "tokens_per_sweep",
            "ttft_s",
            "tpot_s",
            "sweep_s",
            "draft_s",
            "verify_s",
            "stall_s",
        )
        more = (
            "bytes_streamed",
            "link_bytes_per_s",
            "peak_rss_bytes",
            "peak_device_bytes",
            "accepted_per_sweep",
        )
        figures: dict[str, object] = {name: getattr(self, name) for name in names + more}
        tree = {
            "num_nodes": self.tree_num_nodes,
            "depth": self.tree_depth,
            "is_grown": self.is_tree_dynamic,
        }
        experts = ("expert_hits", "expert_misses")
        return {
            **figures,
            "alpha": self.alpha and self.alpha.as_dict(),
            "first_guess": self.first_guess.as_dict(),
            **({"chain_lengths": self.chain_lengths} if self.chain_lengths else {}),
            **({"runs": self.runs} if self.runs else {}),
            **(
                {}
                if self.expert_hit_rate is None
                else {name: getattr(self, name) for name in experts}
            ),
            "threads": self.threads
            and {name: mode._asdict() for name, mode in self.threads._asdict().items()},
            "tree": tree,
        }
