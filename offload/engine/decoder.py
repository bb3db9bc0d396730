"""The decoder: a streamed target, a resident drafter, and the step that turns one sweep into many
tokens.

Invariant: the distribution of what is emitted depends on the target and the sampling settings
alone. Tree, drafter, memory and threads change only how long it takes; with the rules `match` and
`topk` one seed gives one text, too. A `lenience` below 1 gives that up, and every result
says so.
"""

import os
import sys
import threading
import weakref
from collections import abc, deque
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, Unpack, overload

import torch

from offload.calibration.invariance import Invariance
from offload.calibration.kernels import NO_KERNELS, KernelChoice
from offload.drafting.base import Drafter
from offload.drafting.lookup import NO_SOURCES, GuessSources
from offload.engine.generation import Generation, Run, RunInfo
from offload.engine.request import (
    Prompt,
    Request,
    Tool,
    encode,
    request_of,
    samples_of,
    several_of,
    whole_numbers,
    with_start,
)
from offload.engine.scheduler import in_order
from offload.engine.scoring import Scorer, ScoreRequest, TextScore, wanted_of
from offload.engine.sequence import CachePool, Caches, DecoderLock, Limits, Sequence
from offload.engine.session import Models, Session, load_session, require_sessions, save_session
from offload.engine.step import SpeculationStep
from offload.engine.text import TextStream, Tokenizer
from offload.engine.text_arguments import TextArguments
from offload.errors import UserError
from offload.machine import cpu_name, giving_back_memory
from offload.memory.plan import MemoryPlan
from offload.model.target import Target
from offload.planning.selector import TreeChoice, TreeSelector
from offload.sampling.grammar import Grammar
from offload.sampling.grammar_mask import Grammars
from offload.sampling.sampler import Sampler
from offload.thread_waiting import ThreadWaiting
from offload.threads import Mode, ThreadPolicy
from offload.trees.topology import Shape, chain
from offload.trees.verification import Rule, find_rule
from offload.units import Sampling, check_lenience, require, whole_number

_ROOT = chain(0)
_UNLIMITED = Limits()


class DecoderConfig(NamedTuple):
    """What loading has found out and decided for all runs."""

    plan: MemoryPlan
    models: Models
    trees: TreeSelector
    rule: Rule  # where a run names none
    threads: ThreadPolicy
    choice: KernelChoice = NO_KERNELS
    tokenizer: Tokenizer | None = None
    end_ids: frozenset[int] = frozenset()  # tokens that end a text
    invariance: Invariance = Invariance()
    sources: GuessSources = NO_SOURCES
    grammars: Grammars | None = None


class ValidatedRequest(NamedTuple):
    """What a run begins with, of a request that can be served."""

    prompt_ids: list[int]
    rule: Rule
    choice: TreeChoice


class Decoder:
    """An offloaded model, ready to generate. Build it with `offload.load`; use it as a context
    manager or `close` it.

    One that is dropped closes itself.

    It writes as many texts at a time as it was loaded for, each in a place of its own; where that
    is one, a sequence that is begun overtakes the one before. Any thread may use it, one at a time:
    while a step or `generate` is under way others get a `UserError`, but for `close`, which ends
    it.

    Attributes:
        target, drafter, identities: the two models, for measuring them, and what files call them by.
        rule: of acceptance, where a run names none.
        plan: where every byte lies.
        end_ids: tokens that end a text.
        notes: lines for the user about what is not as fast as it could be, not exact, or odd about
            weights once seen.
        invariance: whether each token has the same bits whatever tree, draft or prompt it came
            with.
        sources: of guesses that are no models.
        num_score_passes: over the weights, made by `score_texts`.
        comparisons: how kernels have done on this GPU against what runs without them; none on a
            CPU.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        settled: DecoderConfig,
        *,
        resources: ExitStack,
        notes: list[str],
    ) -> None:
        self.plan = settled.plan
        self._models = settled.models
        self._trees = settled.trees
        self.rule = settled.rule
        self.threads = settled.threads
        self._kernels, self.comparisons = settled.choice
        self.tokenizer = settled.tokenizer
        self.end_ids = settled.end_ids
        self.invariance = settled.invariance
        self.sources = settled.sources
        self.identities = self._models.identities
        self.target = target
        self.drafter = drafter
        self._resources = resources
        self._vocab_size = target.vocab_size
        self._start = target.start
        own_grammars = Grammars(self.tokenizer, self._vocab_size, self.end_ids)
        self._grammars = settled.grammars or own_grammars
        self._turn = DecoderLock(target.computing)
        self._waiting = ThreadWaiting()
        self._encoding = threading.Lock()
        resources.callback(self._waiting.close)
        weakref.finalize(self, _close_dropped, resources).atexit = False
        sets = [Caches(target.new_cache(), drafter.new_state()) for _ in range(self.num_parallel)]
        if self.num_parallel > 1:
            target.share_sweeps([one.target for one in sets])
            drafter.share_states([one.draft for one in sets])
        self._pool = CachePool(sets, self._start)
        self.num_score_passes = 0
        # a method of this would make a cycle
        self._compute_in = partial(_compute_in, self._waiting)
        self._forest = SpeculationStep(
            target, drafter, self.threads, self._compute_in, self._prompt_rows, self._trees.took
        )
        found = [
            self.plan.num_slots and target.stream.note,
            target.experts and target.experts.carrier.note,
        ]
        self.notes = notes  # which the first sweep may add to
        self.notes += dict.fromkeys(note for note in found if note)

    def __repr__(self) -> str:
        is_open = hasattr(self, "_pool")
        state = f"rule={self.rule.name!r}, num_threads={self.num_threads}"
        return f"Decoder({state if is_open else 'closed'})\n{self.plan}"

    def begin(
        self,
        tokens: abc.Sequence[int],
        sampling: Sampling,
        *,
        rule: Rule | None = None,
        shape: Shape = _ROOT,
        limits: Limits = _UNLIMITED,
        keeps: bool = False,
        grammar: Grammar | None = None,
    ) -> Sequence:
        """A new sequence, with the prompt's tokens and the start that some models want, overtakes
        the one before.

        Args:
            rule, shape: those of the decoder, and no tree, where they are left out.
            keeps: the keys and values of all tokens that it shares with the sequence before, but
                for its last.
            grammar: that the new text must keep.
        """
        with self._turn.held():
            rule = rule or self.rule
            masks = [] if grammar is None else [self._grammars.mask(grammar)]
            how = (rule.drafting, self._kernels, self.target.send)
            sampler = Sampler(sampling, self._vocab_size, *how, adjustments=masks)
            begun = with_start(whole_numbers(tokens), self._start)
            has_draft = self._trees.has_draft
            # an encoder's is no text
            sampler.begin(begun[begun.index(self._start[0]) :] if self._start else begun)
            sequence = Sequence(begun, sampler, rule, shape, limits, has_draft=has_draft)
            self._pool.lend(sequence, keeps=keeps)
            return sequence

    def step(self, sequence: Sequence) -> list[int]:
        """One round of speculation: the target's weights cross the link exactly once.

        Returns the newly accepted tokens as far as they count, at least one, which the sequence has
        as well. Raises `UserError` where the sequence was overtaken, the decoder closed, or another
        thread is using it.
        """
        with self._turn.stepping():
            while not (counted := self._pass([sequence])[0]) and not sequence.is_taken_in:
                pass  # a long prompt beside others comes in parts
            return counted

    def _pass(self, sequences: abc.Sequence[Sequence]) -> list[list[int]]:
        """One step of all of them; see `SpeculationStep`."""
        return self._forest.step(sequences)

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        *,
        num_samples: Literal[1] = 1,
        tree: str | None = None,
        rule: str | None = None,
        **how: Unpack[TextArguments],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Prompt | abc.Sequence[Prompt],
        *,
        num_samples: int = 1,
        tree: str | None = None,
        rule: str | None = None,
        **how: Unpack[TextArguments],
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: Prompt | abc.Sequence[Prompt],
        *,
        num_samples: int = 1,
        tree: str | None = None,
        rule: str | None = None,
        **how: Unpack[TextArguments],
    ) -> Generation | list[Generation]:
        """Generate to the end: one text, or as many at a time as the decoder was loaded for.

        Args:
            prompt: text, put into the model's chat template where it has one, the messages of a
                conversation, such as `[{"role": "user", "content": "Hello"}]`, or token ids; or
                several of these in a list.
            num_samples: texts of each prompt, with its seed and those behind it; one after another
                in the result, prompt by prompt. More than one, and several prompts, give a list.
            tree: another tree than the one given to `load`, no larger than that one.
            rule: another rule than the one given to `load`: match, sequoia, specinfer, spectr or
                topk.
            how: `max_new_tokens`, `temperature` and the others of `TextArguments`.

        Raises:
            UserError: empty prompt, no room for it, settings out of range, or a decoder that
            another thread is using.
            ReadError: the disk failed.
        """
        several = several_of(prompt)
        if several is None and whole_number(num_samples, "`num_samples`") == 1:
            with self._turn.held():
                run = self.start(request_of(prompt, how), tree=tree, rule=rule)  # type: ignore[arg-type]
                try:
                    deque(run, maxlen=0)
                finally:
                    self._pool.release(run.sequence)
                return run.result()
        prompts: abc.Sequence[Prompt] = [prompt] if several is None else several  # type: ignore[list-item]
        requests = [one for own in prompts for one in samples_of(request_of(own, how), num_samples)]
        with self._turn.held():
            return in_order(self, requests, tree=tree, rule=rule)

    def stream(
        self,
        prompt: Prompt,
        *,
        tree: str | None = None,
        rule: str | None = None,
        **how: Unpack[TextArguments],
    ) -> Iterator[str]:
        """Yield pieces of one text as they are accepted; the arguments are those of `generate`."""
        return iter(self.start(request_of(prompt, how), tree=tree, rule=rule))

    def run(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        max_new_tokens: int,
        stop: str | abc.Sequence[str] | None = None,
        raw: bool = False,
        tree: str | None = None,
        rule: str | None = None,
        continues: bool = False,
    ) -> Run:
        """Prepare a generation: iterate over it for pieces of text, ask it for `result()` at any
        time.

        Args:
            sampling: how tokens are drawn; the other arguments are those of `generate`.
            continues: keep the keys and values of all tokens that the prompt shares with the run
                before; but for `invariance` they differ from the prompt's own by rounding.
        """
        request = Request(prompt, sampling, max_new_tokens, stop=stop, raw=raw)
        return self.start(request, tree=tree, rule=rule, continues=continues)

    @property
    def num_parallel(self) -> int:
        """Texts that may be written at a time."""
        return self.plan.parallel

    @property
    def _prompt_rows(self) -> int:
        """Return how many prompt tokens one pass takes in.

        A decoder of one text takes in all of a prompt, by as many sweeps as that needs.
        """
        return self.plan.max_prompt_rows if self.num_parallel > 1 else sys.maxsize

    def start(
        self,
        request: Request,
        *,
        tree: str | None = None,
        rule: str | None = None,
        continues: bool = False,
    ) -> Run:
        """Prepare a generation from a request, as `run` does.

        At most `num_parallel` - 1 other runs may be unreleased. Raises `UserError`.
        """
        sampling = request.sampling
        prompt_ids, acceptance, choice = self.check(request, tree=tree, rule=rule)
        start_ids = self._start or prompt_ids  # no text goes on that an encoder reads
        # before a place is taken: it may fail
        text = TextStream(self.tokenizer, start_ids, request.stops)
        num_new = request.num_new(prompt_ids, self.plan.context, self._start)
        limits = Limits(num_new, self.end_ids)
        sequence = self.begin(
            prompt_ids,
            sampling,
            rule=acceptance,
            shape=choice.shape,
            limits=limits,
            keeps=continues,
            grammar=request.grammar,
        )
        sequence.follow(
            choice.chains,
            lambda num: self._trees.for_run(sampling, acceptance.name, tree, num).shape,
        )
        sequence.stats.num_prompt_tokens, sequence.num_logprobs = (
            len(prompt_ids),
            request.num_logprobs,
        )
        setup = RunInfo(self.plan, choice, self.comparisons, self.invariance, acceptance.lenience)
        return Run(self.step, self._turn, sequence, text, setup)

    def check(
        self, request: Request, *, tree: str | None = None, rule: str | None = None
    ) -> ValidatedRequest:
        """What a run of this request begins with; another thread may ask while runs are under way.

        Raises `UserError`.
        """
        bounds = (self.plan.context, self.plan.has_longest_context)
        with self._encoding:
            prompt_ids = request.ids(self.tokenizer, self._vocab_size, *bounds, start=self._start)
        acceptance = self.rule if rule is None else self._other_rule(rule)
        check_lenience(acceptance.lenience, acceptance.name, request.sampling)
        if request.grammar is not None:
            self._grammars.mask(request.grammar)
        return ValidatedRequest(
            prompt_ids, acceptance, self._trees.for_run(request.sampling, acceptance.name, tree)
        )

    def sweep(self, runs: abc.Sequence[Run]) -> None:
        """Run one pass over the weights for all of these; what each gains is there to `take`.

        Raises `UserError` where one was overtaken, the decoder closed, or another thread is using
        it.
        """
        with self._turn.stepping():
            if writing := [run.sequence for run in runs if run.is_writing]:
                self._pass(writing)

    def release(self, run: Run) -> None:
        """Let others have its keys and values; it writes nothing more. Again it does nothing."""
        with self._turn.held():
            self._pool.release(run.sequence)

    def score_texts(self, texts: abc.Sequence[tuple[abc.Sequence[int], int]]) -> list[TextScore]:
        """How likely the ends of texts are: each is given as token ids, and from which of them on
        they count.

        Texts share passes, `num_score_passes` in all, and those that begin alike the rows of their
        beginning. Raises `UserError` for a text that is longer than the context, or has nothing
        before what counts.
        """
        wanted = [
            ScoreRequest(encode(self.tokenizer, text, self._vocab_size), first)
            for text, first in wanted_of(texts)
        ]
        # nothing is asked of the last one
        most = max((len(tokens) - 1 for tokens, _ in wanted), default=0)
        rule = "a text must fit, but for its last token, into the context"
        require(
            most <= self.plan.context,
            f"{rule} of {self.plan.context} tokens",
            most,
            "raise `context`",
        )
        require(
            not self._start, "models with an encoder score no texts", "one", "choose another model"
        )
        with self._turn.stepping():
            scorer = Scorer(
                self.target,
                self._pool.borrow().target,
                self.plan.max_prompt_rows + self.plan.num_nodes,
            )
            self._compute_in(self.threads.modes(self.plan.max_prompt_rows).sweep)
            scores = scorer.score(wanted)
            self.num_score_passes += scorer.num_passes
            return scores

    @property
    def num_threads(self) -> int:
        """The most that compute at once."""
        return self.threads.most

    def tree_choice(self, sampling: Sampling) -> TreeChoice:
        """The tree that a run with these settings gets, and why."""
        return self._trees.for_run(sampling, self.rule.name)

    def save_session(
        self,
        path: str | os.PathLike[str],
        messages: list[dict[str, str]] | None = None,
        num_turns: int = 0,
    ) -> None:
        """Keep the text that was written last, with its keys and values, in a file; see
        `load_session`.

        `messages` and `num_turns` are a conversation's. Raises `UserError` where nothing can be
        written.
        """
        require_sessions(self._start, self.num_parallel)
        with self._turn.held():
            save_session(
                Path(path), self._models, self._pool, self._arithmetic, messages, num_turns
            )

    def load_session(self, path: str | os.PathLike[str]) -> Session:
        """Have the keys and values of a file: the next `run(..., continues=True)` keeps what it
        shares with their text.

        Raises `UserError` for files of other weights or another type, longer ones than the context,
        broken ones.
        """
        require_sessions(self._start, self.num_parallel)
        with self._turn.held():
            return load_session(Path(path), self._models, self._pool, self._arithmetic)

    @property
    def _arithmetic(self) -> str:
        """What the bits of keys and values depend on here; empty where they depend on the rows
        beside as well.
        """
        if not self.invariance.holds:
            return ""
        # row sizes are those that hold with all of them
        counts = ", ".join(map(str, self.invariance.thread_counts))
        return f"{cpu_name()}, torch {torch.__version__}, {self.plan.device}, {counts} threads"

    def close(self) -> None:
        """Stop the readers, close the files, drop weights and buffers, once a step of another
        thread is over.
        """
        with self._turn.last(), giving_back_memory():
            self._resources.close()
            if hasattr(self, "_pool"):
                self._pool.take_back()
                del self.target, self.drafter, self._pool, self._forest
                self.sources = NO_SOURCES

    def __enter__(self) -> "Decoder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def encode(
        self, prompt: Prompt, *, raw: bool = False, tools: abc.Sequence[Tool] = ()
    ) -> list[int]:
        """Token ids of a prompt as `generate` takes it, checked; any thread may ask. Raises
        `UserError`.

        Args:
            tools: functions that the chat template tells the model of, as OpenAI's protocol
                describes them.
        """
        with self._encoding:  # not every tokenizer may be used by two threads
            return encode(self.tokenizer, prompt, self._vocab_size, raw=raw, tools=tools)

    def room(self, prompt_ids: abc.Sequence[int]) -> int:
        """New tokens that may follow on a prompt; less than one where it fills the context by
        itself.
        """
        return self.plan.context - len(self._start or prompt_ids)

    def _other_rule(self, name: str) -> Rule:
        rule = find_rule(name, self.rule.lenience)
        has_drawn = self._models.draft is not None and rule.drafting.keeps_distributions
        if has_drawn and self.plan.num_nodes > 1 and not self.plan.distribution_bytes:
            raise UserError(
                f"rule {name} keeps the draft's distributions, memory was planned without them for {self.rule.name}: "
                f'give rule="{name}" to load()'
            )
        return rule


def _compute_in(waiting: ThreadWaiting, mode: Mode) -> None:
    torch.set_num_threads(mode.num_threads)
    if mode.num_threads > 1:
        waiting.let_sleep(mode.is_asleep)


def _close_dropped(resources: ExitStack) -> None:
    """Hooks of the models make a cycle with them, which would hold weights, threads and files until
    it is collected.
    """
    # a reader that collects garbage cannot wait for itself
    if threading.current_thread().name.startswith("offload-"):
        threading.Thread(target=resources.close, daemon=True).start()
    else:
        resources.close()
