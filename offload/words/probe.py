"""What a chat template tells of its model's own words: small conversations are rendered, with a
call, with two, with a thought, and what surrounds names, arguments and thoughts is the form.

A template may fail at any of them: then the next form of the conversation is tried, and what none
shows is not known.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import product, takewhile
from typing import Any, Literal

from offload.words.calls import (
    BracedCalls,
    CallForm,
    JsonCalls,
    NamedCalls,
    PythonCalls,
    TaggedCalls,
)
from offload.words.harmony import MARKS, HarmonyReader
from offload.words.parts import Call, Offered, schemas_of
from offload.words.reader import PartReader, TaggedReader, ThoughtForm

# renders a conversation with these further variables; raises `ValueError` where it fails
Render = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], str]
Message = dict[str, Any]
ContentForm = Literal["absent", "none", "empty"]
KeyForm = Literal["any", "short", "named"]

_NAMES = ("zq_alpha", "zq_beta")
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"kqone": "vqone", "kqtwo": 71},
    {"kqthree": "vqthree", "kqfour": 72},
)
_QUESTION = "uqone"
_ANSWER = "Zqanswer"
_THOUGHT = "tqthought"
_KEYS: dict[KeyForm, tuple[str, str]] = {
    "any": ("call_zq1", "call_zq2"),
    "short": ("zqcallid1", "zqcallid2"),
    "named": (f"functions.{_NAMES[0]}:0", f"functions.{_NAMES[1]}:1"),
}
_THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
# variables of templates, as they let a model think and as they do not
_THINKING: tuple[tuple[str, Any, Any], ...] = (
    ("enable_thinking", True, False),
    ("thinking", True, False),
    ("thinking_budget", -1, 0),
)
# marks around thoughts of models whose templates drop those of earlier turns
_THOUGHT_MARKS = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<reasoning>", "</reasoning>"),
]


@dataclass(frozen=True)
class ModelWords:
    """The form of one model's words, and of what its template takes."""

    calls: CallForm | None = None
    thoughts: ThoughtForm | None = None
    is_harmony: bool = False
    knows_tools: bool = False  # the template tells the model of tools
    shows_calls: bool = False  # and of the calls of earlier turns
    takes_text_arguments: bool = False
    wants_objects: bool = False  # arguments of calls as text fail
    turn_end: str = ""  # the mark that the template puts behind an answer
    content_form: ContentForm = "absent"
    key_form: KeyForm = "any"
    thought_key: str | None = None  # of a message's thoughts; None is not read
    thinking: tuple[str, Any, Any] | None = None  # a variable, its values for thoughts and for none

    def reader(self, offered: Offered, prompt_end: str, specials: Set[str]) -> PartReader:
        """Return a reader of one answer.

        Args:
            offered: functions that may be called; others are text.
            prompt_end: the last characters of the prompt, special tokens included.
            specials: texts that are special tokens.
        """
        ends = prompt_end.rstrip()
        if self.is_harmony:
            is_in_header = ends.endswith("<|start|>assistant")
            return HarmonyReader(offered, specials, is_in_header=is_in_header)
        return TaggedReader(
            self.thoughts,
            self.calls,
            offered,
            specials,
            is_thinking=self.thoughts is not None and ends.endswith(self.thoughts.opening),
            has_short_keys=self.key_form == "short",
        )


def probe(render: Render, source: str, added: Set[str]) -> ModelWords:
    """Return the words of a model.

    Args:
        source: of the template.
        added: tokens that were added to the vocabulary.
    """
    harmony_marks = MARKS[:3]
    is_harmony = all(mark in source or mark in added for mark in harmony_marks)
    plain = _try_render(render, [_user_message(_QUESTION), _answer()])
    asked = [_user_message(_QUESTION)]
    knows_tools = _try_render(render, asked) != _try_render(render, asked, with_tools=True)
    thoughts, thought_key = _probe_thoughts(render, source, added)
    turn_end = "" if is_harmony else _turn_end(render, plain)
    thinking = _probe_thinking(render, source)
    shown = _probe_calls(render)
    if shown is None:
        return ModelWords(
            None,
            thoughts,
            is_harmony,
            knows_tools,
            turn_end=turn_end,
            thought_key=thought_key,
            thinking=thinking,
        )
    calls = None
    if not is_harmony:
        single = _call_text(shown.single, plain)
        double = None if shown.double is None else _call_text(shown.double, plain)
        # a text in which arguments stand before names, or not as they are, is no form
        with suppress(ValueError):
            calls = _form_of(single, double, shown.key_form)
        if calls is not None and not _reads_back(calls, single):
            calls = None
    return ModelWords(
        calls,
        thoughts,
        is_harmony,
        knows_tools,
        shows_calls=True,
        takes_text_arguments=shown.has_text_arguments,
        wants_objects=_wants_objects(render, shown),
        turn_end=turn_end,
        content_form=shown.content_form,
        key_form=shown.key_form,
        thought_key=thought_key,
        thinking=thinking,
    )


@dataclass(frozen=True)
class _ShownCalls:
    """Renderings of one call and of two, and what the template took for them."""

    single: str
    double: str | None
    has_text_arguments: bool
    content_form: ContentForm
    key_form: KeyForm


def _probe_calls(render: Render) -> _ShownCalls | None:
    """Return renderings that show a call whole: its name, and its arguments as JSON or marked."""
    key_forms: tuple[KeyForm, ...] = ("any", "short", "named")
    content_forms: tuple[ContentForm, ...] = ("absent", "none", "empty")
    for key_form, content_form, is_text in product(key_forms, content_forms, (False, True)):
        form = (is_text, content_form, key_form)
        shown = _try_render(render, [_user_message(_QUESTION), _calling(1, *form)], with_tools=True)
        if shown is None:
            # some want the result behind it
            result = {"role": "tool", "content": "rqone", "name": _NAMES[0]}
            result["tool_call_id"] = _KEYS[key_form][0]
            messages = [_user_message(_QUESTION), _calling(1, *form), result]
            shown = _try_render(render, messages, with_tools=True)
            shown = shown and shown.partition("rqone")[0]
        if shown is None or not _is_sound(shown):
            continue
        double = _try_render(
            render, [_user_message(_QUESTION), _calling(2, *form)], with_tools=True
        )
        if double is not None and _NAMES[1] not in double.rpartition(_QUESTION)[2]:
            double = None
        return _ShownCalls(shown, double, *form)
    return None


def _turn_end(render: Render, plain: str | None) -> str:
    """Return the mark right behind an answer, before another question and at the end alike."""
    longer = _try_render(render, [_user_message(_QUESTION), _answer(), _user_message("uqtwo")])
    ends = [
        _first_mark(shown.rpartition(_ANSWER)[2].lstrip()) for shown in (plain, longer) if shown
    ]
    return ends[0] if len({*ends}) == 1 else ""


def _wants_objects(render: Render, shown: _ShownCalls) -> bool:
    """Return True if a template fails where a model's broken arguments stay text."""
    if shown.has_text_arguments:
        return False
    message = _calling(1, False, shown.content_form, shown.key_form)
    message["tool_calls"][0]["function"]["arguments"] = '{"kqone'
    return _try_render(render, [_user_message(_QUESTION), message], with_tools=True) is None


def _is_sound(shown: str) -> bool:
    """Return True if a rendering has the call, not in Python's form and not written twice."""
    answer = shown.rpartition(_QUESTION)[2]
    is_whole = _NAMES[0] in answer and "vqone" in answer
    return (
        is_whole and "{'kqone'" not in answer and '\\"kqone' not in answer and "None" not in answer
    )


def _user_message(content: str) -> Message:
    return {"role": "user", "content": content}


def _answer() -> Message:
    return {"role": "assistant", "content": _ANSWER}


def _calling(num: int, is_text: bool, content_form: ContentForm, key_form: KeyForm) -> Message:
    """Return an answer of this many calls."""
    calls = []
    for name, arguments, key in zip(_NAMES, _ARGUMENTS, _KEYS[key_form], strict=True):
        given = json.dumps(arguments) if is_text else arguments
        function = {"name": name, "arguments": given}
        calls.append({"id": key, "type": "function", "function": function})
    message: Message = {"role": "assistant", "tool_calls": calls[:num]}
    return with_content_form(message, content_form)


def with_content_form(message: Message, content_form: ContentForm) -> Message:
    """Return a message of calls alone with its content as a template takes it."""
    left = {name: value for name, value in message.items() if name != "content"}
    return left if content_form == "absent" else left | {"content": _NO_CONTENT[content_form]}


_NO_CONTENT: Mapping[str, str | None] = {"none": None, "empty": ""}


def _tools() -> list[Message]:
    """Return sample tools with which a template is probed."""
    tools = []
    for name, arguments in zip(_NAMES, _ARGUMENTS, strict=True):
        kinds = {str: "string", int: "integer"}
        fields = {
            key: {"type": kinds[type(value)], "description": "a value"}
            for key, value in arguments.items()
        }
        parameters = {"type": "object", "properties": fields, "required": [*fields]}
        function = {"name": name, "description": "A function.", "parameters": parameters}
        tools.append({"type": "function", "function": function})
    return tools


def _try_render(render: Render, messages: list[Message], *, with_tools: bool = False) -> str | None:
    try:
        return render(messages, {"tools": _tools()} if with_tools else {})
    except ValueError:
        return None


def _call_text(shown: str, plain: str | None) -> str:
    """Return the text of the calls, without the text around any answer."""
    answer = shown.rpartition(_QUESTION)[2]
    if plain is None or _ANSWER not in plain:
        return answer
    before, _, behind = plain.rpartition(_QUESTION)[2].partition(_ANSWER)
    answer = answer.removeprefix(_common_start(answer, before))
    return answer.removesuffix(behind) if behind else answer


def _form_of(single: str, double: str | None, key_form: KeyForm) -> CallForm | None:
    """Return the form in which a template renders one call and two; None for an unknown form."""
    if (form := _json_form(single)) is not None:
        return form
    first = single.index(_NAMES[0])
    behind_name = single[first + len(_NAMES[0]) :]
    lead, before, tail, behind = _wrappers(single, double)
    opening = _first_mark(lead.strip() or before.strip())
    opening = lead.strip() or opening
    if behind_name.startswith("("):
        return PythonCalls(_without_bracket(single[:first], "["), _tail_of(single, ")"))
    braced = re.match(r"\{kqone:(?P<quote>\S{0,30}?)vqone", behind_name)
    if braced:
        return BracedCalls(opening, _tail_of(single, "}"), before.strip(), braced["quote"] or '"')
    arguments = _arguments_in(behind_name)
    closing = _last_mark(tail.strip() or behind.strip())
    if arguments is not None:
        between = behind_name[: arguments[0]]
        for number, key in enumerate(_KEYS[key_form]):
            between = between.replace(key, str(number))
        is_keyed = key_form == "named" and before.rstrip().endswith("functions.")
        return NamedCalls(opening, closing, before, between, behind, is_keyed)
    return _tagged_form(behind_name, opening, closing, before)


def _reads_back(form: CallForm, single: str) -> bool:
    """Return True if a form reads the call that the template has written."""
    reader = TaggedReader(None, form, schemas_of(_tools()))
    parts = [*reader.push([single]), *reader.finish()]
    calls = [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, Call)]
    return calls == [(_NAMES[0], _ARGUMENTS[0])]


def _json_form(single: str) -> JsonCalls | None:
    """Return the form of a call that is an object with name and arguments."""
    decoder = json.JSONDecoder()
    for place in (match.start() for match in re.finditer(r"\{", single)):
        try:
            value, end = decoder.raw_decode(single, place)
        except ValueError:
            continue
        if isinstance(value.get("function"), dict):
            value = value["function"]
        name_key = next((key for key, part in value.items() if part == _NAMES[0]), None)
        shown = next((key for key, part in value.items() if "vqone" in str(part)), None)
        if [*value] == [_NAMES[0]]:
            name_key = ""
        if name_key is None or shown is None or name_key == shown:
            continue
        opening = _without_bracket(single[:place], "[")
        closing = _without_bracket(single[end:], "]")
        second = single[:place].strip().removesuffix("[").strip().removeprefix(opening)
        return JsonCalls(opening, closing, name_key, shown, second.strip())
    return None


def _wrappers(single: str, double: str | None) -> tuple[str, str, str, str]:
    """Return the texts before all calls, before each, behind all, and behind each."""
    before = single[: single.index(_NAMES[0])]
    behind = single[_end_of_call(single, 0) :]
    if double is None or _NAMES[0] not in double:
        return "", before, "", behind
    between = double[_end_of_call(double, 0) : double.index(_NAMES[1])]
    # what is repeated stands around each
    each_before = _from_mark(_common_end(before, between))
    each_behind = _to_mark(_common_start(between, behind))
    if len(each_before) + len(each_behind) > len(between):
        each_behind = between[: len(between) - len(each_before)]
    lead = before[: len(before) - len(each_before)]
    tail = behind[len(each_behind) :]
    return lead, each_before, tail, each_behind


def _end_of_call(shown: str, index: int) -> int:
    """Return where the arguments of a call end: behind the last value, or the object."""
    start = shown.index(_NAMES[index]) + len(_NAMES[index])
    arguments = _arguments_in(shown[start:])
    if arguments is not None:
        return start + arguments[1]
    last = str([*_ARGUMENTS[index].values()][-1])
    return shown.index(last, start) + len(last)


def _arguments_in(text: str) -> tuple[int, int] | None:
    """Return where the first JSON object begins and ends that has the probe's arguments."""
    decoder = json.JSONDecoder()
    for place in (match.start() for match in re.finditer(r"\{", text)):
        try:
            value, end = decoder.raw_decode(text, place)
        except ValueError:
            continue
        if {*value} in [{*arguments} for arguments in _ARGUMENTS]:
            return place, end
    return None


def _tagged_form(answer: str, opening: str, closing: str, before: str) -> TaggedCalls | None:
    """Return the form of a call with a mark for each argument; `told` begins behind the name."""
    match = re.fullmatch(
        r"(?P<first>.*?)kqone(?P<equals>.+?)vqone(?P<middle>.+?)kqtwo(?P<other>.+?)71(?P<end>.*)",
        answer,
        re.DOTALL,
    )
    if match is None or not match["equals"].strip():
        return None
    key_mark = _from_mark(_common_end(match["first"], match["middle"]))
    value_end = match["middle"][: len(match["middle"]) - len(key_mark)]
    named = match["first"][: len(match["first"]) - len(key_mark)]
    rest = match["end"].lstrip()
    if not key_mark.strip() or not value_end.strip() or not rest.startswith(value_end.strip()):
        return None
    behind = rest.removeprefix(value_end.strip())
    if closing and behind.rstrip().endswith(closing):
        is_apart = not before.lstrip().startswith(opening)
        behind = behind.rstrip().removesuffix(closing) if is_apart else behind
    equals = tuple(dict.fromkeys((match["equals"], match["other"])))
    return TaggedCalls(opening, closing, before, named, key_mark, equals, value_end, behind)


def _from_mark(text: str) -> str:
    """Return a text from its first whole mark on: one that is cut in two is none."""
    match = re.search(r"[<\[\]]", text)
    is_cut = match is not None and match[0] == "]"
    return (
        _from_mark(text[match.end() :])
        if match and is_cut
        else text[match.start() :]
        if match
        else text
    )


def _to_mark(text: str) -> str:
    """Return a text to the end of its last whole mark."""
    place = max(text.rfind("<"), text.rfind("["))
    is_cut = place >= 0 and not re.search(r"[>\]]", text[place:])
    return text[:place] if is_cut else text


def _common_start(left: str, right: str) -> str:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return "".join(letter for letter, _ in pairs)


def _common_end(left: str, right: str) -> str:
    return _common_start(left[::-1], right[::-1])[::-1]


def _first_mark(text: str) -> str:
    """Return the first mark of a text such as `<tool_call>\\n<function=`."""
    match = re.match(r"[^\s>\]]+[>\]]?", text)
    return match[0] if match else ""


def _last_mark(text: str) -> str:
    """Return the last mark of a text such as `</function>\\n</tool_call>`."""
    match = re.search(r"[<\[][^<\[\s]*$", text.rstrip())
    return match[0] if match else text.split()[-1] if text.split() else ""


def _without_bracket(text: str, bracket: str) -> str:
    """Return the mark at an end of a text without a list's bracket beside it."""
    text = text.strip()
    is_open = bracket == "["
    text = text.removesuffix(bracket) if is_open else text.removeprefix(bracket)
    return _first_mark(text.strip()) if is_open else _last_mark(text.strip())


def _tail_of(single: str, end: str) -> str:
    """Return the mark behind the last such end of a call."""
    return _without_bracket(single.rpartition(end)[2], "]")


def _probe_thinking(render: Render, source: str) -> tuple[str, Any, Any] | None:
    """Return the first template variable that changes the text before an answer."""
    for name, on, off in _THINKING:
        if name not in source:
            continue
        rendered = []
        for value in (on, off):
            with suppress(ValueError):
                variables = {name: value, "add_generation_prompt": True}
                rendered.append(render([_user_message(_QUESTION)], variables))
        if len({*rendered}) > 1:
            return name, on, off
    return None


def _probe_thoughts(
    render: Render, source: str, added: Set[str]
) -> tuple[ThoughtForm | None, str | None]:
    """Return the marks around thoughts, and by which key a message tells them."""
    form = None
    thought_key = None
    for key, is_calling in product(_THOUGHT_KEYS, (False, True)):
        # some show thoughts of turns with calls alone
        answer = _calling(1, False, "empty", "short") if is_calling else _answer()
        shown = _try_render(
            render, [_user_message(_QUESTION), answer | {key: _THOUGHT}], with_tools=is_calling
        )
        if shown is None or _THOUGHT not in shown:
            continue
        thought_key = key
        before, _, behind = shown.rpartition(_QUESTION)[2].partition(_THOUGHT)
        opening = re.search(r"[<\[][^<\[\s]*$", before.rstrip())
        closing = re.match(r"[<\[][^>\]]*[>\]]", behind.lstrip())
        if opening and closing:
            form = ThoughtForm(opening[0], closing[0])
        break
    if form is not None:
        return form, thought_key
    for opening_mark, closing_mark in _THOUGHT_MARKS:
        is_in_source = opening_mark in source or closing_mark in source
        if is_in_source or {opening_mark, closing_mark} <= added:
            return ThoughtForm(opening_mark, closing_mark), thought_key
    return None, thought_key
