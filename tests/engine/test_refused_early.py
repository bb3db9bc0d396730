"""What cannot run is refused early: before a weight is read, and what needs no model, before one is looked for."""

from pathlib import Path
from typing import Any

import pytest
from refusals import assert_refused
from shell import shell

import offload
from offload.engine.request import Request
from offload.errors import UserError

pytestmark = pytest.mark.usefixtures("_instant_link")


@pytest.mark.usefixtures("_no_weights")
@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request([5] * 60), "60 tokens and 128 new ones exceed the context of 64"),
        (Request([]), "the prompt is empty"),
        (Request([10**6]), "prompt ids must lie in"),
        (Request(["a"]), r"must be text, messages or token ids, got \['a'\]"),  # type: ignore[list-item]
        (Request([1.5]), r"must be text, messages or token ids, got \[1.5\]"),  # type: ignore[list-item]
        (Request(7), "must be text, messages or token ids, got 7"),  # type: ignore[arg-type]
        (Request("Count: caf\udce9"), "text must be Unicode, got half a character at 10"),
    ],
)
def test_the_first_request_is_checked_by_load(request_: Request, words: str, sound: Path) -> None:
    with pytest.raises(UserError, match=words):
        offload.load(sound, sound, "1GiB", context=64, threads=1, request=request_)


@pytest.mark.parametrize("models", [(None,), (5,), (["a"],), ("no/such", 5)])
def test_a_model_that_is_no_name_is_refused(models: tuple[Any, ...], sound: Path) -> None:
    with pytest.raises(UserError, match="a model must be a folder, a GGUF file or a hub id"):
        offload.load(*(str(sound) if name == "no/such" else name for name in models), ram="1GiB")


def test_arguments_of_another_type_are_named(sound: Path) -> None:
    with offload.load(sound, sound, "1GiB", "4x2", context=64, threads=1) as decoder:
        for name in ("tree", "rule"):
            with pytest.raises(UserError, match=f"`{name}` must be"):
                decoder.generate("Count:", max_new_tokens=2, **{name: 5})
        for prompt in (5, None, b"Count:", [5, "a"], [None], {"role": "user"}, [{"role": "user", "content": [5]}]):
            with pytest.raises(UserError):
                decoder.generate(prompt, max_new_tokens=2)  # type: ignore[arg-type]


def test_demo_says_where_it_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert_refused(shell("demo", "--size", "60MB"), "cannot write", "Not a directory", "set XDG_CACHE_HOME")


@pytest.mark.usefixtures("_no_weights")
def test_tune_measures_nothing_in_vain(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short, command = tmp_path / "short.txt", ("tune", "-m", sound, "-d", sound, "--ram", "1GiB", "--text")
    short.write_text("x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert_refused(shell(*command, short), "a text must have 64 tokens")
    assert_refused(shell(*command, short, "--tree", "oak"), "--tree must be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(short))
    assert_refused(shell(*command, short), "cannot write", "set XDG_CACHE_HOME")
