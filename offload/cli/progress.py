"""Progress as a bar shows it: a label, how much is done, and a note."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from offload.units import plural

if TYPE_CHECKING:  # `offload --help` must not wait for what they import
    from offload.engine.generation import Run
    from offload.stats import Stats


class Shown(NamedTuple):
    """A bar's content; another label begins another bar."""

    label: str
    done: float = 0
    total: float = 0  # 0 if the total is unknown
    unit: str = ""
    note: str = ""


@dataclass(kw_only=True)
class Progress:
    """Progress that a bar shows."""

    num_layers: int = 0  # layers that ran since it began

    def now(self) -> Shown:
        """Return the state to show."""
        raise NotImplementedError


@dataclass
class Phase(Progress):
    """A phase of work, with the share done if it is known."""

    label: str
    done: float = 0
    total: float = 0
    unit: str = ""  # "B" or "iB" for bytes, in powers of 1000 or 1024

    def now(self) -> Shown:
        """Return its share, and the layers that ran meanwhile."""
        note = f"{plural(self.num_layers, 'layer')} run" if self.num_layers else ""
        return Shown(self.label, self.done, self.total, self.unit, note)


@dataclass
class TextProgress(Progress):
    """A text being written, sweep by sweep."""

    stats: "Stats"  # the run's metrics, which go on changing
    layers_per_sweep: int
    num_prompt_sweeps: int
    max_new_tokens: int | None  # None if no limit was set

    def now(self) -> Shown:
        """Return layers while the prompt is read, then tokens, the layer and tokens a pass."""
        stats = self.stats
        if not stats.num_first_tokens:
            total = self.layers_per_sweep * self.num_prompt_sweeps
            return Shown("prompt", self.num_layers, total, " layers")
        num_run = self.num_layers % self.layers_per_sweep
        is_drafting = stats.tree_depth > 0 and not num_run
        notes = ["drafting" if is_drafting else f"layer {num_run} of {self.layers_per_sweep}"]
        if not self.num_layers:  # other ranks run them
            notes = []
        num_later = sum(stats.accepted_per_sweep)
        notes += [f"{stats.tokens_per_sweep:.1f} tokens a pass"] if num_later else []
        num_done = stats.num_first_tokens + num_later
        return Shown("writing", num_done, self.max_new_tokens or 0, " tokens", ", ".join(notes))


@dataclass
class BatchProgress(Progress):
    """Many texts, some of them being written."""

    num_texts: int
    num_done: int = 0
    num_passes: int = 0
    started_s: float = field(default_factory=time.monotonic)
    _num_finished_tokens: int = 0
    _under_way: Sequence["Run"] = ()

    def advance(self, runs: Sequence["Run"]) -> None:
        """Note that a pass over the weights begins for these texts."""
        self._under_way = runs
        self.num_passes += bool(runs)

    def finish(self, num_tokens: int) -> None:
        """Note that a text is finished, with this many new tokens."""
        self.num_done += 1
        self._num_finished_tokens += num_tokens
        self._under_way = [run for run in self._under_way if not run.is_finished]

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    @property
    def num_tokens(self) -> int:
        return self._num_finished_tokens + sum(run.sequence.num_new for run in self._under_way)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / max(self.elapsed_s, 1e-9)

    @property
    def tokens_per_pass(self) -> float:
        return self.num_tokens / max(self.num_passes, 1)

    def now(self) -> Shown:
        """Return the number of finished texts, those being written, and the speed."""
        note = f"{len(self._under_way)} under way"
        if self.num_tokens:
            note += f", {self.tokens_per_s:.2f} tokens/s, {self.tokens_per_pass:.1f} tokens a pass"
        return Shown("writing", self.num_done, self.num_texts, " texts", note)
