"""How far something is, as the parts of a line, the most telling first: a narrow terminal shows no more."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from offload.units import duration, format_bytes, plural

if TYPE_CHECKING:  # `offload --help` must not wait for what they bring along
    from offload.engine.generation import Run
    from offload.stats import Stats

_QUIET_S = 1.0  # what is over sooner needs no clock
_TELLING_SHARE = 0.02  # of the work, from which on the rest can be foretold


@dataclass(kw_only=True)
class Progress:
    """What the live line tells of."""

    num_layers: int = 0  # that have run since it began
    started_s: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def parts(self) -> list[str]:
        """Return the parts of the line."""
        raise NotImplementedError


@dataclass
class Phase(Progress):
    """Something under way, of which a share may be known to be done."""

    label: str
    done: float = 0
    total: float = 0  # 0 where it is not known how much there is
    is_in_bytes: bool = False
    is_decimal: bool = False
    reached_s: float = 0.0  # when so much was done, counted from the start

    def reach(self, done: float, total: float) -> None:
        """Note that so much is done by now."""
        self.done = done
        self.total = total
        self.reached_s = self.elapsed_s

    def parts(self) -> list[str]:
        """Return such as `reading layers: 1.2 of 4.0 GiB`, `12 s left`, `1.5 GiB/s`."""
        elapsed_s = self.elapsed_s
        layers = [f"{plural(self.num_layers, 'layer')} run"] if self.num_layers else []
        clock = [duration(elapsed_s)] if elapsed_s >= _QUIET_S else []
        if not self.total:
            return [self.label, *clock, *layers]
        share = self.done / self.total
        left = clock
        if clock and share >= _TELLING_SHARE:
            left = [f"{duration(self.reached_s / share - elapsed_s)} left"]
        amount = f"{self.done:.0f} of {self.total:.0f}"
        rate = list[str]()
        if self.is_in_bytes:
            size = partial(format_bytes, is_decimal=self.is_decimal)
            total = size(self.total)
            amount = f"{size(self.done).removesuffix(total[total.index(' ') :])} of {total}"
            rate = [f"{size(self.done / self.reached_s)}/s"] if clock and self.reached_s else []
        return [f"{self.label}: {amount}", *left, *rate, *layers]


@dataclass
class TextProgress(Progress):
    """A text that is being written, sweep by sweep."""

    stats: "Stats"  # of the run, which goes on changing
    layers_per_sweep: int
    num_prompt_sweeps: int
    max_new_tokens: int | None  # None where no limit was set

    def parts(self) -> list[str]:
        """Return such as `31 of 128 tokens`, `layer 12 of 80`, `1.31 tokens/s`, `1:14 left`."""
        elapsed_s = self.elapsed_s
        stats = self.stats
        if not stats.num_first_tokens:
            total = self.layers_per_sweep * self.num_prompt_sweeps
            parts = ["reading the prompt", f"layer {self.num_layers} of {total}"]
            if elapsed_s < _QUIET_S or not self.num_layers:
                return parts
            left_s = (total - self.num_layers) * elapsed_s / self.num_layers
            return [*parts, f"{duration(left_s)} left"]
        num_later = sum(stats.accepted_per_sweep)
        num_done = stats.num_first_tokens + num_later
        num_run = self.num_layers % self.layers_per_sweep
        is_drafting = stats.tree_depth > 0 and not num_run
        layer = ["drafting" if is_drafting else f"layer {num_run} of {self.layers_per_sweep}"]
        if not self.num_layers:  # other ranks run them
            layer = []
        if self.max_new_tokens is None:
            written = plural(num_done, "token")
        else:
            written = f"{num_done} of {plural(self.max_new_tokens, 'token')}"
        if not num_later or not stats.decode_s:
            return [written, *layer]
        rate = num_later / stats.decode_s
        speed = [f"{rate:.2f} tokens/s"]
        if self.max_new_tokens is not None:
            # the sweep under way has had some of the time until the limit
            since_s = max(0.0, elapsed_s - stats.ttft_s - stats.decode_s)
            left_s = (self.max_new_tokens - num_done) / rate - since_s
            speed.append(f"{duration(left_s)} left")
        return [written, *layer, *speed, f"{stats.tokens_per_sweep:.1f} tokens a pass"]


@dataclass
class BatchProgress(Progress):
    """Many texts, of which some are written at a time."""

    num_texts: int
    layers_per_pass: int
    num_done: int = 0
    num_passes: int = 0
    _num_finished_tokens: int = 0
    _under_way: Sequence["Run"] = ()

    def advance(self, runs: Sequence["Run"]) -> None:
        """Note that a pass over the weights begins for these."""
        self._under_way = runs
        self.num_passes += bool(runs)

    def finish(self, num_tokens: int) -> None:
        """Note that one more is finished, with this many new tokens."""
        self.num_done += 1
        self._num_finished_tokens += num_tokens
        self._under_way = [run for run in self._under_way if not run.is_finished]

    @property
    def num_tokens(self) -> int:
        return self._num_finished_tokens + sum(run.sequence.num_new for run in self._under_way)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / max(self.elapsed_s, 1e-9)

    @property
    def tokens_per_pass(self) -> float:
        return self.num_tokens / max(self.num_passes, 1)

    def parts(self) -> list[str]:
        """Return such as `31 of 128 texts`, `8 under way`, `7.31 tokens/s`, `12:14 left`."""
        texts = f"{self.num_done:,} of {plural(self.num_texts, 'text')}"
        elapsed_s = self.elapsed_s
        layer = f"layer {self.num_layers % self.layers_per_pass} of {self.layers_per_pass}"
        under_way = f"{len(self._under_way)} under way"
        if not self.num_tokens:
            return [texts, under_way, layer]
        speed = [f"{self.tokens_per_s:.2f} tokens/s"]
        if self.num_done and self.num_done < self.num_texts:
            left_s = elapsed_s * (self.num_texts - self.num_done) / self.num_done
            speed.append(f"{duration(left_s)} left")
        return [texts, under_way, *speed, f"{self.tokens_per_pass:.1f} tokens a pass", layer]
