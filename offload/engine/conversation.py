"""Conversations in a model's own chat template, in the form that the template takes.

Templates differ in the form of earlier turns: arguments of calls as objects or as text, content
absent, null or empty in messages with calls, and several forms of a call's key. `words_of` probes
that once (`offload.words.probe`), and messages are put into that form before they are rendered.

Invariant: a message that needs no such change is rendered as `apply_chat_template` renders it.
"""

import hashlib
import json
import os
import re
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from offload.checkpoint.small_files import no_chat_template
from offload.engine.text_stream import special_tokens
from offload.engine.tokenizer import TOKENIZER_FAILED, Tokenizer, tokenizer_end_ids
from offload.errors import UserError, refusing, require
from offload.guarded_process import MOST_CHARS, GuardedProcess, ProgramExceeded, ProgramFailed
from offload.words.probe import ModelWords, Render, probe, with_content_form

# Seconds of CPU time for one rendering, which takes milliseconds, and of wall time.
_CPU_S = 5
_WAIT_S = 60.0
# its text may be this many times as long as its input, which it may repeat and write as JSON
_TIMES_TOLD = 8
_WITHOUT_TOOLS = "some know no system prompt, all want user and assistant in turn"
_WITH_TOOLS = "its words say what it wants of messages, calls and `tools`"
# names of variables that belong to the renderer
_RESERVED = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversations",
    "documents",
    "messages",
    "most_chars",
    "most_s",
    "return_assistant_tokens_mask",
    "tools",
}
_SHORT_KEY = re.compile(r"[A-Za-z0-9]{9}")

Message = Mapping[str, Any]


class TemplateOptions(NamedTuple):
    """Variables of a template besides the messages."""

    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = {}  # such as `enable_thinking`
    continues: bool = False  # the last message is continued, and no new turn begins
    think: bool | None = None  # whether the model thinks first; None leaves it to the template


PLAIN = TemplateOptions()


def check_variables(variables: Any, name: str) -> None:
    """Raise `UserError` unless this maps names, none of them the renderer's, to values."""
    requirement = f"`{name}` must be an object of a template's variables"
    require(isinstance(variables, Mapping), requirement, f"{variables!r:.80}", "leave it out")
    for key in variables:
        is_free = isinstance(key, str) and key.isidentifier() and key not in _RESERVED
        requirement = f"`{name}` must have names of the template's own variables"
        require(is_free, requirement, f"{key!r:.80}", "leave it out")


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: str,
    *,
    raw: bool = False,
    options: TemplateOptions = PLAIN,
) -> list[int]:
    """Return a prompt's token ids, in the chat template where there is one, unless `raw`."""
    if not prompt:
        raise UserError("the prompt is empty: give some text")
    if raw or not tokenizer.chat_template:
        requirement = "`think` is told to a chat template, and the prompt is put into none"
        require(options.think is None, requirement, options.think, "leave it out")
        with refusing(*TOKENIZER_FAILED):
            return list(tokenizer(prompt, verbose=False)["input_ids"])
    question = [{"role": "user", "content": prompt}]
    return _in_template(tokenizer, question, "leave it out with `raw`", options)


def encode_messages(
    tokenizer: Tokenizer, messages: Sequence[Message], options: TemplateOptions = PLAIN
) -> list[int]:
    """Return the token ids of a conversation up to the model's answer.

    Tools are passed to templates that take them. Raises `UserError` without a chat template.
    """
    if not tokenizer.chat_template:
        raise no_chat_template()
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    has_more = calls or any("reasoning_content" in message for message in messages)
    adapted = [*_adapted(tokenizer, messages)] if has_more else [*map(dict[str, Any], messages)]
    for part in (adapted, [*options.tools], options.variables):
        _require_unicode(part)
    remedy = _WITH_TOOLS if calls or options.tools else _WITHOUT_TOOLS
    return _in_template(tokenizer, adapted, remedy, options, calls)


def render_chat(tokenizer: Tokenizer, messages: Sequence[Message], **options: Any) -> str:
    """Return a conversation in the model's chat template. Raises `ProgramFailed`.

    `how` has arguments of `apply_chat_template`, such as `add_generation_prompt` and `tools`.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str):  # there are several templates, by name
        template = tokenizer.get_chat_template(tools=options.get("tools"))
    if not isinstance(template, str):
        raise ProgramFailed(f"it must be text, got {template!r:.80}")
    said = [
        {name: value for name, value in message.items() if value is not None or name == "content"}
        for message in messages
    ]
    variables = {**tokenizer.special_tokens_map, **options}
    most_chars = MOST_CHARS + _TIMES_TOLD * len(json.dumps([said, variables], default=str))
    payload = {**variables, "chat_template": template, "conversations": [said]}
    return _renderer_of(os.getpid()).ask(payload, most_chars)


@cache
def _renderer_of(pid: int) -> GuardedProcess:
    """Return the one process that all models share: an answer depends on the request alone.

    The process belongs to this pid: after a fork two readers of one pipe would take each other's
    answers.
    """
    return GuardedProcess("render", cpu_s=_CPU_S, wait_s=_WAIT_S)


# by tokenizer: its template's source, and the probed form
_words: "weakref.WeakKeyDictionary[Any, tuple[str, ModelWords]]" = weakref.WeakKeyDictionary()
_words_lock = threading.Lock()


def words_of(tokenizer: Tokenizer) -> ModelWords:
    """Return a model's own forms of words, by its chat template; it is probed once."""
    if tokenizer is None or not tokenizer.chat_template:
        return ModelWords()
    source = template_source(tokenizer)
    with _words_lock:
        kept = _words.get(tokenizer)
    if kept is not None and kept[0] == source:
        return kept[1]
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    words = probe(_render_until_exceeded(tokenizer), source, added)
    with _words_lock:
        _words[tokenizer] = (source, words)
    return words


def _render_until_exceeded(tokenizer: Tokenizer) -> Render:
    """Return a renderer for probes; once a template exceeds its limits, no more is tried."""
    has_exceeded = False

    def render(messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        nonlocal has_exceeded
        if has_exceeded:
            raise ProgramFailed("it has taken more than it may")
        try:
            return render_chat(tokenizer, messages, **variables)
        except ProgramExceeded:
            has_exceeded = True
            raise

    return render


def template_source(tokenizer: Tokenizer) -> str:
    """Return the source of a tokenizer's chat templates; empty if it has none."""
    template = getattr(tokenizer, "chat_template", None)
    return template if isinstance(template, str) else json.dumps(template) if template else ""


def turn_end_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the tokens that end a turn: the tokenizer's, and what its template writes after one."""
    if tokenizer is None:
        return frozenset()
    special = special_tokens(tokenizer)
    ends = words_of(tokenizer).turn_end
    named = {index for index, name in special.items() if name == ends}
    return tokenizer_end_ids(tokenizer) | named


def thinking_variables(tokenizer: Tokenizer, think: bool | None) -> dict[str, Any]:
    """Return the template variables that turn thinking on or off. Raises `UserError`."""
    if think is None:
        return {}
    switch = words_of(tokenizer).thinking
    requirement = (
        "`think` needs a chat template with a switch for thoughts, and the model's has none"
    )
    if switch is None:
        raise UserError(f"{requirement}, got {think}: leave it out")
    name, on, off = switch
    return {name: on if think else off}


def _adapted(tokenizer: Tokenizer, messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Yield messages in the form that the template takes."""
    words = words_of(tokenizer)
    keys = dict[str, str]()
    for message in messages:
        adapted = dict(message)
        if calls := adapted.get("tool_calls"):
            adapted["tool_calls"] = [_adapted_call(call, words, keys) for call in calls]
            if not adapted.get("content"):
                adapted = with_content_form(adapted, words.content_form)
        if (key := adapted.get("tool_call_id")) in keys:
            adapted["tool_call_id"] = keys[key]
        thoughts = adapted.get("reasoning_content")
        if thoughts and words.thought_key not in (None, "reasoning_content"):
            adapted[words.thought_key] = adapted.pop("reasoning_content")
        if thoughts and words.is_harmony and calls and adapted.get("content"):
            # such a template takes either content or calls
            name = words.thought_key or "reasoning_content"
            adapted[name] = f"{thoughts}\n{adapted.pop('content')}"
            adapted["content"] = ""
        yield adapted


def _adapted_call(call: Any, words: ModelWords, keys: dict[str, str]) -> dict[str, Any]:
    """Return a call with arguments and key in the form that the template takes.

    `keys` maps the key in a call's result to the call's key.
    """
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # malformed JSON, which the model is to correct, stays text
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments.strip() or "{}")
    arguments = {} if arguments is None else arguments
    if words.takes_text_arguments:
        is_text = isinstance(arguments, str)
        given = call["function"].get("arguments")
        whole = given if isinstance(given, str) and given.strip() else None
        arguments = arguments if is_text else whole or json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str) and words.wants_objects:
        arguments = {"arguments": arguments}
    function["arguments"] = arguments
    adapted = {**call, "function": function}
    key = adapted.get("id")
    if isinstance(key, str):
        named = f"functions.{function['name']}:{len(keys)}"
        is_named = key.startswith(f"functions.{function['name']}:")
        if words.key_form == "short" and not _SHORT_KEY.fullmatch(key):
            adapted["id"] = hashlib.sha256(key.encode()).hexdigest()[:9]
        elif words.key_form == "named" and not is_named:
            adapted["id"] = named
        keys[key] = adapted["id"]
    return adapted


def _require_unicode(part: Any) -> None:
    """Raise `UserError` for half surrogate pairs anywhere, which UTF-8 has no bytes for."""
    left = [part]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            left += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            left += value
        elif isinstance(value, str):
            whole_text(value)


def whole_text(text: str) -> str:
    """Return the text. Raises `UserError` for half surrogate pairs, which UTF-8 has no bytes for."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"text must be Unicode, got half a character at {error.start}, "
            f"{text[error.start]!r}: decode its bytes anew"
        ) from None
    return text


def _in_template(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    remedy: str,
    options: TemplateOptions,
    calls: Sequence[Any] = (),
) -> list[int]:
    """Return a conversation's token ids by the chat template, which must show all `calls`."""
    variables = {**thinking_variables(tokenizer, options.think), **options.variables}
    variables |= {"tools": [*options.tools]} if options.tools else {}
    variables |= {"add_generation_prompt": not options.continues}
    variables |= {"continue_final_message": True} if options.continues else {}
    with refusing("the model's chat template failed", remedy):
        text = _rendered(tokenizer, messages, variables)
    missing = [call["function"]["name"] for call in calls if call["function"]["name"] not in text]
    if missing:
        requirement = "the model's chat template does not tell the model of calls"
        remedy = "leave calls of earlier answers out, or take a template that knows them"
        raise UserError(f"{requirement}, got one of {missing[0]:.80}: {remedy}")
    with refusing(*TOKENIZER_FAILED):
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _rendered(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> str:
    """Return the messages in the tokenizer's template.

    Templates of some multimodal models look for lists of parts, and skip plain text.
    """
    last = str(messages[-1].get("content") or "").strip()
    failure = None
    try:
        text = render_chat(tokenizer, messages, **variables)
    except ProgramExceeded:
        raise
    except ProgramFailed as error:
        text = ""
        failure = error
    if failure is None and last in text:
        return text
    parts = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]
    try:
        in_parts = render_chat(tokenizer, parts, **variables)
    except ProgramFailed:
        in_parts = ""
    if in_parts and last in in_parts:
        return in_parts
    if failure is not None:
        raise failure
    return text
