"""The decoder that `offload.load` returns: texts, requests, scores and sessions.

`token_decoder` writes the tokens of a text.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack, overload

from offload.declaration import whole_number
from offload.engine.generation import Generation, Run
from offload.engine.request import (
    Prompt,
    Request,
    TemplateOptions,
    Tool,
    encode,
    request_of,
    require_request,
    samples_of,
    several_of,
)
from offload.engine.scheduler import in_order
from offload.engine.scoring import Scorer, ScoreRequest, TextScore, wanted_of
from offload.engine.sequence import StopCriteria
from offload.engine.session import Session, load_session, require_sessions, save_session
from offload.engine.text_arguments import TextArguments
from offload.engine.text_stream import TextStream
from offload.engine.token_decoder import TokenDecoder
from offload.errors import UserError, require
from offload.planning.choice import TreeChoice
from offload.rules import check_lenience
from offload.sampling_options import Sampling
from offload.trees.verification import Rule, find_rule


class Decoder(TokenDecoder):
    """An offloaded model, ready to generate. Build it with `offload.load`; use it as a context
    manager or `close` it, see `TokenDecoder`.

    Attributes:
        target, drafter, identities: the two models, for measurements, and their names in files.
        rule: of acceptance, unless a run names another.
        plan: the use of every byte of memory.
        end_ids: tokens that end a text.
        notes: lines for the user on what is slower than it could be, not exact, or odd about
            weights.
        invariance: whether a token's bits are the same for any tree, draft or batch of prompts.
        sources: sources of guesses other than models.
        num_score_passes: passes over the weights by `score_texts`.
        comparisons: kernels compared on this GPU with what runs without them; none on a CPU.
    """

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        *,
        num_samples: Literal[1] = 1,
        tree: str | None = None,
        rule: str | None = None,
        **options: Unpack[TextArguments],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        num_samples: int = 1,
        tree: str | None = None,
        rule: str | None = None,
        **options: Unpack[TextArguments],
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        num_samples: int = 1,
        tree: str | None = None,
        rule: str | None = None,
        **options: Unpack[TextArguments],
    ) -> Generation | list[Generation]:
        """Generate to the end: one text, or as many at a time as the decoder was loaded for.

        Args:
            prompt: text, for which the model's chat template is used if it has one; the messages of
                a conversation, such as `[{"role": "user", "content": "Hello"}]`; token ids; or a
                list of several of these.
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
            with self.lock.taken():
                run = self.start(request_of(prompt, options, tree, rule))  # type: ignore[arg-type]
                try:
                    deque(run, maxlen=0)
                finally:
                    self._pool.release(run.sequence)
                return run.result()
        prompts: Sequence[Prompt] = [prompt] if several is None else several  # type: ignore[list-item]
        asked = [request_of(text, options, tree, rule) for text in prompts]
        requests = [
            request for requested in asked for request in samples_of(requested, num_samples)
        ]
        with self.lock.taken():
            return in_order(self, requests)

    def stream(
        self,
        prompt: Prompt,
        *,
        tree: str | None = None,
        rule: str | None = None,
        **options: Unpack[TextArguments],
    ) -> Iterator[str]:
        """Yield pieces of one text as they are accepted; the arguments are those of `generate`."""
        return iter(self.start(request_of(prompt, options, tree, rule)))

    def run(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        max_new_tokens: int,
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
                before; without `invariance` they differ from the prompt's own by rounding.
        """
        request = Request(prompt, sampling, max_new_tokens, raw=raw, tree=tree, rule=rule)
        return self.start(request, continues=continues)

    def start(self, request: Request, *, continues: bool = False) -> Run:
        """Prepare a generation from a request, as `run` does.

        At most `num_parallel` - 1 other runs may be unreleased. Raises `UserError`.
        """
        request = self.prepare(request)
        prompt_ids: Any = request.prompt
        # once more: passes since then may have shown more
        choice = self._tree_of(request)
        # a text whose prompt an encoder reads cannot be continued
        start_ids = self._start_ids or prompt_ids
        # before a place is taken, since it may fail
        text = TextStream(self.tokenizer, start_ids, request.stops)
        num_new = request.num_new(prompt_ids, self.plan.context, self._start_ids)
        limits = StopCriteria(num_new, request.end_ids(self.tokenizer, self.end_ids))
        sequence = self.begin(
            prompt_ids,
            request.sampling,
            rule=self._rule_of(request),
            shape=choice.shape,
            limits=limits,
            keeps=continues,
            grammar=request.grammar,
        )
        sequence.follow(lambda num: self._tree_of(request, num).shape)
        sequence.stats.num_prompt_tokens = len(prompt_ids)
        sequence.num_logprobs = request.num_logprobs
        return Run(self, sequence, text, choice)

    def prepare(self, request: Request) -> Request:
        """Return the request with the ids of its prompt; any thread may ask. Raises `UserError`.

        What this decoder has checked already is not checked again.
        """
        require_request(request)
        if request.is_prepared_by(self):
            return request
        bounds = (self.plan.context, self.plan.has_longest_context)
        with self._encoding:
            prompt_ids = request.ids(
                self.tokenizer, self._vocab_size, *bounds, start_ids=self._start_ids
            )
        acceptance = self._rule_of(request)
        check_lenience(acceptance.lenience, acceptance.name, request.sampling)
        # in the caller's thread: passes do not wait for compiling and choosing
        kept = None if request.grammar is None else self._grammars.compiled(request.grammar)
        self._tree_of(request)
        if request.num_prompt_logprobs is not None:
            self.require_scores(len(prompt_ids))
        prepared = request.prepared(prompt_ids, self, kept)
        # this probes the template, and passes would wait for it
        prepared.end_ids(self.tokenizer, self.end_ids)
        return prepared

    def step_all(self, runs: Sequence[Run]) -> list[Exception | None]:
        """Run one pass over the weights for all of these; `take` returns each one's gain.

        Returns the errors of single runs. Raises `UserError` if a run was overtaken, the decoder
        closed, or another thread is using it.
        """
        with self.lock.stepping():
            writing = [run for run in runs if run.is_writing]
            gained = self._pass([run.sequence for run in writing]) if writing else []
        outcomes = dict(zip(writing, gained, strict=True))
        return [
            outcome if isinstance(outcome := outcomes.get(run), Exception) else None for run in runs
        ]

    def release(self, run: Run | Scorer) -> None:
        """Give the run's caches back; the run is over. A second call does nothing."""
        with self.lock.taken():
            self._pool.release(run if isinstance(run, Scorer) else run.sequence)

    def score_texts(self, texts: Sequence[tuple[Sequence[int], int]]) -> list[TextScore]:
        """Return the log probabilities of the ends of texts.

        Each is given as token ids and the index of the first scored one. Texts share passes,
        `num_score_passes` in all, and those that begin alike share those rows. Raises `UserError`
        for a text that is longer than the context, or has no token before the scored ones.
        """
        wanted = [
            ScoreRequest(encode(self.tokenizer, text, self._vocab_size), first)
            for text, first in wanted_of(texts)
        ]
        # the last token needs no pass
        self.require_scores(max((len(tokens) - 1 for tokens, *_ in wanted), default=0))
        with self.lock.taken():
            scorer = self.start_scores(wanted)
            try:
                while self.step_scores(scorer):
                    pass
            finally:
                self.release(scorer)
            return scorer.scores()

    def require_scores(self, num_rows: int) -> None:
        """Raise `UserError` if texts of this many rows cannot be scored."""
        requirement = "a text must fit, but for its last token, into the context"
        requirement = f"{requirement} of {self.plan.context} tokens"
        require(num_rows <= self.plan.context, requirement, num_rows, "raise `context`")
        turn = self.plan.turning_point or num_rows
        requirement = (
            f"texts are scored up to the {turn} tokens at which longrope changes its factors"
        )
        require(num_rows <= turn, requirement, num_rows, "cut it")
        require(
            not self._start_ids,
            "models with an encoder score no texts",
            "one",
            "choose another model",
        )

    def start_scores(self, texts: Sequence[ScoreRequest]) -> Scorer:
        """Return a scorer of texts, which occupies a place until it is released."""
        most_rows = self.plan.max_prompt_rows + self.plan.num_nodes
        with self.lock.taken():
            scorer = Scorer(self.target, None, most_rows, texts)
            self._pool.acquire_empty(scorer)
            return scorer

    def step_scores(self, scorer: Scorer) -> bool:
        """Run one pass over the weights; return True if there was work left."""
        with self.lock.stepping():
            self._waiting.compute_in(self.threads.modes(self.plan.max_prompt_rows).sweep)
            is_stepped = scorer.step()
            self.num_score_passes += is_stepped
            return is_stepped

    def tree_choice(self, sampling: Sampling, tree: str | None = None) -> TreeChoice:
        """Return the tree that a run with these settings gets, and why."""
        return self.trees.for_run(sampling, self.rule.name, tree)

    def save_session(
        self,
        path: str | os.PathLike[str],
        messages: list[dict[str, str]] | None = None,
        num_turns: int = 0,
    ) -> None:
        """Save the text written last, with its keys and values, to a file; see `load_session`.

        `messages` and `num_turns` are a conversation's. Raises `UserError`.
        """
        require_sessions(self._start_ids, self.num_parallel, self.plan.kv_dtype)
        with self.lock.taken():
            transcript = (messages, num_turns)
            save_session(Path(path), self.identities, self._pool, self.arithmetic, *transcript)

    def load_session(self, path: str | os.PathLike[str]) -> Session:
        """Read a file's keys and values: the next run that `continues` keeps what it shares.

        Raises `UserError` for files of other weights or types, longer than the context, or broken.
        """
        require_sessions(self._start_ids, self.num_parallel, self.plan.kv_dtype)
        with self.lock.taken():
            return load_session(Path(path), self.identities, self.plan, self._pool, self.arithmetic)

    @property
    def arithmetic(self) -> str:
        """Return the settings on which bits of keys and values depend, see `Invariance.arithmetic`."""
        return self.invariance.arithmetic(self.plan.device)

    def encode(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        tools: Sequence[Tool] = (),
        think: bool | None = None,
    ) -> list[int]:
        """Return the token ids of a prompt as `generate` takes it; any thread may ask.

        `tools` are functions for the chat template, in the form of OpenAI's protocol; `think` as in
        `Chat`. Raises `UserError`.
        """
        with self._encoding:
            options = TemplateOptions(tools, think=think)
            return encode(self.tokenizer, prompt, self._vocab_size, raw=raw, options=options)

    def _tree_of(self, request: Request, num_texts: int = 1) -> TreeChoice:
        """Return the tree of a request if this many texts share a pass. Raises `UserError`."""
        rule = self._rule_of(request).name
        return self.trees.for_run(request.sampling, rule, request.tree, num_texts)

    def _rule_of(self, request: Request) -> Rule:
        return self.rule if request.rule is None else self._other_rule(request.rule)

    def _other_rule(self, name: str) -> Rule:
        rule = find_rule(name, self.rule.lenience)
        has_drawn = self.trees.is_ranked and rule.drafting.keeps_distributions
        if has_drawn and self.plan.num_nodes > 1 and not self.plan.distribution_bytes:
            raise UserError(
                f"`rule` {name} keeps the draft's distributions, memory was planned without them for "
                f"{self.rule.name}: load the model with `rule` {name}"
            )
        return rule
