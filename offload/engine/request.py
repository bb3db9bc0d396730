"""A request for one run: its prompt, sampling, length and stop criteria.

Loading checks the first request before a weight is read, the decoder checks every one.
"""

import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from offload.declaration import options_at, options_of, whole_number
from offload.engine.conversation import (
    PLAIN,
    TemplateOptions,
    check_variables,
    encode_messages,
    encode_prompt,
    turn_end_ids,
    whole_text,
)
from offload.engine.tokenizer import Tokenizer, tokenizer_end_ids
from offload.errors import UserError, require
from offload.options import TextOptions
from offload.sampling.grammar import GRAMMARS, Grammar, find_grammar
from offload.sampling_options import MOST_SAMPLES, Sampling
from offload.units import plural
from offload.words.infill import infill_form, infilled

# role (system, user, assistant, tool) and content, and possibly calls of tools
Message = Mapping[str, Any]
Tool = Mapping[str, Any]  # a function that a model may call, in the form of OpenAI's protocol
Prompt = str | Sequence[int] | Sequence[Message]


class NoRoom(UserError):  # noqa: N818
    """A prompt and its new tokens exceed the context.

    Attributes:
        num_prompt: tokens of the prompt.
        num_new: tokens wanted after it; None for as many as there is room for.
        context: number of positions.
    """

    def __init__(self, message: str, num_prompt: int, num_new: int | None, context: int) -> None:
        super().__init__(message)
        self.num_prompt = num_prompt
        self.num_new = num_new
        self.context = context


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one run."""

    # text, messages of a conversation, or token ids; None is not known yet
    prompt: Prompt | None = None
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 128
    stop: str | Sequence[str] | None = None  # strings that end the text; they are not part of it
    raw: bool = False  # do not use the chat template
    session: str | os.PathLike[str] | None = None  # a session file to load then
    is_kept: bool = False  # its text will be saved to a session file
    is_named: bool = False  # its text will be written with the model's name
    # return each new token's, and those of this many of the likeliest; None for none
    num_logprobs: int | None = None
    # the same for the prompt's tokens, which the engine gives to their jobs
    num_prompt_logprobs: int | None = None
    grammar: Grammar | None = None  # grammar that the text must match
    is_clipped: bool = False  # more tokens than there is room for are cut to the room
    tree: str | None = None  # instead of those given to `load`; the tree no larger than that one
    rule: str | None = None
    tools: Sequence[Tool] = ()  # tools that the model may call in a conversation
    # further variables of the chat template, such as `enable_thinking`
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    continues_message: bool = False  # the last message is continued
    # the text after a gap; what is written fills the gap, after the prompt
    suffix: str | None = None
    think: bool | None = None  # whether the model thinks first; None leaves it to its template
    # the text is an answer in a conversation, and ends where a turn ends
    is_answer: bool = False
    # a reference to the decoder that has checked it, and its compiled grammar; a copy by `replace`
    # has none
    _prepared: tuple[Callable[[], object], object] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    @property
    def is_for_file(self) -> bool:
        """Return True if something will be written that must name the model."""
        return self.is_kept or self.is_named or self.session is not None

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        stops: tuple[Any, ...] = (self.stop,)
        # an iterator would be empty when it is read again
        if isinstance(self.stop, Collection) and not isinstance(self.stop, str):
            with suppress(TypeError):  # something that only looks like one
                stops = tuple(self.stop)
        requirement = "`stop` must be text"
        require(
            all(isinstance(stop, str) for stop in stops),
            requirement,
            f"{self.stop!r:.80}",
            "give a str",
        )
        return stops

    def is_prepared_by(self, decoder: object) -> bool:
        """Return True if this decoder has checked it: then its prompt is token ids."""
        return self._prepared is not None and self._prepared[0]() is decoder

    def prepared(self, ids: Sequence[int], decoder: object, made: object = None) -> "Request":
        """Return the request with the ids of its prompt, as checked by a decoder.

        `made` is kept for as long as the request waits.
        """
        prepared = replace(self, prompt=tuple(ids), is_answer=self.is_answer or self._is_templated)
        return _marked(prepared, (weakref.ref(decoder), made))

    @property
    def _is_templated(self) -> bool:
        """Return True if the model's template, if it has one, puts the prompt into a turn."""
        return _are_messages(self.prompt) or (isinstance(self.prompt, str) and not self.raw)

    def end_ids(self, tokenizer: Tokenizer | None, end_ids: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end its text: the model's, and in a conversation those of a turn."""
        if self.is_answer and tokenizer is not None and tokenizer.chat_template:
            return end_ids | turn_end_ids(tokenizer)
        # a grammar may allow others at its end
        return end_ids if self.grammar is None else end_ids | tokenizer_end_ids(tokenizer)

    def check(self) -> None:
        """Raise `UserError` for settings that no model could meet."""
        requirement = "`sampling` must be a Sampling"
        require(
            isinstance(self.sampling, Sampling), requirement, f"{self.sampling!r:.80}", "give one"
        )
        is_grammar = self.grammar is None or isinstance(self.grammar, Grammar)
        require(
            is_grammar, "a request's grammar must be a Grammar", f"{self.grammar!r:.80}", "give one"
        )
        require("" not in self.stops, "`stop` must not be empty", "''", "leave it out")
        num_new = whole_number(self.max_new_tokens, "`max_new_tokens`")
        require(num_new >= 0, "`max_new_tokens` must be 0 or more", num_new, "0 writes nothing")
        check_variables(self.template_variables, "template_variables")
        is_switch = self.think is None or isinstance(self.think, bool)
        require(is_switch, "`think` must be True or False", f"{self.think!r:.80}", "leave it out")
        if self.num_logprobs is not None:
            num_top = whole_number(self.num_logprobs, "`num_logprobs`")
            require(
                num_top >= 0, "`num_logprobs` must be 0 or more", num_top, "0 tells the token's own"
            )

    def ids(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        context: int,
        is_longest: bool = False,
        *,
        start_ids: tuple[int, ...] = (),
    ) -> list[int]:
        """Return the token ids of the prompt. Raises `UserError`.

        Args:
            is_longest: the model allows no more than `context` positions.
            start_ids: first ids of a decoder behind an encoder; prompt and new tokens then have
                `context` positions each.
        """
        self.check()
        if self.stops and tokenizer is None:
            raise UserError(
                "`stop` is looked for in text, and this checkpoint has no tokenizer: leave it out"
            )
        if start_ids and _are_messages(self.prompt):
            raise UserError(
                "a model with an encoder reads every prompt anew and cannot chat: use offload "
                "generate"
            )
        most = max(dict(self.sampling.logit_bias), default=0)
        requirement = f"tokens of `logit_bias` must lie in [0, {vocab_size})"
        require(most < vocab_size, requirement, most, "use this model's tokenizer")
        options = TemplateOptions(
            self.tools, self.template_variables, self.continues_message, self.think
        )
        prompt = self.prompt if self.suffix is None else gap_prompt(tokenizer, self)
        ids = encode(tokenizer, prompt, vocab_size, raw=self.raw, options=options)
        num_new = self.num_new(ids, context, start_ids)
        if start_ids:
            _check_source(ids, start_ids, num_new, context, None if self.is_clipped else num_new)
        elif len(ids) + num_new > context:
            remedy = ": raise `context`, "
            if is_longest:
                remedy = ", the longest that this model is run with: "
            new = "a new one" if num_new == 1 else f"{num_new} new ones"
            fewer = "" if self.is_clipped else " or lower `max_new_tokens`"
            length = plural(len(ids), "token")
            complaint = f"a prompt of {length} and {new} exceed the context of {context}"
            asked = None if self.is_clipped else num_new
            raise NoRoom(f"{complaint}{remedy}shorten the prompt{fewer}", len(ids), asked, context)
        return ids

    def num_new(self, ids: Sequence[int], context: int, start_ids: tuple[int, ...] = ()) -> int:
        """Count the tokens that may be written after a prompt, at least 1 if any are wanted."""
        if not self.is_clipped:
            return self.max_new_tokens
        return min(self.max_new_tokens, max(1, context - len(start_ids or ids)))


def request_of(
    prompt: Prompt, arguments: Mapping[str, Any], tree: str | None = None, rule: str | None = None
) -> Request:
    """Return the request for keywords of `Decoder.generate`. Raises `UserError`, `TypeError`."""
    drawing = options_of(Sampling)
    known = [*options_at("python", TextOptions), *drawing]
    if unknown := arguments.keys() - {*known}:
        raise TypeError(
            f"there is no argument {', '.join(sorted(unknown))}, only {', '.join(known)}"
        )
    if not isinstance(prompt, str) and not _are_messages(prompt):
        # an iterator of token ids can be read once only, and arrays cannot be compared
        prompt = whole_numbers(prompt)
    left = dict(arguments)
    sampling = Sampling(**{name: left.pop(name) for name in drawing if name in left})
    kept = find_grammar(**{name: left.pop(name) for name in GRAMMARS if name in left})
    return Request(prompt, sampling, grammar=kept, tree=tree, rule=rule, **left)


def samples_of(request: Request, num_samples: int) -> Iterator[Request]:
    """Yield a request this many times, each with a seed of its own. Raises `UserError`.

    Copies of a checked request are checked as well.
    """
    is_possible = 1 <= whole_number(num_samples, "`num_samples`") <= MOST_SAMPLES
    require(is_possible, f"`num_samples` must lie in 1 to {MOST_SAMPLES}", num_samples, "try 1")
    for number in range(num_samples):
        sample = replace(request, sampling=request.sampling.later(number))
        yield _marked(sample, request._prepared)


def _marked(request: Request, checked: tuple[Callable[[], object], object] | None) -> Request:
    object.__setattr__(request, "_prepared", checked)
    return request


def several_of(prompt: Any) -> Sequence[Prompt] | None:
    """Return the prompts of a list of them; None for one. Raises `UserError` for an empty list."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt:
        return None
    is_one = isinstance(prompt[0], Mapping | int) or not isinstance(prompt[0], str | Sequence)
    if is_one:
        return None
    if not all(isinstance(item, str | Sequence) for item in prompt):
        raise UserError("several prompts must each be text, messages or token ids: mend the list")
    return prompt


def require_request(request: object) -> None:
    """Raise `UserError` for anything but a `Request`."""
    is_one = isinstance(request, Request)
    requirement = "a request must be a Request"
    require(is_one, requirement, f"{request!r:.80}", "make one of `offload.Request`")


def with_start(ids: Sequence[int], start_ids: tuple[int, ...]) -> list[int]:
    """Return a prompt with the start ids of a decoder behind an encoder."""
    return [*ids, *(token for token in start_ids if token not in ids)]


def _check_source(
    ids: list[int], start_ids: tuple[int, ...], num_new: int, context: int, asked: int | None
) -> None:
    """Raise `UserError` if an encoder's prompt and its new tokens do not fit."""
    if start_ids[0] in ids:
        raise UserError(
            f"a prompt must not contain the token {start_ids[0]}, with which this model's own text "
            f"begins: leave it out"
        )
    if len(ids) > context:
        complaint = (
            f"the encoder reads at most `context` tokens, {context}, got a prompt of {len(ids)}"
        )
        raise NoRoom(
            f"{complaint}: raise `context` or shorten the prompt", len(ids), asked, context
        )
    if len(start_ids) + num_new > context:
        complaint = f"a start and {num_new} new tokens exceed the context of {context}"
        raise NoRoom(
            f"{complaint}: raise `context` or lower `max_new_tokens`", len(ids), asked, context
        )


def gap_prompt(tokenizer: Tokenizer | None, request: Request) -> str:
    """Return the prompt for the text between a prompt and its suffix. Raises `UserError`."""
    requirement = "`suffix` goes with a prompt of text alone"
    require(isinstance(request.prompt, str) and request.raw, requirement, "another", "give text")
    form = None if tokenizer is None else infill_form(tokenizer.get_vocab())
    if form is None:
        raise UserError("this model has no tokens that stand around a gap: leave `suffix` out")
    return infilled(form, str(request.prompt), whole_text(str(request.suffix)))


def encode(
    tokenizer: Tokenizer | None,
    prompt: Prompt | None,
    vocab_size: int,
    *,
    raw: bool = False,
    options: TemplateOptions = PLAIN,
) -> list[int]:
    """Return a prompt's token ids, checked; `options` are a conversation's. Raises `UserError`."""
    if not isinstance(prompt, str) and not _are_messages(prompt):
        ids = whole_numbers(prompt)
    elif tokenizer is None:
        raise UserError(
            "this checkpoint has no tokenizer: put its tokenizer.json beside it, give `config` "
            "of a GGUF file, "
            "or give token ids from Python"
        )
    elif isinstance(prompt, str):
        ids = encode_prompt(tokenizer, whole_text(prompt), raw=raw, options=options)
    else:
        require(
            not raw, "messages need the chat template", "raw=True", "give text, or leave raw out"
        )
        messages = [_message(message) for message in prompt or ()]
        ids = encode_messages(tokenizer, messages, options)
    if not ids:
        raise UserError("the prompt is empty: give at least one token")
    if not all(0 <= token < vocab_size for token in ids):
        raise UserError(
            f"prompt ids must lie in [0, {vocab_size}), got {min(ids)}..{max(ids)}: use this "
            f"model's tokenizer"
        )
    return ids


def whole_numbers(prompt: Any) -> list[int]:
    """Return token ids as Python's numbers. Raises `UserError`."""
    try:
        # their numbers are no ids, or in no order
        if isinstance(prompt, bytes | bytearray | Mapping | Set):
            raise TypeError
        return [whole_number(token, "a token id") for token in prompt]
    except (TypeError, UserError):
        raise UserError(
            f"a prompt must be text, messages or token ids, got {prompt!r:.80}: give a str or "
            f"whole numbers"
        ) from None


def _are_messages(prompt: object) -> bool:
    """Return True if a prompt is a list of messages, by its first item; other lists are token ids."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


# keys that programs add to a message
_UNREAD = {"image", "images", "image_url", "audio", "audios", "video", "videos"}


# parts that are text, by their types, and the keys under which they have it
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def _text_of(part: Any) -> str | None:
    """Return the text of a message's part, if it has some."""
    text = part.get(_TEXTS[part["type"]]) if isinstance(part, Mapping) else None
    return text if isinstance(text, str) else None


def _message(message: Any) -> dict[str, Any]:
    """Return a message with its parts joined as text. Raises `UserError` for images and the like.

    A message with calls may have no content.
    """
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = (
        [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    )
    kinds = (
        part.get("type") or ", ".join(sorted(_UNREAD & {*part})) or "a part without a type"
        for part in parts
    )
    others = {*map(str, kinds)} - _TEXTS.keys()
    others |= _UNREAD & {*message} if isinstance(message, Mapping) else set()
    requirement = "messages must be text: images and sound are not read"
    require(not others, requirement, f"{', '.join(sorted(others)):.80}", "leave it out")
    if isinstance(content, list):
        texts = [_text_of(part) for part in content]
        known = [text for text in texts if text is not None]
        content = "".join(known) if len(known) == len(texts) else None
    is_mapping = isinstance(message, Mapping)
    has_calls = is_mapping and message.get("content") is None and bool(message.get("tool_calls"))
    is_sound = is_mapping and isinstance(message.get("role"), str)
    is_sound = is_sound and (isinstance(content, str) or has_calls)
    require(
        is_sound, "a message must have a role and a content of text", f"{message!r:.80}", "mend it"
    )
    whole_text(message["role"] + (content or ""))
    _check_calls(message)
    return {**message, "content": content}


def _check_calls(message: Mapping[str, Any]) -> None:
    """Raise `UserError` for calls without a function's name."""
    calls = message.get("tool_calls") or ()
    is_list = isinstance(calls, Sequence) and not isinstance(calls, str)
    functions = [
        call.get("function") if isinstance(call, Mapping) else None
        for call in (calls if is_list else [None])
    ]
    is_sound = all(
        isinstance(function, Mapping) and isinstance(function.get("name"), str)
        for function in functions
    )
    requirement = "each of `tool_calls` must have a function with a name"
    require(is_sound, requirement, f"{calls!r:.80}", "mend it")
