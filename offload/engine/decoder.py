"""The decoder: a streamed target, a resident drafter, and the step that turns one sweep into many tokens.

Invariant: the distribution of what is emitted depends on the target and the sampling settings alone. Tree, drafter,
memory budget and thread count change only how long it takes; with the rules `match` and `topk` one seed gives one text,
too.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from offload.calibration.kernel_selection import NO_KERNELS, KernelChoice
from offload.config import Sampling
from offload.drafting.base import Drafter
from offload.engine.generation import Generation, Run, Setup
from offload.engine.request import Prompt, Request, encode
from offload.engine.text import TextStream, Tokenizer
from offload.errors import UserError
from offload.memory.plan import MemoryPlan
from offload.model.target import Target
from offload.planning.tree_policy import TreeChoice, Trees
from offload.sampling.sampler import Sampler
from offload.stats import Stats
from offload.tree.topology import Shape
from offload.verification.rules import Rule, find_rule


class Decoder:
    """An offloaded model, ready to generate. Build it with `offload.load`; use it as a context manager or `close` it.

    It writes one text at a time, for one thread: a run that is begun overtakes the one before. Several prompts are
    several calls, for which the weights that stay in memory stay there.

    Attributes:
        target, drafter: the two models, for whoever measures them.
        rule: of acceptance, where a run names none.
        plan: where every byte lies.
        tokenizer: the checkpoint's own, or None.
        notes: lines for the user about what is not as fast as it could be.
        comparisons: how kernels have done on this GPU against what runs without them; none on a CPU.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        plan: MemoryPlan,
        trees: Trees,
        rule: Rule,
        tokenizer: Tokenizer | None,
        end_ids: frozenset[int],
        num_threads: int,
        resources: ExitStack,
        notes: Sequence[str] = (),
        choice: KernelChoice = NO_KERNELS,
    ) -> None:
        self.target, self.drafter, self._trees, self.rule = target, drafter, trees, rule
        self._end_ids, self._vocab_size, self._resources = end_ids, target.vocab_size, resources
        self.plan, self.tokenizer, self.num_threads, self._is_closed = plan, tokenizer, num_threads, False
        self._num_runs, self._kernels, self.comparisons = 0, choice.kernels, choice.comparisons
        self._held: list[int] = []  # caches hold keys and values of these tokens, or of the first of them
        self.notes = [*notes, *([target.stream.note] if target.stream.note and plan.num_slots else [])]

    def begin(self, sampling: Sampling, rule: Rule, keep: Sequence[int] = ()) -> Sampler:
        """A new sequence begins and overtakes the one before; returns the sampler that `step` draws with.

        Args:
            keep: tokens that it begins with; of these the keys and values that the sequence before has left are kept.
        """
        self._keep(keep)
        self._num_runs += 1
        return Sampler(sampling, self._vocab_size, rule.drafting, self._kernels, self.target.send)

    def step(self, tokens: Sequence[int], shape: Shape, rule: Rule, sampler: Sampler, stats: Stats) -> list[int]:
        """One round of speculation: the target's weights cross the link exactly once.

        Args:
            tokens: what is committed so far; the last of them is the root of the tree.
            rule: whose drafting distribution `sampler` carries.

        Returns:
            the newly accepted tokens, at least one.
        """
        stream, started = self.target.stream, time.perf_counter()
        moved_bytes, stalled_s = stream.bytes_read, stream.stall_s
        self._held = list(tokens)
        tree = self.drafter.grow(shape, tokens, sampler)
        grown = time.perf_counter()
        logits = self.target.score(tree, tokens)
        self.target.wait()
        scored = time.perf_counter()
        accepted = rule.verify(tree, logits, sampler, len(tokens) - 1)
        self._held += accepted.tokens[:-1]  # before caches hold them: cut short in between, they hold fewer
        self.target.commit(accepted.nodes)
        self.drafter.commit(accepted.nodes, accepted.tokens)
        stats.add_step(
            draft_s=grown - started,
            sweep_s=scored - grown,
            verify_s=time.perf_counter() - scored,
            stall_s=stream.stall_s - stalled_s,
            num_bytes=stream.bytes_read - moved_bytes,
        )
        stats.peak_device_bytes = self.target.peak_device_bytes
        return accepted.tokens

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        stop: str | Sequence[str] | None = None,
        raw: bool = False,
        tree: str | None = None,
        rule: str | None = None,
    ) -> Generation:
        """Generate to the end.

        Args:
            prompt: text, put into the model's chat template where it has one, the messages of a conversation, such as
                `[{"role": "user", "content": "Hello"}]`, or token ids.
            max_new_tokens: at most so many.
            temperature, top_p, top_k, seed: see `Sampling`; temperature 0 is greedy.
            stop: strings that end the text; they are not part of it.
            raw: leave the chat template out.
            tree: another tree than the one given to `load`, no larger than that one.
            rule: another rule than the one given to `load`: match, sequoia, specinfer, spectr or topk.

        Raises:
            UserError: empty prompt, no room for it in the context, or settings out of range.
            ReadError: the disk failed.
        """
        sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
        run = self.run(prompt, sampling, max_new_tokens=max_new_tokens, stop=stop, raw=raw, tree=tree, rule=rule)
        for _ in run:
            pass
        return run.result()

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        stop: str | Sequence[str] | None = None,
        raw: bool = False,
        tree: str | None = None,
        rule: str | None = None,
    ) -> Iterator[str]:
        """Yield pieces of text as they are accepted; the arguments are those of `generate`."""
        sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
        return iter(self.run(prompt, sampling, max_new_tokens=max_new_tokens, stop=stop, raw=raw, tree=tree, rule=rule))

    def run(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        max_new_tokens: int,
        stop: str | Sequence[str] | None = None,
        raw: bool = False,
        tree: str | None = None,
        rule: str | None = None,
        continues: bool = False,
    ) -> Run:
        """Prepare a generation: iterate over it for pieces of text, ask it for `result()` at any time.

        Args:
            sampling: how tokens are drawn; the other arguments are those of `generate`.
            continues: keep the keys and values of all tokens that the prompt shares with the run before. They were
                computed in passes of other sizes than a prompt's, and so may differ from its own by rounding.
        """
        if self._is_closed:
            raise UserError("this decoder is closed: load the model again")
        request = Request(prompt, sampling, max_new_tokens, stop, raw)
        prompt_ids = request.ids(self.tokenizer, self._vocab_size, self.plan.context)
        acceptance = self.rule if rule is None else self._other_rule(rule)
        choice = self._trees.for_run(sampling, acceptance.name, tree)
        shape = choice.shape
        stats = Stats(tree_num_nodes=shape.num_nodes, tree_depth=shape.depth, is_tree_dynamic=choice.is_dynamic)
        sampler = self.begin(sampling, acceptance, prompt_ids[:-1] if continues else ())
        stats.num_kept_tokens = self.target.num_cached
        number, num_known = self._num_runs, len(prompt_ids)

        def step(tokens: Sequence[int]) -> list[int]:
            nonlocal num_known
            if number != self._num_runs:
                raise UserError("this decoder has begun another generation or was closed: finish one before the next")
            if len(tokens) != num_known:  # a step was cut short, of which one model may know more than the other
                self._keep(tokens[:-1])
            num_known = 0
            accepted = self.step(tokens, shape, acceptance, sampler, stats)
            num_known = len(tokens) + len(accepted)
            return accepted

        return Run(
            step,
            prompt_ids,
            TextStream(self.tokenizer, prompt_ids, request.stops),
            Setup(sampling, acceptance.name, self.plan, choice, self.comparisons),
            max_new_tokens=max_new_tokens,
            end_ids=self._end_ids,
            stats=stats,
        )

    def tree_choice(self, sampling: Sampling) -> TreeChoice:
        """The tree that a run with these settings gets, and why."""
        return self._trees.for_run(sampling, self.rule.name)

    def close(self) -> None:
        """Stop the readers, close the files, drop weights and buffers."""
        self._resources.close()
        if not self._is_closed:
            self._is_closed = True
            self._num_runs += 1
            del self.target, self.drafter

    def __enter__(self) -> "Decoder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt as `generate` takes it, checked. Raises `UserError`."""
        return encode(self.tokenizer, prompt, self._vocab_size, raw=raw)

    def _keep(self, tokens: Sequence[int]) -> None:
        """Both models forget everything but the first of these tokens, as far as they have taken them in."""
        del self._held[num_shared(self._held, tokens) :]
        self.target.reset(len(self._held))
        self.drafter.reset(len(self._held))

    def _other_rule(self, name: str) -> Rule:
        rule = find_rule(name)
        if rule.drafting.keeps_distributions and self.plan.num_nodes > 1 and not self.plan.distribution_bytes:
            raise UserError(
                f"rule {name} keeps the draft's distributions, memory was planned without them for {self.rule.name}: "
                f'give rule="{name}" to load()'
            )
        return rule


def num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens at the beginning that two sequences have in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
