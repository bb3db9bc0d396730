"""Sequences of tokens, written by a streamed target and a resident drafter.

Invariant: the distribution of what is emitted depends on the target and the sampling settings
alone. Tree, drafter, memory and threads change only how long it takes; with the rules `match` and
`topk` one seed gives one text, too. A `lenience` below 1 gives that up, and every result says so.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Self

from offload.drafting.base import Proposer
from offload.engine.cache_pool import CachePool
from offload.engine.decoder_config import DecoderConfig
from offload.engine.request import whole_numbers, with_start
from offload.engine.sequence import Caches, StopCriteria, TokenSequence
from offload.engine.step import SpeculationStep, count_step, learning
from offload.errors import HostFault, UserError
from offload.machine import giving_back_memory
from offload.model.target import Target
from offload.sampling.grammar import Grammar
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.threads import ThreadWaiting
from offload.trees.topology import Shape, chain
from offload.trees.verification import Rule, find_rule, not_exact_lines


class DecoderLock:
    """Gives one thread the turn at a decoder, and one step at a time within it; others are refused.

    The thread that has the turn may take it again; only closing waits for it. `computing` is
    entered with every turn, and makes that thread compute in the right place. Invariant: only the
    thread that has the turn touches caches, slots and readers.
    """

    def __init__(self, computing: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._lock = threading.RLock()
        self._is_over = False
        self._computing = computing
        self._stepping: int | None = None  # the thread that runs a step

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take the turn for a run. Raises `HostFault` if another thread has it, or it is closed."""
        if not self._lock.acquire(blocking=False):
            raise HostFault(
                "this decoder is in use by another thread: wait until that is done, or load a "
                "second one"
            )
        try:
            self._require_no_own_step()
            if self._is_over:
                raise HostFault("this decoder was closed: load the model again")
            with self._computing():
                yield
        finally:
            self._lock.release()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Take the turn for one step, which none of its callbacks may disturb."""
        with self.taken():
            self._stepping = threading.get_ident()
            try:
                yield
            finally:
                self._stepping = None

    @contextmanager
    def last(self) -> Iterator[None]:
        """Take the turn once another thread's step has ended; no later turn is possible."""
        self._require_no_own_step()
        self._is_over = True
        with self._lock:
            yield

    def _require_no_own_step(self) -> None:
        if self._stepping == threading.get_ident():
            raise UserError(
                "this decoder is in the middle of a step: let what that calls raise, to end it "
                "first"
            )


_ROOT = chain(0)
_UNLIMITED = StopCriteria()


class TokenDecoder:
    """Both models of a decoder, and the sequences that they write.

    It writes as many at a time as it was loaded for, each in a cache set of its own; where that is one,
    a sequence that is begun overtakes the one before. Any thread may use it, one at a time: others
    get a `UserError` meanwhile, except for `close`, which ends a step. One that is dropped closes
    itself.
    """

    _is_open = False

    def __init__(
        self,
        target: Target,
        drafter: Proposer,
        config: DecoderConfig,
        *,
        resources: ExitStack,
        notes: list[str],
    ) -> None:
        self.plan = config.plan
        self.trees = config.trees
        self.rule = find_rule(config.rule, config.lenience)
        self.threads = config.threads
        self._kernels = config.choice.kernels
        self.comparisons = config.choice.comparisons
        self.tokenizer = config.tokenizer
        self.end_ids = config.texts.end_ids
        self.invariance = config.invariance
        self.sources = config.sources
        self.identities = config.identities
        self.target = target
        self.drafter = drafter
        self._resources = resources
        self._vocab_size = target.vocab_size
        self._start_ids = target.start_ids
        self._grammars = config.texts.grammars
        self._rules = config.texts.stated
        self.lock = DecoderLock(target.computing)
        # encoding may set how a tokenizer pads and cuts; decoding reads neither
        self._encoding = threading.Lock()
        self._waiting = ThreadWaiting()
        resources.callback(self._waiting.close)
        weakref.finalize(self, _close_dropped, resources).atexit = False
        if drafter.needs is not None:
            target.tap(drafter.needs)
        new_caches = [target.new_cache() for _ in range(self.num_parallel)]
        sets = [Caches(cache, drafter.new_state(cache)) for cache in new_caches]
        if self.num_parallel > 1:
            target.share_sweeps([caches.target for caches in sets])
            drafter.share_states([caches.draft for caches in sets])
        self._pool = CachePool(sets, self._start_ids, config)
        self.num_score_passes = 0
        # methods of this decoder would make a cycle
        compute_in = self._waiting.compute_in
        # a decoder of one text takes in all of a prompt, by as many sweeps as that needs
        prompt_rows = self.plan.max_prompt_rows if self.num_parallel > 1 else sys.maxsize
        listeners = (count_step, learning(self.threads, self.trees.observe))
        self._speculation = SpeculationStep(
            target, drafter, self.threads, compute_in, prompt_rows, self._pool.keep, listeners
        )
        notes_of_kernels = [
            self.plan.num_layer_slots and target.stream.carrier.note,
            target.experts and target.experts.carrier.note,
        ]
        # the first sweep may add to them
        self.notes = notes
        self.notes += not_exact_lines(self.rule, self.plan.kv_dtype)
        self.notes += [self._rules.note] if self._rules.note else []
        self.notes += dict.fromkeys(note for note in notes_of_kernels if note)
        self._is_open = True

    def __repr__(self) -> str:
        state = f"rule={self.rule.name!r}, num_threads={self.num_threads}"
        return f"Decoder({state if self._is_open else 'closed'})\n{self.plan}"

    def begin(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        rule: Rule | None = None,
        shape: Shape = _ROOT,
        limits: StopCriteria = _UNLIMITED,
        keeps: bool = False,
        grammar: Grammar | None = None,
    ) -> TokenSequence:
        """Begin a sequence with the prompt's tokens and the start that some models want.

        Args:
            rule, shape: those of the decoder, and no tree, where they are left out.
            keeps: keys and values of all but the last token that it shares with the sequence
                before.
            grammar: that the new text must keep.
        """
        with self.lock.taken():
            rule = rule or self.rule
            masks = [] if grammar is None else [self._grammars.mask(grammar)]
            drawing = (rule.drafting, self._kernels, self.target.send)
            begun = with_start(whole_numbers(tokens), self._start_ids)
            is_ranked = self.trees.is_ranked
            # what an encoder reads is no text
            said = begun[begun.index(self._start_ids[0]) :] if self._start_ids else begun
            earlier, later = self._rules.adjustments(len(said), limits.max_new_tokens)
            later += masks
            sampler = Sampler(
                sampling, self._vocab_size, *drawing, adjustments=later, earlier=earlier
            )
            sampler.begin(said)
            sequence = TokenSequence(begun, sampler, rule, shape, limits, is_ranked=is_ranked)
            self._pool.acquire(sequence, keeps=keeps)
            self.target.turn(begun, sequence.caches.target)
            self._pool.fill(sequence)
            sequence.stats.num_kept_tokens = sequence.caches.target.length
            return sequence

    def step(self, sequence: TokenSequence) -> list[int]:
        """Run one round of speculation: the target's weights cross the link once, for a prompt as
        often as it has parts.

        Returns the new tokens that count, at least one; the sequence has them. Raises `UserError`
        where the sequence was overtaken, the decoder closed, or another thread is using it.
        """
        with self.lock.stepping():
            while True:
                (gained,) = self._pass([sequence])
                if isinstance(gained, Exception):
                    raise gained
                # a long prompt beside others comes in parts
                if gained or not sequence.num_pending:
                    return gained

    def _pass(self, sequences: Sequence[TokenSequence]) -> list[list[int] | Exception]:
        """Run one step of all of them, see `SpeculationStep`."""
        return self._speculation.run(sequences)

    @property
    def num_parallel(self) -> int:
        return self.plan.parallel

    @property
    def num_threads(self) -> int:
        return self.threads.most

    def close(self) -> None:
        """Stop readers, close files, drop weights, once another thread's step is over."""
        with self.lock.last(), giving_back_memory():
            self._resources.close()
            if self._is_open:
                self._is_open = False
                self._pool.release_all()
                del self.target, self.drafter, self._pool, self._speculation, self.sources

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close_dropped(resources: ExitStack) -> None:
    """Close what a dropped decoder held: hooks make cycles that would keep weights for long."""
    # a reader that collects garbage cannot wait for itself
    if threading.current_thread().name.startswith("offload-"):
        threading.Thread(target=resources.close, daemon=True).start()
    else:
        resources.close()
