"""Chat templates are programs of strangers: what they may compute, take and write is limited, however they come."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matrix import matrix
from tiny import save_tokenizer

from offload import guarded_process
from offload.engine import conversation as text
from offload.engine.conversation import TemplateOptions, encode_messages, encode_prompt, render_chat
from offload.engine.tokenizer import load_tokenizer
from offload.errors import UserError
from offload.guarded_process import GuardedProcess, NotStarted, ProgramExceeded, ProgramFailed

SAID = [{"role": "user", "content": "hi"}]
SPINS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
PLENTY_S = 30.0  # for what is limited to less than a second of processor time

COMPUTES = {
    "nested loops": SPINS,
    "one power, in C": "{% set n = 9 %}{{ n ** (n ** n) }}",
    "one power, as the template is compiled": "{{ 9 ** (9 ** 9) }}",
    "a filter that sorts": "{{ (['ab', 'b'] * 10 ** 7) | sort | length }}",
    "a filter that joins": "{% set n = ['x'] * 10 ** 7 %}{% for i in range(99999) %}{% set y = n | join %}{% endfor %}",
    "texts of no meaning": "{{ lipsum(n=99999) }}",
}
TAKES = {
    "a text by multiplication": "{{ 'x' * 10 ** 10 }}",
    "a text by replacing": "{{ ('x' * 10 ** 7).replace('x', 'x' * 10 ** 4) }}",
    "a text by joining": "{{ (['x' * 10 ** 6] * 10 ** 5) | join }}",
    "a number of many digits": "{{ '%0999999999d' % 1 }}",
    "a field of great width": "{{ '{:>99999999999}'.format(1) }}",
}
REFUSED = {
    "a range of a thousand millions": ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    "a macro that calls itself": ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "recursion"),
    "an expression nested deep": ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "recursion"),
    "classes of values": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "globals of functions": ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "unsafe"),
    "a file": ("{% include '/etc/passwd' %}", "no loader"),
    "what is changed": ("{{ messages.append(1) }}", "unsafe"),
}


@pytest.fixture
def renderer(monkeypatch: pytest.MonkeyPatch) -> Iterator[GuardedProcess]:
    """One of its own, that gives a template a second at most."""
    process = GuardedProcess("render", cpu_s=0, wait_s=text._WAIT_S)
    monkeypatch.setattr(text, "_renderer_of", lambda pid: process)
    yield process
    process.end()


def render(template: str, messages: list[Any]) -> str:
    """What a model with this template is told."""
    return render_chat(SimpleNamespace(chat_template=template, special_tokens_map={}), messages)


@matrix("case", COMPUTES, daily=2)
def test_what_never_ends_is_ended(case: str, renderer: GuardedProcess) -> None:
    began = time.monotonic()
    with pytest.raises(ProgramExceeded, match=r"computes for more than|of memory"):
        render(COMPUTES[case], SAID)
    assert time.monotonic() - began < PLENTY_S
    assert renderer._process is None and render("{{ messages[0].content }}", SAID) == "hi", "and goes on"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no other system limits addresses")
@matrix("case", TAKES, daily=1)
def test_what_takes_too_much_memory_is_refused(case: str, renderer: GuardedProcess) -> None:
    with pytest.raises(ProgramExceeded, match=r"more than 512 MiB of memory|computes for more"):
        render(TAKES[case], SAID)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no other system limits addresses")
def test_memory_is_limited_where_a_processor_takes_no_time(renderer: GuardedProcess) -> None:
    with pytest.raises(ProgramExceeded, match="more than 512 MiB of memory"):
        render("{{ 'x' * (6 * 10 ** 8) }}", SAID)


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_sandbox_refuses(case: str, renderer: GuardedProcess) -> None:
    template, why = REFUSED[case]
    with pytest.raises(ProgramFailed, match=why):
        render(template, SAID)
    assert render("{{ messages | length }}", SAID) == "1"


def test_output_is_limited_by_what_was_told(renderer: GuardedProcess) -> None:
    """Repeating what was said is what templates are for, however long it is."""
    with pytest.raises(ProgramExceeded, match=r"writes 2000000 characters, at most 1048\d\d\d may be"):
        render("{{ 'x' * (2 * 10 ** 6) }}", SAID)
    long = "wörd " * 400_000
    assert render("<{{ messages[0].content }}>", [{"role": "user", "content": long}]) == f"<{long}>"


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_what_does_not_answer_or_has_died_is_replaced(
    number: int, renderer: GuardedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits where it computes nothing: stopped, or for a disk."""
    render("", SAID)
    assert renderer._process is not None
    os.kill(renderer._process.pid, number)
    if number == signal.SIGKILL:
        renderer._process.wait()
    else:
        with monkeypatch.context() as patch, pytest.raises(ProgramExceeded, match="does not answer"):
            patch.setattr(renderer, "_wait_s", 0.2)
            render("{{ messages[0].content }}", SAID)
    assert render("{{ messages[0].content }}", SAID) == "hi"


def test_why_it_does_not_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation that is not whole, found before the real one."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = GuardedProcess("render", cpu_s=0, wait_s=text._WAIT_S)
    for _ in range(2):
        with pytest.raises(NotStarted, match=r"does not start: No module named 'transformers\.utils"):
            process.ask({})
    assert process._process is None
    slow = GuardedProcess("render", cpu_s=0, wait_s=0.001)
    with pytest.raises(ProgramExceeded, match=r"does not start within 0\.001 s"):
        slow.ask({})
    assert slow._process is None


def test_an_interrupted_request_leaves_no_answer_behind(
    renderer: GuardedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control-C between a request and its answer: the next one must not be given it."""
    render("", SAID)

    def interrupted(*_: Any) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(guarded_process, "_line", interrupted)
        render("another's", SAID)
    assert render("{{ messages[0].content }}", SAID) == "hi"


def test_threads_are_given_their_own_answers(renderer: GuardedProcess) -> None:
    with ThreadPoolExecutor(4) as pool:
        texts = pool.map(lambda n: render("{{ messages[0].content }}", [{"content": str(n)}]), range(50))
        assert list(texts) == [str(n) for n in range(50)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_who_forks_has_a_process_of_its_own() -> None:
    ours = text._renderer_of(os.getpid())
    assert ours is text._renderer_of(os.getpid()) and text._renderer_of(os.getpid() + 1) is not ours
    render("", SAID)
    assert ours._process is not None
    guarded_process._stop(os.getpid() + 1, ours._process)  # as a fork of this process would, as it ends
    assert ours._process.poll() is None, "whose process it is not"
    ours.end()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_nothing_is_left_behind_that_computes(renderer: GuardedProcess, tmp_path: Path) -> None:
    """Neither a thread nor a process, and where this process is killed the kernel ends what it has asked for."""
    num_threads = threading.active_count()
    render("", SAID)
    assert renderer._process is not None
    pid = renderer._process.pid
    with pytest.raises(ProgramExceeded):
        render(SPINS, SAID)
    assert threading.active_count() == num_threads and not Path(f"/proc/{pid}").exists()
    code = (
        "from offload.guarded_process import GuardedProcess\n"
        "own = GuardedProcess('render', cpu_s=0, wait_s=60)\n"
        "said = {'conversations': [[]]}\n"
        "own.ask({**said, 'chat_template': ''})\nprint(own._process.pid, flush=True)\n"
        f"own.ask({{**said, 'chat_template': {SPINS!r}}})"
    )
    asking = os.pipe()
    to = [(os.POSIX_SPAWN_DUP2, asking[1], 1)]
    parent = os.posix_spawn(sys.executable, [sys.executable, "-c", code], dict(os.environ), file_actions=to)
    worker = int(os.read(asking[0], 100))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    began = time.monotonic()
    while Path(f"/proc/{worker}").exists() and "Z" not in Path(f"/proc/{worker}/stat").read_text().split()[2]:
        assert time.monotonic() - began < 60
        time.sleep(0.05)
    for end in asking:
        os.close(end)


TEMPLATES = {
    "plain": "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}",
    "tools": "{{ tools | tojson(indent=2) }}{{ messages[-1].content }}",
    "keywords": "{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% endfor %}",
    "state": "{% set n = namespace(k=0) %}{% for m in messages %}{% set n.k = n.k + 1 %}{{ n.k }}"
    "{{ m.reasoning_content }}{% endfor %}{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_written_is_what_transformers_writes(name: str, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, chat_template=TEMPLATES[name])
    said = [{"role": "user", "content": "é hi", "name": None}, {"role": "assistant", "content": "x", "thinking": "why"}]
    for settings in ({}, {"add_generation_prompt": True}, {"tools": [{"type": "function", "function": {"name": "f"}}]}):
        theirs = tokenizer.apply_chat_template(said, tokenize=False, **settings)
        assert render_chat(tokenizer, said, **settings) == theirs
    ids = tokenizer.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
    assert encode_messages(tokenizer, said) == list(ids)


@pytest.mark.parametrize(
    "file",
    ["tokenizer_config.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja"],
)
def test_limits_hold_whatever_way_a_template_comes(file: str, renderer: GuardedProcess, tmp_path: Path) -> None:
    """An additional one lies beside a sound one, and is taken where tools are told of."""
    path, is_additional, template = tmp_path / file, "/" in file, "{{ 'x' * (2 * 10 ** 6) }}"
    save_tokenizer(tmp_path, chat_template="{{ messages[0].content }}" if is_additional else None)
    path.parent.mkdir(exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, "chat_template": template}) if path.suffix == ".json" else template)
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"^the model's chat template failed \(it writes 2000000 characters, .*\): "):
        encode_messages(tokenizer, SAID, TemplateOptions([{"type": "function", "function": {"name": "f"}}]))
    if not is_additional:
        with pytest.raises(UserError, match="leave it out with `raw`"):
            encode_prompt(tokenizer, "hi")


def test_what_is_no_template_is_refused(renderer: GuardedProcess, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    for odd in (5, ["x"], {"other": "x"}, {"default": 5}):
        tokenizer.chat_template = odd
        with pytest.raises(UserError, match="the model's chat template failed"):
            encode_prompt(tokenizer, "hi")


def test_no_template_is_rendered_anywhere_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """transformers' own way runs it in this process, where nothing limits it."""
    tokenizer = save_tokenizer(tmp_path, chat_template=TEMPLATES["plain"])
    monkeypatch.setattr("transformers.utils.chat_template_utils._compile_jinja_template", None)
    with contextlib.suppress(TypeError):
        tokenizer.apply_chat_template(SAID)
        raise AssertionError("the control must fail")
    assert tokenizer.decode(encode_prompt(tokenizer, "hi")).endswith("<user>hi<bot>")
