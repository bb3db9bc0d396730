"""The decoder: a streamed target, a resident drafter, and the step that turns one sweep into many tokens.

Invariant: the distribution of what is emitted depends on the target and the sampling settings alone. Tree, drafter,
memory and threads change only how long it takes; with the rules `match` and `topk` one seed gives one text, too.
Whoever loads with a `lenience` below 1 gives that up, and every result says so.
"""

import os
import threading
import time
import weakref
from collections import abc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from offload.calibration.invariance import Invariance
from offload.calibration.kernel_selection import NO_KERNELS, KernelChoice
from offload.config import Sampling, check_lenience
from offload.drafting.base import Drafter
from offload.drafting.sources import NO_SOURCES, Sources
from offload.engine.cache_pool import CachePool
from offload.engine.generation import Generation, Run, Setup
from offload.engine.logprobs import TokenLogprob, path_logprobs
from offload.engine.request import Prompt, Request, Tool, encode, with_start
from offload.engine.sequence import Caches, Limits, PassFigures, Sequence
from offload.engine.session import Models, Session, load_session, require_sessions, save_session
from offload.engine.text import TextStream, Tokenizer
from offload.engine.turn import Turn
from offload.errors import UserError
from offload.machine import cpu_name
from offload.memory.plan import MemoryPlan
from offload.model.target import Target
from offload.planning.tree_policy import TreeChoice, Trees
from offload.sampling.sampler import Sampler
from offload.threads.policy import Mode, ThreadPolicy
from offload.threads.waiting import ThreadWaiting
from offload.tree.topology import Shape, chain
from offload.verification.rules import Rule, find_rule

_ROOT, _UNLIMITED = chain(0), Limits()


class Settled(NamedTuple):
    """What loading has found out and decided for all runs."""

    plan: MemoryPlan
    models: Models
    trees: Trees
    rule: Rule  # where a run names none
    threads: ThreadPolicy
    choice: KernelChoice = NO_KERNELS
    tokenizer: Tokenizer | None = None
    end_ids: frozenset[int] = frozenset()  # tokens that end a text
    invariance: Invariance = Invariance()
    sources: Sources = NO_SOURCES


class Checked(NamedTuple):
    """What a run begins with, of a request that can be served."""

    prompt_ids: list[int]
    rule: Rule
    choice: TreeChoice


class Decoder:
    """An offloaded model, ready to generate. Build it with `offload.load`; use it as a context manager or `close` it.

    One that is dropped closes itself.

    It writes one text at a time: a sequence that is begun overtakes the one before. Any thread may use it, one at a
    time: while a step or `generate` is under way others get a `UserError`, but for `close`, which ends it.

    Attributes:
        target, drafter: the two models, for whoever measures them.
        rule: of acceptance, where a run names none.
        plan: where every byte lies.
        end_ids: tokens that end a text.
        notes: lines for the user about what is not as fast as it could be, or not exact.
        invariance: whether each token has the same bits whatever tree, draft or prompt it came with.
        sources: of guesses that are no models.
        comparisons: how kernels have done on this GPU against what runs without them; none on a CPU.
    """

    def __init__(
        self, target: Target, drafter: Drafter, settled: Settled, *, resources: ExitStack, notes: abc.Sequence[str] = ()
    ) -> None:
        (self.plan, self._models, self._trees, self.rule, self.threads, choice, self.tokenizer, self.end_ids,
         self.invariance, self.sources) = settled  # fmt: skip
        self._kernels, self.comparisons = choice
        self.target, self.drafter, self._resources = target, drafter, resources
        self._vocab_size, self._start = target.vocab_size, target.start
        self._turn, self._waiting, self._encoding = Turn(), ThreadWaiting(), threading.Lock()
        resources.callback(self._waiting.close)
        weakref.finalize(self, _close_dropped, resources).atexit = False
        self._pool = CachePool(Caches(target.new_cache(), drafter.new_state()), self._start)
        found = [target.stream.note if self.plan.num_slots else None]
        found.append(target.experts.carrier.note if target.experts else None)
        self.notes = [*notes, *dict.fromkeys(note for note in found if note)]

    def __repr__(self) -> str:
        state = f"rule={self.rule.name!r}, num_threads={self.num_threads}"
        state = state if hasattr(self, "_pool") else "closed"
        return f"Decoder({state})\n{self.plan}"

    def begin(
        self, tokens: abc.Sequence[int], sampling: Sampling, *,
        rule: Rule | None = None, shape: Shape = _ROOT, limits: Limits = _UNLIMITED, keeps: bool = False,
    ) -> Sequence:  # fmt: skip
        """A new sequence, with the prompt's tokens and the start that some models want, overtakes the one before.

        Args:
            rule, shape: those of the decoder, and no tree, where they are left out.
            keeps: the keys and values of all tokens that it shares with the sequence before, but for its last.
        """
        with self._turn.held():
            rule = rule or self.rule
            sampler = Sampler(sampling, self._vocab_size, rule.drafting, self._kernels, self.target.send)
            begun, has_draft = with_start(tokens, self._start), self._trees.has_draft
            sampler.begin(begun[begun.index(self._start[0]) :] if self._start else begun)  # an encoder's is no text
            sequence = Sequence(begun, sampler, rule, shape, limits, has_draft=has_draft)
            self._pool.lend(sequence, keeps=keeps)
            return sequence

    def step(self, sequence: Sequence) -> list[int]:
        """One round of speculation: the target's weights cross the link exactly once.

        Returns the newly accepted tokens as far as they count, at least one, which the sequence has as well. Raises
        `UserError` where the sequence was overtaken, the decoder closed, or another thread is using it.
        """
        with self._turn.stepping():
            return self._step(sequence)

    def _step(self, sequence: Sequence) -> list[int]:
        caches, tokens, sampler = sequence.caches, sequence.tokens, sequence.sampler
        caches.clear(len(tokens) - 1)  # of a step that was cut short they may hold more
        target, started = self.target, time.perf_counter()
        moved_before = target.moved
        num_new = len(tokens) - caches.target.length  # the root, and at first the prompt
        modes = self.threads.modes(_rows_alike(num_new - 1 + sequence.shape.num_nodes))
        self._compute_in(modes.draft)
        drafted = self.drafter.grow(sequence.shape, tokens, sampler, caches.draft)
        grown, num_rows = time.perf_counter(), _rows_alike(num_new - 1 + drafted.tree.num_nodes)
        modes = modes._replace(sweep=self.threads.modes(num_rows).sweep)
        self._compute_in(modes.sweep)
        scored_rows = self.target.score(drafted.tree, tokens, caches.target)
        logits = sampler.adjusted_rows(drafted.tree, scored_rows)
        self.target.wait()
        scored = time.perf_counter()
        accepted = sequence.rule.verify(drafted.tree, logits, sampler, len(tokens) - 1)
        num_top, logprobs = sequence.num_logprobs, list[TokenLogprob]()
        if num_top is not None:
            logprobs = path_logprobs(scored_rows, accepted.nodes, accepted.tokens, num_top)
        self.target.commit(accepted.nodes, tokens, caches.target)
        self.drafter.commit(drafted, accepted.nodes, accepted.tokens, sampler, caches.draft)
        counted = sequence.accept(accepted.tokens, logprobs)
        sequence.stats.first_guess.add(accepted.guesses[: len(counted)])
        sequence.stats.add_step(
            target.moved.since(moved_before),
            draft_s=grown - started,
            sweep_s=scored - grown,
            verify_s=time.perf_counter() - scored,
        )
        sequence.last_pass = PassFigures(
            drafted.tree.topology.parent_N.tolist(), drafted.tree.tokens, accepted.nodes, 1, grown - started,
            scored - grown, target.moved.since(moved_before),
        )  # fmt: skip
        if num_new == 1:
            self.threads.took(num_rows, draft_s=grown - started, sweep_s=scored - grown)
        sequence.stats.threads, sequence.stats.peak_device_bytes = modes, self.target.peak_device_bytes
        sequence.lengthen()
        return counted

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int = 0,
        repeat_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: abc.Mapping[int, float] | tuple[tuple[int, float], ...] = (),
        num_logprobs: int | None = None,
        stop: str | abc.Sequence[str] | None = None,
        raw: bool = False,
        tree: str | None = None,
        rule: str | None = None,
    ) -> Generation:
        """Generate to the end.

        Args:
            prompt: text, put into the model's chat template where it has one, the messages of a conversation, such as
                `[{"role": "user", "content": "Hello"}]`, or token ids.
            max_new_tokens: at most so many.
            temperature, top_p, top_k, min_p, seed: see `Sampling`; temperature 0 is greedy.
            repeat_penalty, presence_penalty, frequency_penalty, logit_bias: see `Sampling`; of greedy text as well.
            num_logprobs: tell each new token's, and those of so many of the likeliest, in `Generation.logprobs`.
            stop: strings that end the text; they are not part of it.
            raw: leave the chat template out.
            tree: another tree than the one given to `load`, no larger than that one.
            rule: another rule than the one given to `load`: match, sequoia, specinfer, spectr or topk.

        Raises:
            UserError: empty prompt, no room for it, settings out of range, or a decoder that another thread is using.
            ReadError: the disk failed.
        """
        sampling = Sampling(
            temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, repeat_penalty=repeat_penalty,
            presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, logit_bias=logit_bias,
        )  # fmt: skip
        request = Request(prompt, sampling, max_new_tokens, stop, raw, num_logprobs=num_logprobs)
        with self._turn.held():
            run = self.start(request, tree=tree, rule=rule)
            for _ in run:
                pass
            return run.result()

    def stream(
        self, prompt: Prompt, *, max_new_tokens: int = 128,
        temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, seed: int = 0,
        repeat_penalty: float = 1.0, presence_penalty: float = 0.0, frequency_penalty: float = 0.0,
        logit_bias: abc.Mapping[int, float] | tuple[tuple[int, float], ...] = (),
        stop: str | abc.Sequence[str] | None = None, raw: bool = False,
        tree: str | None = None, rule: str | None = None,
    ) -> Iterator[str]:  # fmt: skip
        """Yield pieces of text as they are accepted; the arguments are those of `generate`."""
        sampling = Sampling(
            temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, repeat_penalty=repeat_penalty,
            presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, logit_bias=logit_bias,
        )  # fmt: skip
        return iter(self.run(prompt, sampling, max_new_tokens=max_new_tokens, stop=stop, raw=raw, tree=tree, rule=rule))

    def run(
        self, prompt: Prompt, sampling: Sampling, *, max_new_tokens: int,
        stop: str | abc.Sequence[str] | None = None, raw: bool = False,
        tree: str | None = None, rule: str | None = None, continues: bool = False,
    ) -> Run:  # fmt: skip
        """Prepare a generation: iterate over it for pieces of text, ask it for `result()` at any time.

        Args:
            sampling: how tokens are drawn; the other arguments are those of `generate`.
            continues: keep the keys and values of all tokens that the prompt shares with the run before; but for
                `invariance` they differ from the prompt's own by rounding.
        """
        request = Request(prompt, sampling, max_new_tokens, stop, raw)
        return self.start(request, tree=tree, rule=rule, continues=continues)

    @property
    def num_parallel(self) -> int:
        """Texts that may be written at a time."""
        return 1

    def start(
        self, request: Request, *, tree: str | None = None, rule: str | None = None, continues: bool = False
    ) -> Run:
        """The same from a request, beside at most `num_parallel` - 1 runs that are not released yet.

        Raises `UserError`.
        """
        sampling, max_new_tokens = request.sampling, request.max_new_tokens
        prompt_ids, acceptance, choice = self.check(request, tree=tree, rule=rule)
        limits = Limits(max_new_tokens, self.end_ids)
        sequence = self.begin(prompt_ids, sampling, rule=acceptance, shape=choice.shape, limits=limits, keeps=continues)
        sequence.follow(choice.chains)
        sequence.stats.num_prompt_tokens, sequence.num_logprobs = len(prompt_ids), request.num_logprobs
        start_ids = self._start or prompt_ids  # no text goes on that an encoder reads
        text = TextStream(self.tokenizer, start_ids, request.stops)
        setup = Setup(self.plan, choice, self.comparisons, self.invariance, acceptance.lenience)
        return Run(self.step, self._turn, sequence, text, setup)

    def check(self, request: Request, *, tree: str | None = None, rule: str | None = None) -> Checked:
        """What a run of this request begins with; another thread may ask while runs are under way.

        Raises `UserError`.
        """
        bounds = (self.plan.context, self.plan.has_longest_context)
        with self._encoding:
            prompt_ids = request.ids(self.tokenizer, self._vocab_size, *bounds, start=self._start)
        acceptance = self.rule if rule is None else self._other_rule(rule)
        check_lenience(acceptance.lenience, acceptance.name, request.sampling)
        return Checked(prompt_ids, acceptance, self._trees.for_run(request.sampling, acceptance.name, tree))

    def advance(self, runs: abc.Sequence[Run]) -> list[str]:
        """One pass over the weights for all of these runs: the piece of text that each has gained by it.

        Raises `UserError` where one was overtaken, the decoder closed, or another thread is using it.
        """
        with self._turn.held():
            for sequence in [run.sequence for run in runs if run.is_writing]:
                self._step(sequence)
            return [run.take() for run in runs]

    def release(self, run: Run) -> None:
        """Let others have its keys and values; it writes nothing more. Again it does nothing."""

    @property
    def num_threads(self) -> int:
        """The most that compute at once."""
        return self.threads.most

    def _compute_in(self, mode: Mode) -> None:
        torch.set_num_threads(mode.num_threads)
        if mode.num_threads > 1:
            self._waiting.let_sleep(mode.is_asleep)

    def tree_choice(self, sampling: Sampling) -> TreeChoice:
        """The tree that a run with these settings gets, and why."""
        return self._trees.for_run(sampling, self.rule.name)

    def save_session(
        self, path: str | os.PathLike[str], messages: list[dict[str, str]] | None = None, num_turns: int = 0
    ) -> None:
        """Keep the text that was written last, with its keys and values, in a file; see `load_session`.

        `messages` and `num_turns` are a conversation's. Raises `UserError` where nothing can be written.
        """
        require_sessions(self._start)
        with self._turn.held():
            save_session(Path(path), self._models, self._pool, self._arithmetic, messages, num_turns)

    def load_session(self, path: str | os.PathLike[str]) -> Session:
        """Have the keys and values of a file: the next `run(..., continues=True)` keeps what it shares with their text.

        Raises `UserError` for files of other weights or another type, longer ones than the context, broken ones.
        """
        with self._turn.held():
            return load_session(Path(path), self._models, self._pool, self._arithmetic)

    @property
    def _arithmetic(self) -> str:
        """What the bits of keys and values depend on here; empty where they depend on the rows beside as well."""
        if not self.invariance.holds:
            return ""
        counts = ", ".join(map(str, self.invariance.thread_counts))  # row sizes are those that hold with all of them
        return f"{cpu_name()}, torch {torch.__version__}, {self.plan.device}, {counts} threads"

    def close(self) -> None:
        """Stop the readers, close the files, drop weights and buffers, once a step of another thread is over."""
        with self._turn.last():
            self._resources.close()
            if hasattr(self, "_pool"):
                self._pool.take_back()
                del self.target, self.drafter, self._pool
                self.sources = NO_SOURCES

    def __enter__(self) -> "Decoder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def encode(self, prompt: Prompt, *, raw: bool = False, tools: abc.Sequence[Tool] = ()) -> list[int]:
        """Token ids of a prompt as `generate` takes it, checked; any thread may ask. Raises `UserError`.

        Args:
            tools: functions that the chat template tells the model of, as OpenAI's protocol describes them.
        """
        with self._encoding:  # not every tokenizer may be used by two threads
            return encode(self.tokenizer, prompt, self._vocab_size, raw=raw, tools=tools)

    def room(self, prompt_ids: abc.Sequence[int]) -> int:
        """New tokens that may follow on a prompt; less than one where it fills the context by itself."""
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


def _rows_alike(num_rows: int) -> int:
    """Of passes whose times can be compared: trees of guesses have another size in every step."""
    return 1 << (num_rows - 1).bit_length()


def _close_dropped(resources: ExitStack) -> None:
    """Hooks of the models make a cycle with them, which would hold weights, threads and files until it is collected."""
    if threading.current_thread().name.startswith("offload-"):  # a reader that collects garbage cannot wait for itself
        threading.Thread(target=resources.close, daemon=True).start()
    else:
        resources.close()
