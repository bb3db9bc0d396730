"""The head of a pipeline: it writes the text, and orders what stages and draft compute.

    begin     Reset, the prompt in runs of up to 512 rows, each committed at once: stages overlap
              without any guess
    advance   until a token is emitted: issue what may be issued, ask for guesses, sleep until
              anything arrives, walk
    end       what is on its way is no longer needed
    stop      the services end

Runs on their way survive between two calls of `advance`, so stages and draft work while the caller
does something else. The run table (`runs.py`) says what runs are about; here is when. Replies come
on RESULT. A `CutOff` decides from which chance on a guess is worth a row of a run: f is the chance
that the target walks through a node, so a row is worth f tokens, and it costs the slowest stage
some time.

Invariant: what is emitted is a walk over draws, whatever arrives when.
"""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from typing import Literal, NamedTuple

import numpy as np

from offload.distributed.orders import (
    Accept,
    Cancel,
    Commit,
    Drawn,
    Grow,
    Guessed,
    Least,
    Order,
    Reset,
    RunOrder,
    Stop,
    packed,
)
from offload.distributed.runs import RunNode, RunStep, RunTable
from offload.distributed.transport import Channel, Transport
from offload.engine.cache_pool import num_shared
from offload.errors import RankError, require
from offload.interrupts import held_back
from offload.memory.sizes import PROMPT_ROWS
from offload.rank_roles import TIMED_ROWS, FixedCutoff, PipelineOptions, Roles, free_rows
from offload.sampling.sampler import require_token
from offload.sampling_options import Sampling

_KEPT = 0.9  # weight of the mean so far, from one step to the next
# times the mean: anything longer is not a token's time, but that of a process that was stopped
_MOST_RISE = 10.0


class CutOff:
    """The least chance of guesses: by price, or by a rule.

    By price, f must reach (seconds of one more row at the slowest stage) / (seconds of a token). By
    PipeInfer's rule (2407.11798, section IV) guesses below unproved guesses must be surer:

    cut = start + recovery x (batches since a run was accepted) - decay x (failed attempts since)
    """

    def __init__(self, row_s: float, rule: FixedCutoff | None = None) -> None:
        self._row_s = row_s
        self._rule = rule
        self.reset()

    @property
    def _cut(self) -> float:
        rule = self._rule or FixedCutoff(0.0, 0.0, 0.0)
        return rule.start + self._num_batches * rule.recovery - self._num_fails * rule.decay

    def least(self, token_s: float) -> Least:
        """Return the least chances for now; a `token_s` of 0 is unknown."""
        if self._rule is not None:
            return Least(0.0, max(0.0, self._cut))
        return Least(min(1.0, self._row_s / token_s) if token_s > 0 else 0.0, 0.0)

    def speculated(self) -> None:
        """Note that guesses have come: the next batch needs higher chances."""
        self._num_batches += 1

    def reset(self) -> None:
        """Return to the start: a text begins, or a run was accepted, in part at least."""
        self._num_batches = 0
        self._num_fails = 0

    def failed(self) -> bool:
        """Note that no guess was likely enough; return True if that lowers the bound."""
        can_fall = self._rule is not None and self._rule.decay > 0 and self._cut > 0
        self._num_fails += can_fall
        return can_fall


class TokenTime:
    """Recent seconds of a token; `token_s` is 0 while unknown."""

    def __init__(self) -> None:
        self.token_s = 0.0
        self._last_s: float | None = None

    def begin(self) -> None:
        """Begin a text; since its first tokens take as long as the prompt, the old mean holds."""
        self._last_s = None

    def emitted(self, num: int, now_s: float) -> None:
        """Note that `num` tokens have come at once."""
        if self._last_s is not None:
            token_s = (now_s - self._last_s) / num
            counted_s = min(token_s, _MOST_RISE * self.token_s)
            self.token_s = (
                _KEPT * self.token_s + (1 - _KEPT) * counted_s if self.token_s else token_s
            )
        self._last_s = now_s


# dead: back, without draws
EventKind = Literal["begun", "issued", "cancelled", "drawn", "dead", "emitted"]


class RunEvent(NamedTuple):
    """One moment of a text, for pictures."""

    time_s: float  # the head's clock
    kind: EventKind
    run: int  # -1 if it concerns no run
    num: int = 0  # rows of a run, or tokens emitted


Listener = Callable[[RunEvent], None]


class RowPrice(NamedTuple):
    """What rows of a run cost where they cost most."""

    row_s: float = 0.0  # seconds of one more row at the slowest stage
    num_free: int = 4  # rows that take hardly longer than one

    @classmethod
    def from_times(cls, seconds_by_stage: Sequence[Sequence[float]]) -> "RowPrice":
        """Return the price by what passes over `TIMED_ROWS` took; long ones are timed for one row."""
        slowest_s = [max(times) for times in zip(*seconds_by_stage, strict=False)]
        # such a time is the link's, which does not depend on rows
        if len(slowest_s) == 1:
            return cls(0.0, TIMED_ROWS[-1])
        more_s = max(0.0, slowest_s[-1] - slowest_s[0])
        return cls(more_s / (TIMED_ROWS[-1] - 1), free_rows(slowest_s))


_UNKNOWN = RowPrice()


class _DraftState(Enum):
    IDLE = "may be asked"
    ASKED = "has not answered yet"
    OUTDATED = "has not answered yet, and the root has moved since"
    SHORT = "gave less than was asked for: better issued than waited for"
    DRY = "has nothing more that is worth a row until the root moves"


class Head:
    """One text after the other over stages and, where guesses are made, a draft.

    Methods raise `RankError`, `advance` also `UserError` for scores that are no numbers.

    Args:
        num_uncommitted: rows that every stage's cache has room for behind the committed ones.
        price: what rows cost; of use to the rule of cut-off, and for the size of runs.
        listen: called when runs begin and end.
        clock: seconds.
    """

    def __init__(
        self,
        transport: Transport,
        roles: Roles,
        options: PipelineOptions,
        num_uncommitted: int,
        *,
        price: RowPrice = _UNKNOWN,
        listen: Listener = lambda _: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        remedy = "name a draft rank, or `pipeline` plain"
        requirement = "guesses need a draft"
        require(roles.draft is not None or not options.speculates, requirement, "none", remedy)
        self._transport = transport
        self._roles = roles
        self._options = options
        self.listen = listen
        self._clock = clock
        self._most_rows = min(options.num_rows(price.num_free), num_uncommitted)
        self._table = RunTable(options.num_runs(len(roles.stages)), num_uncommitted)
        self._cut = CutOff(price.row_s, options.cut)
        # all stages, the head's included: the end of any is noticed here, whatever its reason
        answering = {*roles.stages, *([] if roles.draft is None else [roles.draft])}
        self._ways = [(rank, Channel.RESULT) for rank in sorted(answering)]
        self._time = TokenTime()
        self._tokens = list[int]()
        self._draft = _DraftState.IDLE
        self._num_asked = 0
        self._num_stale = 0

    def begin(
        self, tokens: Sequence[int], sampling: Sampling, end: int, most_kept: int = sys.maxsize
    ) -> None:
        """Begin a text of at most `end` tokens; up to `most_kept` tokens of the last text are kept."""
        with held_back():
            self.end()
            known = self._tokens[: self._table.num_committed]
            num_kept = min(num_shared(known, tokens[:-1]), most_kept)
            self._tokens = list(tokens)
            self._table.begin(tokens[-1], len(tokens) - 1, end, num_kept)
            self._time.begin()
            self._tell("begun")
            self._data(Reset(num_kept, sampling))
            self._ask_draft(Reset(num_kept, sampling, tuple(self._tokens)))
            for lo in range(num_kept, len(tokens), PROMPT_ROWS):
                self._issue_prompt(lo, min(lo + PROMPT_ROWS, len(tokens)))
            self._fill()

    def advance(self, on_arrival: Callable[[], None] = lambda: None) -> list[int]:
        """Return the next tokens, at least one; none if the text has reached its end.

        `on_arrival` is called for everything that arrives; if it raises, the text can go on.
        """
        while not self._table.is_complete:
            with held_back():  # stages and the run table must have the same orders
                self._fill()
            self._transport.wait_any(self._ways)
            on_arrival()
            with held_back():
                for source, channel in self._ways:
                    while (answer := self._transport.poll(source, channel)) is not None:
                        self._take(source, answer)
                step = self._table.walk()
                if step is not None:
                    self._take_step(step)
                    self._fill()
                    return step.tokens
        return []

    def end(self) -> None:
        """End the text: runs on their way are not needed, and their answers will be dropped."""
        self._cancel(self._table.abandon())
        self._num_stale += self._draft in (_DraftState.ASKED, _DraftState.OUTDATED)
        self._draft = _DraftState.IDLE
        self._cut.reset()

    def stop(self) -> None:
        """End all services, whatever they wait for, unless they have ended."""
        with suppress(RankError):
            self.end()
        ways = [(rank, Channel.CONTROL) for rank in range(self._transport.num_ranks)]
        ways += [(self._roles.stages[0], Channel.DATA)]
        ways += [] if self._roles.draft is None else [(self._roles.draft, Channel.DRAFT)]
        for way in ways:
            with suppress(RankError):
                self._transport.send(*way, Stop())

    def _issue_prompt(self, lo: int, hi: int) -> None:
        """Issue positions [lo, hi) of the prompt; only the very last row draws a token."""
        run = self._table.new_run()
        num_rows = hi - lo
        sees = packed(np.tri(num_rows, dtype=bool))
        num_drawn = int(hi == len(self._tokens))
        self._tell("issued", run, num_rows)
        self._data(RunOrder(run, self._tokens[lo:hi], list(range(lo, hi)), sees, num_drawn))
        self._table.commit_prompt(run, num_rows)
        self._data(Commit(list(range(num_rows))))

    def _fill(self) -> None:
        """Issue and request all that is possible now."""
        if self._table.is_complete:
            return
        self._ask_for_guesses()
        while self._table.has_credit and (nodes := self._next_nodes()):
            run = self._table.issue(nodes)
            self._tell("issued", run.number, len(nodes))
            self._data(run)
            self._draft = _DraftState.IDLE if self._draft == _DraftState.SHORT else self._draft
            self._ask_for_guesses()

    def _next_nodes(self) -> list[RunNode]:
        """Return the nodes of the next run, the root first; empty if waiting is better."""
        root = self._table.root
        mode = self._options.mode
        if root.run is None:
            if mode == "sync" and self._draft in (_DraftState.ASKED, _DraftState.OUTDATED):
                return []
            count = self._most_rows - 1 if self._options.is_continuous else 0
            return [root, *self._guesses(count)]
        if mode != "async" or (not self._options.is_continuous and self._table.speculates):
            return []
        nodes = self._guesses(self._num_wanted)
        is_all = self._draft in (_DraftState.SHORT, _DraftState.DRY)
        return nodes if is_all or len(nodes) == self._num_wanted else []

    @property
    def _num_wanted(self) -> int:
        """Count the guesses that the next run needs; all at once if not continuous."""
        num_runs = (
            1 if self._options.is_continuous else self._options.num_runs(len(self._roles.stages))
        )
        num_roots = int(self._options.mode == "sync")  # a run for the root begins with it
        return min(self._most_rows * num_runs - num_roots, self._table.room)

    def _guesses(self, count: int) -> list[RunNode]:
        return self._table.best(count, self._cut.least(self._time.token_s).f)

    def _ask_for_guesses(self) -> None:
        """Ask for as many guesses as a run can hold, while the draft is idle."""
        if self._draft == _DraftState.SHORT and not self._table.has_credit:
            # nothing can be issued, so there is time to ask for more
            self._draft = _DraftState.IDLE
        is_busy = self._options.mode == "sync" and self._table.num_on_way > 0
        if not self._options.speculates or self._draft != _DraftState.IDLE or is_busy:
            return
        self._num_asked = self._num_wanted - len(self._guesses(self._num_wanted))
        if self._num_asked > 0:
            self._ask_draft(Grow(self._num_asked, self._cut.least(self._time.token_s)))
            self._draft = _DraftState.ASKED

    def _take(self, source: int, answer: Order) -> None:
        if isinstance(answer, Drawn) and source == self._roles.stages[-1]:
            self._take_draws(source, answer)
        elif isinstance(answer, Guessed) and source == self._roles.draft:
            self._take_guesses(answer)
        else:
            raise RankError(f"rank {source} has sent {type(answer).__name__}, which ends the text")

    def _take_draws(self, source: int, back: Drawn) -> None:
        try:
            self._table.drawn(back.run, back.is_dead, back.tokens)
        except ValueError as error:
            raise RankError(f"rank {source}: {error}") from None
        self._tell("dead" if back.is_dead else "drawn", back.run, len(back.tokens))

    def _take_guesses(self, guessed: Guessed) -> None:
        """Add the draft's guesses; none for the current root means that none is worth it."""
        if self._num_stale:
            self._num_stale -= 1
            return
        num_new = sum(self._table.offer(*node) is not None for node in guessed.nodes)
        if num_new:
            self._cut.speculated()
        if self._draft == _DraftState.OUTDATED or num_new >= self._num_asked:
            self._draft = _DraftState.IDLE
        elif num_new:
            self._draft = _DraftState.SHORT
        else:
            self._draft = _DraftState.IDLE if self._cut.failed() else _DraftState.DRY

    def _take_step(self, step: RunStep) -> None:
        """Send all ranks the emitted tokens, first to those with runs to cancel."""
        self._cancel(step.dead)
        self._data(Commit(step.path, step.kept))
        self._tokens += map(require_token, step.tokens)
        self._ask_draft(Accept(step.tokens))
        is_asked = self._draft in (_DraftState.ASKED, _DraftState.OUTDATED)
        self._draft = _DraftState.OUTDATED if is_asked else _DraftState.IDLE
        self._cut.reset()
        self._time.emitted(len(step.tokens), self._clock())
        self._tell("emitted", num=len(step.tokens))

    def _cancel(self, runs: Sequence[int]) -> None:
        if not runs or not self._options.cancels:
            return
        for rank in sorted(set(self._roles.stages)):
            self._transport.send(rank, Channel.CONTROL, Cancel(list(runs)))
        for run in runs:
            self._tell("cancelled", run)

    def _data(self, order: Order) -> None:
        self._transport.send(self._roles.stages[0], Channel.DATA, order)

    def _ask_draft(self, order: Order) -> None:
        if self._roles.draft is not None and self._options.speculates:
            self._transport.send(self._roles.draft, Channel.DRAFT, order)

    def _tell(self, kind: EventKind, run: int = -1, num: int = 0) -> None:
        self.listen(RunEvent(self._clock(), kind, run, num))
