"""Commands of a conversation and its session's file, as they are typed; sampling that the model suggests."""

import json
import signal
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from reciting import SAID, TEMPLATE, at_call, at_sweep, interrupt
from refusals import assert_refused
from shell import Outcome, shell
from tiny import FAMILIES, build, save, save_tokenizer

from offload.cli import repl
from offload.cli.console import Console
from offload.cli.slash_commands import _HELP
from offload.engine.chat import Chat
from offload.engine.decoder import Decoder
from offload.engine.generation import Run
from offload.errors import UserError


@pytest.fixture(scope="module")
def babbler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, which answers differently with every seed and every question."""
    folder = save(build(FAMILIES["llama"]()), tmp_path_factory.mktemp("babbler"))
    save_tokenizer(folder, chat_template=TEMPLATE)
    return folder


def chat(model: Path, stdin: str, *arguments: object, quiet: bool = True) -> Outcome:
    flags = ("--ram", "1GiB", "--context", 384, "--threads", 1, *(["--quiet"] if quiet else []))
    return shell("chat", "-m", model, *flags, *arguments, stdin=stdin.encode())


def babble(model: Path, stdin: str, *arguments: object) -> str:
    """Answers of eight tokens each."""
    outcome = chat(model, stdin, "-n", 8, "--temp", 1, *arguments)
    assert outcome.code == 0
    return outcome.out


def test_every_command_is_obeyed(letters: Path) -> None:
    lines = ["/help", "/system Be.", "/system", "Say", "/set", "/set temp 0.5", "/set max_tokens 2", "Say"]
    outcome = chat(letters, "\n".join([*lines, "/stats", "/undo", "/bye", "Say"]))
    assert outcome.code == 0 and outcome.out == "Ok.\nOk\n"
    said_lines = outcome.err.splitlines()
    assert "\n".join(said_lines[: len(_HELP.splitlines())]) == _HELP
    first, *rest = said_lines[len(_HELP.splitlines()) :]
    assert first.startswith("the system prompt is set")
    assert rest[:3] == [
        "Be.",
        "greedy, seed 0; as long as there is room",
        "temperature 0.5, seed 0; as long as there is room",
    ]
    assert rest[3] == "temperature 0.5, seed 0; at most 2 tokens" and rest[4].startswith(
        "(2 tokens, cut off by its limit"
    )
    num_used = len("<system:Be.<user:Say<assistant:Ok.>" + "<user:Say<assistant:" + "Ok")
    assert rest[5].startswith(f"{num_used} of 384 positions used; peak memory") and rest[6:] == ["forgotten: Say"]
    for name in ("/help", "/clear", "/system", "/save", "/load", "/read", "/retry", "/undo", "/set", "/stats", "/bye"):
        assert f"\n{name} " in f"\n{_HELP}"


@pytest.mark.parametrize("leave", ["/bye", "/exit", "/quit"])
def test_ways_to_leave(leave: str, letters: Path) -> None:
    assert chat(letters, f"Say\n{leave}\nSay\n") == Outcome(0, "Ok.\n", "")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("/regenerate", "/load /read /retry /undo /set /stats /bye, got /regenerate: a question that begins"),
        ("/", "got /: a question that begins with / needs a space before it"),
        ("/hlep", "got /hlep. Did you mean /help?"),
        ("/undo", "nothing was asked yet"),
        ("/retry", "nothing was asked yet"),
        ("/stats", "nothing was answered yet"),
        ("/save", "a file is needed, got none: name one"),
        ("/read", "a file is needed, got none: name one, such as notes.txt"),
        ("/read nowhere.txt", "cannot read the prompt from nowhere.txt (No such file or directory)"),
        ("/load nowhere", "cannot read the session nowhere"),
        ("/save nowhere/at/all", "cannot write the session to nowhere/at/all (No such file or directory)"),
    ],
)
def test_what_cannot_be_obeyed_is_one_line_and_ends_nothing(command: str, words: str, letters: Path) -> None:
    outcome = chat(letters, f"{command}\nSay")
    assert outcome.code == 0 and outcome.out == "Ok.\n", "and no question for the model"
    assert outcome.err.startswith("offload: ") and outcome.err.count("\n") == 1 and words in outcome.err


def test_a_question_may_be_in_a_file_and_draws_go_on_where_they_were(babbler: Path, tmp_path: Path) -> None:
    (tmp_path / "question").write_text("Say")
    whole = babble(babbler, "Say\nWhat?")
    assert babble(babbler, f"/read {tmp_path / 'question'}\nWhat?") == whole
    first, second = (babble(babbler, question, "--session", tmp_path / "talk") for question in ("Say", "What?"))
    assert first + second == whole


def test_another_answer_is_another_draw_and_replaces_the_first(babbler: Path) -> None:
    first, second = babble(babbler, "Say"), babble(babbler, "What?")
    both, all_three = babble(babbler, "Say\n/retry"), babble(babbler, "Say\n/retry\nAnd?")
    assert both.startswith(first) and all_three.startswith(both) and both[len(first) :] != first
    undone = babble(babbler, "What?\n/undo\nSay\nAnd?")
    assert undone == second + all_three[len(first) :], "each turn has the next seed, and what was undone left no trace"


def test_a_stopped_answer_stays_and_can_be_tried_again(talker: Path) -> None:
    with at_sweep(4, interrupt):
        outcome = chat(talker, "Say\n/retry\n/undo\n/undo\n")
    cut, whole = outcome.out.split("\n", 1)
    assert whole == SAID + "\n" and cut and SAID.startswith(cut.rstrip("\ufffd"))
    assert outcome.err.splitlines()[1].startswith("offload: nothing was asked yet")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_answer_that_fails_ends_its_line_and_not_the_conversation(talker: Path) -> None:
    def fail() -> None:
        raise UserError("scores are not finite: use another --dtype")

    with at_sweep(3, fail):
        outcome = chat(talker, "Say\nSay\n", quiet=False)
    cut, whole = outcome.out.split("\n", 1)
    assert SAID.startswith(cut.rstrip("\ufffd")) and cut and whole == SAID + "\n" and outcome.code == 0
    assert "stopped" in outcome.err and "offload: scores are not finite" in outcome.err


def test_stop_strings_end_answers(talker: Path) -> None:
    assert chat(talker, "Say\n", "--stop", "world", "--stop", "wör").out == " Hello \n"
    assert chat(talker, "/set stop wör\nSay\n/set stop\nSay\n").out == " Hello \n" + SAID + "\n"


# Sessions


def test_a_conversation_is_kept_and_gone_on_with(letters: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk"
    whole = chat(letters, "Say\nSay it\nAgain", "--system", "Be.", quiet=False)
    first = chat(letters, "Say\nSay it", "--system", "Be.", "--session", path, quiet=False)
    second = chat(letters, "Again", "--session", path, quiet=False)
    assert first.out + second.out == whole.out == 3 * "Ok.\n"
    assert f"going on with {path}: 2 questions, the last one asked was 'Say it'" in second.err
    read = [
        [line.split("; ")[1] for line in outcome.err.splitlines() if " tokens read)" in line]
        for outcome in (whole, second)
    ]
    assert read[0][2] == read[1][0], "as little is read as without a break"
    other = chat(
        letters, "/save x\n/clear\nSay".replace("x", str(tmp_path / "copy")), "--session", path, "--system", "No."
    )
    assert other.code == 0
    assert f"kept in {path}" in chat(letters, "/save", "--session", path, quiet=False).err, "it needs no name"
    held = chat(letters, f"/system\n/load {tmp_path / 'copy'}\n/undo\n/undo\n/undo\n/undo", "--session", path)
    loaded = f"going on with {tmp_path / 'copy'}: 3 questions, the last one asked was 'Again'"
    stays = f"{path} stays as it is, and answers are kept no more: /save FILE keeps them"
    forgotten = [f"forgotten: {question}" for question in ("Again", "Say it", "Say")]
    assert held.err.splitlines()[:6] == ["No.", loaded, stays, *forgotten]
    assert chat(letters, "/undo", "--session", path).err == "forgotten: Say\n", "what was loaded replaced nothing"
    assert chat(letters, "/undo", "--session", path).err.startswith("offload: nothing was asked"), "that is kept, too"


def test_what_is_said_is_kept_however_it_ends(talker: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk"
    with at_sweep(4, lambda: (interrupt(), interrupt())):
        assert chat(talker, "Say\n", "--session", path).code == 130
    assert chat(talker, "/undo", "--session", path).err == "forgotten: Say\n"


@pytest.mark.parametrize(
    ("owner", "method", "number"),
    [
        (Run, "result", 1),  # of the conversation, which has not noted the answer yet
        (Run, "result", 2),
        (Console, "text", 3),  # what was not shown of a stopped answer; while an answer comes it ends it
        (repl, "turn_line", 1),
        (Decoder, "save_session", 1),
    ],
)
@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_second_interrupt_loses_nothing(
    talker: Path, tmp_path: Path, owner: Any, method: str, number: int, is_stopped: bool
) -> None:
    """It comes when an answer has ended, by the first one or by itself, and is not kept yet."""
    path = tmp_path / "talk"
    first = at_sweep(4, interrupt) if is_stopped else nullcontext()
    both = interrupt if is_stopped else lambda: (interrupt(), interrupt())
    with first, at_call(owner, method, number, both):
        outcome = chat(talker, "Say\n", "--session", path, quiet=False)
    assert outcome.code == 130 and outcome.err.endswith("offload: interrupted\n")
    assert outcome.out.endswith("\n") and SAID.startswith(outcome.out.rstrip("\n\ufffd"))
    assert chat(talker, "/undo", "--session", path).err == "forgotten: Say\n"


@pytest.mark.parametrize(
    ("owner", "method", "number", "num_said"),
    [
        (Chat, "_begin", 1, 1),  # before a layer has run
        (repl, "turn_line", 1, 2),
        (Decoder, "save_session", 1, 2),
    ],
)
def test_one_interrupt_never_ends_a_conversation(
    talker: Path, tmp_path: Path, owner: Any, method: str, number: int, num_said: int
) -> None:
    with at_call(owner, method, number, interrupt):
        outcome = chat(talker, "Say\nSay\n", "--session", tmp_path / "talk", quiet=False)
    assert outcome.code == 0 and outcome.out == "\n" * (2 - num_said) + (SAID + "\n") * num_said
    assert ("(0 tokens, stopped" in outcome.err) == (num_said == 1)


@pytest.mark.parametrize(("number_of_failures", "code"), [(1, 0), (2, 2)])
def test_a_session_that_could_not_be_written_is_tried_again_at_the_end(
    number_of_failures: int, code: int, talker: Path, tmp_path: Path
) -> None:
    path, save, calls = tmp_path / "talk", Decoder.save_session, count(1)

    def failing(decoder: Decoder, *given: object) -> None:
        if next(calls) <= number_of_failures:
            raise UserError("cannot write the session")
        save(decoder, *given)  # type: ignore[arg-type]

    with patch.object(Decoder, "save_session", failing):
        outcome = chat(talker, "Say\n", "--session", path)
    assert outcome.code == code and path.exists() is (code == 0) and outcome.out == SAID + "\n"
    assert outcome.err == number_of_failures * "offload: cannot write the session\n"


def test_only_a_run_with_a_token_writes_its_session(looper: Path, tmp_path: Path) -> None:
    def fail() -> None:
        raise UserError("scores are not finite")

    path = tmp_path / "text"
    with at_sweep(3, fail):
        assert generate(looper, "-p", "Say:", "-n", 9, "--session", path).code == 2
    before = path.read_bytes()
    with at_sweep(1, interrupt):
        assert generate(looper, "-p", "wrong", "-n", 9, "--session", path).code == 130
    assert path.read_bytes() == before
    path.unlink()
    with at_call(Decoder, "save_session", 1, interrupt):
        assert generate(looper, "-p", "Say:", "-n", 4, "--session", path).code == 130
    assert path.exists(), "an interrupt waits for it to be written"


def generate(model: Path, *arguments: object, stdin: str = "") -> Outcome:
    flags = ("--ram", "1GiB", "--context", 256, "--threads", 1, "--quiet")
    return shell("generate", "-m", model, *flags, *arguments, stdin=stdin.encode())


def test_a_text_is_kept_and_gone_on_with(ender: Path, tmp_path: Path) -> None:
    path = tmp_path / "text"
    first = generate(ender, "-p", "Say:", "-n", 4, "--session", path)
    second = generate(ender, "-n", 1, "--session", path)
    result = json.loads(generate(ender, "--session", path, "--json").out)
    assert first.out[:-1] + second.out[:-1] + result["text"] == SAID, "the newline is the shell's"
    assert result["num_kept_tokens"] == result["num_prompt_tokens"] - 1 == len("Say:") + 4
    assert_refused(generate(ender, "--session", path), "has come to its end: give a prompt")
    again = json.loads(generate(ender, "-p", "Say:Say:", "--session", path, "--json").out)
    assert again["text"] == SAID and again["num_kept_tokens"] == len("Say:"), "a prompt cache"


def test_an_interrupted_text_is_kept(looper: Path, tmp_path: Path) -> None:
    path = tmp_path / "text"
    whole = json.loads(generate(looper, "-p", "Say:", "-n", 20, "--json").out)["token_ids"]
    with at_sweep(8, interrupt):
        first = generate(looper, "-p", "Say:", "-n", 20, "--session", path, "--json")
    assert first.code == 130
    begun = json.loads(first.out)["token_ids"]
    rest = json.loads(generate(looper, "-n", 20 - len(begun), "--session", path, "--json").out)
    assert 0 < len(begun) < 20 and begun + rest["token_ids"] == whole and rest["num_kept_tokens"]


def test_sessions_that_cannot_be_are_refused(ender: Path, letters: Path, looper: Path, tmp_path: Path) -> None:
    path, talk = tmp_path / "text", tmp_path / "talk"

    def refuse(words: str, model: Path, *flags: object, prompt: tuple[str, ...] = ("-p", "x")) -> None:
        assert_refused(generate(model, *prompt, "--session", *flags), words)

    refuse("(it is a folder): name another file", ender, tmp_path)
    refuse("is no folder that can be written", ender, tmp_path / "no" / "text")
    refuse("the prompt is empty", ender, path, prompt=())
    assert generate(ender, "-p", "Say:", "-n", 1, "--session", path).code == 0
    assert chat(letters, "Say", "--session", talk).code == 0
    before = talk.read_bytes()
    refuse("computed with another model (weights differ): name another file, or delete it to begin anew", looper, path)
    refuse("computed with other --dtype", ender, path, "--dtype", "float16")
    refuse("holds a conversation", letters, talk, "--context", 384)
    path.write_bytes(b"\0" * 99)
    refuse("is broken", ender, path)
    assert talk.read_bytes() == before and path.read_bytes() == b"\0" * 99


# Sampling


def suggesting(model: Path, folder: Path, **values: object) -> Path:
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def sampled(model: Path, *arguments: object) -> dict[str, object]:
    outcome = generate(model, "-p", "x", "-n", 2, "--json", *arguments)
    assert outcome.code == 0, outcome.err
    return dict(json.loads(outcome.out)["sampling"])


NONE = {"temperature": 0, "top_p": 1, "top_k": 0}


def test_the_model_suggests_and_the_user_decides(looper: Path, tmp_path: Path) -> None:
    suggested = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    model = suggesting(looper, tmp_path, do_sample=True, **suggested, top_h=None, eos_token_id=[])
    assert sampled(model) == sampled(model, "--seed", 3) == suggested
    assert sampled(model, "--greedy") == sampled(model, "--temp", 0) == sampled(model, "--greedy", "--temp", 1) == NONE
    assert sampled(model, "--temp", 0.7) == {**NONE, "temperature": 0.7}, "nothing of it is the model's"
    loud = shell("generate", "-m", model, "-p", "x", "-n", 2, "--ram", "1GiB", "--context", 64, "--threads", 1)
    lain_over = {"repeat_penalty": 1.2, "logit_bias": {"5": 1.5}}
    given = ("--repeat-penalty", 1.2, "--logit-bias", "5:1.5")
    assert sampled(model, *given) == {**suggested, **lain_over}, "penalties leave the rest to the model"
    assert sampled(model, *given, "--greedy") == {**NONE, **lain_over}
    line = "sampling as the model suggests: temperature 0.6, top-p 0.9, top-k 20; --greedy for none"
    assert line in loud.err.splitlines()
    assert "model suggests:" not in shell("generate", "-m", model, "-p", "x", "-n", 2, "--ram", "1GiB", "--greedy").err


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"temperature": 0.6}, NONE),
        ({"do_sample": False, "temperature": 0.6, "top_p": 7}, NONE),
        ({"do_sample": True}, {**NONE, "temperature": 1}),
        ({"do_sample": True, "temperature": None, "top_k": 50}, {**NONE, "temperature": 1, "top_k": 50}),
        ({"do_sample": True, "min_p": 0.1}, {**NONE, "temperature": 1, "min_p": 0.1}),
        ({"min_p": 0.1, "repetition_penalty": 1.05}, {**NONE, "repeat_penalty": 1.05}),
        ({"repetition_penalty": 1.0}, NONE),
    ],
)
def test_what_a_model_says_about_sampling(
    values: dict[str, object], wanted: dict[str, object], looper: Path, tmp_path: Path
) -> None:
    assert sampled(suggesting(looper, tmp_path, **values)) == wanted
