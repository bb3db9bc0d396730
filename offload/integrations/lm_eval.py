"""The model `offload` of EleutherAI's lm-eval: tasks are scored and written by as few passes as
memory allows.

    python -m offload.integrations.lm_eval run --model offload --model_args
    pretrained=big,draft=small --tasks ...

Invariant: texts are cut into tokens, windows and stop strings as lm-eval's own `hf` does, so that
results are its own.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from inspect import signature
from typing import Any, NoReturn

from offload.declaration import options_at
from offload.engine.conversation import render_chat
from offload.engine.decoder import Decoder
from offload.engine.generation import Generation
from offload.engine.load import load
from offload.engine.request import Request
from offload.engine.scheduler import write_all
from offload.errors import RunError, UserError, require
from offload.guarded_process import ProgramFailed
from offload.sampling_options import Sampling

try:
    from lm_eval import utils
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import (
        handle_stop_sequences,
        has_bos_prefix,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from tqdm import tqdm
except ModuleNotFoundError as error:
    raise UserError(
        f"this runs inside of lm-eval, and {error.name} is missing: pip install 'offload[eval]'"
    ) from None

# what a request is known by, a context, and what is scored behind it
Tokens = tuple[Any, list[int], list[int]]

_TEXTS_PER_CALL = 4096  # scored between two results that are kept, where lm-eval keeps any
_ANY_DEVICE = "cuda:0"
_SETTINGS = options_at("harness", Sampling)


@register_model("offload")
class OffloadLM(TemplateLM):
    """A decoder as lm-eval takes models."""

    def __init__(
        self,
        pretrained: str | Decoder,
        *,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        seed: int = 0,
        **load_args: Any,
    ) -> None:
        """Load a model, or take one that is loaded. Raises `UserError`.

        Args:
            batch_size: texts that are written at a time, where `parallel` is not given.
            max_batch_size: not asked for: memory is planned.
            device: as lm-eval names it, which says `cuda:0` on any machine unless told otherwise.
            add_bos_token: whether texts begin with that token; None leaves it to the tokenizer.
            prefix_token_id: stands for an empty context; default: the token that begins texts, or
                ends them.
            seed: of text that is drawn; the next ones are those of its repetitions.
            load_args: of `offload.load`.
        """
        super().__init__()
        if not isinstance(pretrained, Decoder):
            pretrained = _load(pretrained, device, batch_size, load_args)
        self.decoder = pretrained
        if self.decoder.tokenizer is None or self.decoder.target.start_ids:
            requirement = "lm-eval takes models with a tokenizer and without an encoder"
            raise UserError(f"{requirement}: name another one")
        self.tokenizer = self.decoder.tokenizer
        self._add_bos = add_bos_token
        self._seed = seed
        self._prefix = prefix_token_id

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        if self._prefix is not None:
            return self._prefix
        begins = self.tokenizer.bos_token_id
        return int(self.eot_token_id if begins is None else begins)

    @property
    def max_length(self) -> int:
        return self.decoder.plan.context

    @property
    def max_gen_toks(self) -> int:
        return 256

    @property
    def batch_size(self) -> int:
        return self.decoder.num_parallel

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text, without a system prompt that its template does not know."""
        settings = {"add_generation_prompt": add_generation_prompt}
        settings["continue_final_message"] = not add_generation_prompt
        try:
            return render_chat(self.tokenizer, chat_history, **settings)
        except ProgramFailed:
            others = [message for message in chat_history if message["role"] != "system"]
            return render_chat(self.tokenizer, others, **settings)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return token ids, with the token that begins texts unless the string brings it."""
        prefix = self.tokenizer.decode(self.prefix_token_id)
        if add_special_tokens is None:
            add_special_tokens = False if has_bos_prefix(string, prefix) else self._add_bos
        settings = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **settings))

    def _loglikelihood_tokens(
        self, requests: Sequence[Tokens], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of what is behind each context, and whether it is greedy text."""
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        # alike ones
        order = sorted(
            range(len(requests)), key=lambda index: requests[index][1] + requests[index][2]
        )
        with _bar("loglikelihood", len(requests), disable_tqdm) as bar:
            for begin in range(0, len(order), _TEXTS_PER_CALL):
                numbers = order[begin : begin + _TEXTS_PER_CALL]
                windows = [self._window(requests[number]) for number in numbers]
                scores = self.decoder.score_texts(windows)
                for number, score in zip(numbers, scores, strict=True):
                    answers[number] = (score.logprob, score.is_greedy)
                    name = requests[number][0]
                    if name is not None:
                        self.cache_hook.add_partial("loglikelihood", name, answers[number])
                bar.update(len(numbers))
        return answers

    def _window(self, request: Tokens) -> tuple[list[int], int]:
        """Return as much of a text as has room, its last token no input, and where scores begin."""
        _, context, scored = request
        num_scored = len(scored)
        requirement = f"what is scored must have between 1 and {self.max_length} tokens"
        remedy = "raise `context`, or leave the task out"
        require(0 < num_scored <= self.max_length, requirement, num_scored, remedy)
        ids = (context + scored)[-(self.max_length + 1) :]
        return ids, len(ids) - len(scored)

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return each text's log-probability, window by window where it is longer than that."""
        windows = list[Tokens]()
        owners = list[int]()
        for number, request in enumerate(requests):
            for context, scored in self._rolling(request.args[0]):
                windows.append((None, context, scored))
                owners.append(number)
        sums = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm)
        for owner, (logprob, _) in zip(owners, scores, strict=True):
            sums[owner] += logprob
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (request.args[0],), total)
        return sums

    def _rolling(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        windows = utils.get_rolling_token_windows(
            self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return map(utils.make_disjoint_window, windows)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return texts up to their stop strings, as many at a time as the decoder has places for."""
        texts = [""] * len(requests)
        seen = Counter[str]()
        wanted = list[Request]()
        untils = list[list[str]]()
        for request in requests:
            context, settings = request.args
            wanted_request, until = self._request(
                context, settings, repetition=seen[repr(request.args)]
            )
            seen[repr(request.args)] += 1
            wanted.append(wanted_request)
            untils.append(until)
        with _bar("generate_until", len(requests), disable_tqdm) as bar:
            for number, outcome in write_all(self.decoder, wanted):
                if not isinstance(outcome, Generation):
                    raise outcome
                # As `hf` does: without what comes before, and cut where any of the strings begins.
                text = self.tokenizer.decode(outcome.token_ids, skip_special_tokens=True)
                texts[number] = postprocess_generated_text(text, untils[number], None)
                self.cache_hook.add_partial("generate_until", requests[number].args, texts[number])
                bar.update(1)
        return texts

    def _request(
        self, context: str, settings: dict[str, Any], *, repetition: int
    ) -> tuple[Request, list[str]]:
        """Return the request to write, and strings that end it. Raises `UserError`."""
        left: dict[str, Any] = {**normalize_gen_kwargs(settings, self.max_gen_toks)}
        eos = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        until = handle_stop_sequences(left.pop("until"), eos=eos)
        num_new = left.pop("max_gen_toks")
        is_drawn = left.pop("do_sample")
        for name, value in left.items():
            requirement = f"generation_kwargs must be of {', '.join(sorted(_SETTINGS))}"
            require(name in _SETTINGS, requirement, f"{name}={value!r}", "leave it out")
        drawing = {_SETTINGS[name].name: value for name, value in left.items()}
        if not is_drawn:
            drawing["temperature"] = 0.0
        sampling = Sampling(**drawing, seed=self._seed).later(repetition)
        num_kept = self.max_length - num_new
        requirement = f"max_gen_toks must be less than the context of {self.max_length}"
        require(num_kept > 0, requirement, num_new, "raise `context`, or lower it by --gen_kwargs")
        ids = self.tok_encode(context)[-num_kept:] or [self.prefix_token_id]
        is_end = self.eot_token_id in self.decoder.end_ids
        stops = [stop for stop in until if stop and not (is_end and stop == eos)]
        return Request(ids, sampling, num_new, stops), until


def _bar(kind: str, total: int, is_disabled: bool) -> Any:
    return tqdm(total=total, disable=is_disabled, desc=f"Running {kind} requests")


def _load(
    model: str, device: str | None, batch_size: int | str, load_args: dict[str, Any]
) -> Decoder:
    known = signature(load).parameters
    requirement = f"model_args must be of {', '.join(known)}"
    for name, value in load_args.items():
        require(name in known, requirement, f"{name}={value!r}", "leave it out")
    given: dict[str, Any] = {} if device in (None, _ANY_DEVICE) else {"device": device}
    if "parallel" in known and str(batch_size).isdecimal():
        given["parallel"] = int(batch_size)
    return load(model, **given | load_args)


def main() -> NoReturn:
    """Run lm-eval's own command line, where `--model offload` is known. Leaves by `sys.exit`."""
    try:
        cli_evaluate()
    except (UserError, RunError) as error:
        print(f"offload: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    sys.exit(0)


if __name__ == "__main__":
    main()
