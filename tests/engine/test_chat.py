"""Conversations: a turn writes what a fresh decoder writes on the whole of it; and several threads take turns."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from matrix import matrix
from plans import plan_memory
from reciting import PIECES, PROMPT, SAID, TEMPLATE, at_call, open_decoder, streaming_ram
from refusals import assert_refused
from shell import Outcome, shell
from tiny import FAMILIES, save_pair, save_reciter, save_tokenizer

import offload
from offload.checkpoint.open import open_checkpoint
from offload.engine.decoder import Decoder
from offload.engine.request import Request
from offload.engine.text_stream import TextStream
from offload.errors import UserError
from offload.model.target import Target
from offload.sampling_options import Sampling
from offload.trees.spec import parse_tree

NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
NUM_NEW, CONTEXT = 20, 384
QUESTIONS = ("Who?", "Why, then?", "And?")


def open_pair(family: str, directory: Path, tree: str, rule: str = "match", **options: object) -> Decoder:
    """A random pair, streamed, that writes anything, broken UTF-8 too, which no template gives back as it was."""
    if not directory.joinpath("target").exists():
        target, _ = save_pair(FAMILIES[family](), directory)
        save_tokenizer(target, chat_template=TEMPLATE)
    pair = [open_checkpoint(directory / name) for name in ("target", "draft")]
    num_nodes = parse_tree(tree).num_nodes
    sizes = {"context": CONTEXT, "num_nodes": num_nodes, "rule": rule, "experts": "layers"}
    roomy = plan_memory(pair, ram=1 << 40, dtype="float32", **sizes)
    ram = roomy.fixed_bytes + 3 * max(roomy.layer_bytes)
    names = [checkpoint.directory for checkpoint in pair]
    decoder = offload.load(*names, ram, tree, rule, context=CONTEXT, dtype="float32", threads=1, **options)  # type: ignore[arg-type]
    assert decoder.plan.is_streamed, "all of it fits"
    return decoder


def said(chat: offload.Chat, question: str) -> tuple[list[dict[str, str]], list[int]]:
    """What the model was given and what it wrote."""
    asked = [*chat.messages, {"role": "user", "content": question}]
    text = "".join(chat.ask(question))
    assert chat.turn is not None and chat.turn.result().text == text
    return asked, chat.turn.result().token_ids


@pytest.mark.parametrize(
    ("family", "tree", "rule", "temperature"),
    [
        ("llama", "8x3", "match", 0.0),
        ("llama", "grown:16x4", "match", 0.8),
        ("llama", "none", "match", 0.0),
        ("qwen3-sliding", "chain:3", "match", 0.0),
        ("gemma3", "8x3", "match", 1.0),
        ("llama", "8x3", "sequoia", 1.0),
    ],
)
def test_a_turn_is_that_of_a_fresh_decoder(
    family: str, tree: str, rule: str, temperature: float, tmp_path: Path
) -> None:
    with open_pair(family, tmp_path, tree, rule) as decoder:
        chat = offload.Chat(decoder, Sampling(temperature=temperature, seed=5), system="Be.", max_new_tokens=NUM_NEW)
        turns, kept = [], []
        for question in QUESTIONS:
            turns.append(said(chat, question))
            assert chat.turn is not None
            kept.append(chat.turn.result().stats.num_kept_tokens)
        assert kept[0] == 0 and kept[1] >= len("<Be.<Who?<:") and kept[2] > kept[1], "else nothing is shown"
    with open_pair(family, tmp_path, tree, rule) as fresh:
        for number, (asked, token_ids) in enumerate(turns):
            alone = fresh.generate(asked, max_new_tokens=NUM_NEW, temperature=temperature, seed=5 + number)
            assert alone.token_ids == token_ids and alone.stats.num_kept_tokens == 0


def test_everything_is_kept_where_the_template_gives_it_back(letters: Path) -> None:
    """Except for the last token, when it was emitted and never computed with."""
    with offload.load(letters, letters, "1GiB", "8x3", context=CONTEXT, threads=1) as decoder:
        chat, held = offload.Chat(decoder, Sampling(seed=2**63 - 1)), 1
        for number in range(3):
            assert "".join(chat.ask("Say")) == "Ok."
            assert chat.turn is not None
            assert chat.turn.sequence.sampler.sampling.seed == (2**63 - 1, 0, 1)[number]
            result = chat.turn.result()
            assert result.stats.num_kept_tokens in (held - 1, held)
            held = result.stats.num_prompt_tokens + len(result.token_ids)
        assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 3
        chat.clear()
        assert chat.messages == []


def test_runs_in_between_cost_time_and_nothing_else(talker: Path, tmp_path: Path) -> None:
    with offload.load(talker, talker, "1GiB", "8x3", context=CONTEXT, threads=1) as decoder:
        chat = offload.Chat(decoder)
        list(chat.ask("Say"))
        decoder.generate("Something else:", max_new_tokens=3, raw=True)
        decoder.save_session(tmp_path / "text")
        with pytest.raises(UserError, match="holds a text and no conversation"):
            chat.load(tmp_path / "text")
        assert "".join(chat.ask("Say")) == SAID and len(chat.messages) == 4
        chat = offload.Chat(decoder, Sampling(seed=2**63 - 1))
        for seed in (2**63 - 1, 0):
            assert "".join(chat.ask("Say")) == SAID and chat.turn is not None
            assert chat.turn.result().sampling.seed == seed, "the first one follows on the last"


@matrix("number", [1, 3, 4, 6, 9, 14], always=[3], daily=2)
def test_an_answer_that_is_stopped_spoils_nothing(number: int, tmp_path: Path) -> None:
    """Stopped behind any layer: of the prompt's sweep, of a later one, at its end."""
    layers = 0

    def stop() -> None:
        nonlocal layers
        layers += 1
        if layers == number:
            raise InterruptedError

    with open_pair("llama", tmp_path, "8x3", on_layer=stop) as decoder:
        chat = offload.Chat(decoder, max_new_tokens=NUM_NEW)
        with pytest.raises(InterruptedError):
            list(chat.ask("Who?"))
        assert len(chat.messages) == (2 if number > 4 else 0), "a question without any answer is forgotten"
        asked, token_ids = said(chat, "Why, then?")
        assert decoder.generate(asked, max_new_tokens=NUM_NEW).token_ids == token_ids


def test_an_answer_that_nobody_listens_to_any_more_counts_as_far_as_it_was_heard(talker: Path) -> None:
    with offload.load(talker, talker, "1GiB", "chain:1", context=CONTEXT, threads=1) as decoder:
        chat = offload.Chat(decoder)
        with closing(chat.ask("Say")) as pieces:
            heard = next(pieces) + next(pieces)
        assert SAID.startswith(heard) and chat.messages[1]["content"] == heard.rstrip("\ufffd")
        assert "".join(chat.ask("Say")) == SAID


def test_a_conversation_that_fills_the_context_is_refused(talker: Path) -> None:
    with offload.load(talker, None, "1GiB", context=64, threads=1) as decoder:
        chat = offload.Chat(decoder)
        list(chat.ask("x"))
        with pytest.raises(UserError, match=r"the conversation has \d+ tokens, the context 64: begin anew"):
            chat.ask("y" * 64)
        assert len(chat.messages) == 2
        chat.clear()
        answer = "".join(chat.ask("x" * 45))
        assert chat.turn is not None and chat.turn.result().finish_reason == "length"
        assert answer and SAID.startswith(answer.rstrip("\ufffd"))


# At the command line


def chat(model: Path, stdin: str, *arguments: object) -> Outcome:
    flags = ("-d", model, "--tree", "chain:1", "--ram", streaming_ram(model), "--context", 256, "--threads", 1)
    return shell("chat", "-m", model, *flags, *arguments, stdin=stdin.encode())


@pytest.mark.usefixtures("_no_weights")
def test_models_that_do_not_know_turns_are_refused(sound: Path, tmp_path: Path) -> None:
    assert_refused(chat(sound, "Say"), "the model has no chat template", "offload generate")
    strict = save_reciter(tmp_path, PIECES, ends=True, chat_template=NO_SYSTEM)
    assert_refused(chat(strict, "Say", "--system", "Be."), "chat template failed", "some know no system prompt")


NO_TEXT = "a message must have a role and a content of text"
NOT_READ = "images and sound are not read, got {}: leave it out"


def user(content: Any, **options: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **options}


@pytest.mark.usefixtures("_no_weights")
@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([{"role": "user"}], f"{NO_TEXT}, got {{'role': 'user'}}"),
        ([user("a"), 5], f"{NO_TEXT}, got 5"),
        ([user(5)], NO_TEXT),
        ([user([{"type": "image", "url": "x"}, {"type": "text", "text": "What?"}])], NOT_READ.format("image")),
        ([user([{"type": "audio"}, {"type": "video"}])], NOT_READ.format("audio, video")),
        ([user("What?", images=["x"])], NOT_READ.format("images")),
        ([user([{"image": "x"}])], NOT_READ.format("image")),
        ([user([{"text": "What?"}])], NOT_READ.format("a part without a type")),
        ([user([{"type": "text"}])], NO_TEXT),
        ([user(["Say"])], NO_TEXT),
    ],
)
def test_messages_are_checked(prompt: list[Any], words: str, talker: Path) -> None:
    with pytest.raises(UserError) as error:
        offload.load(talker, ram="1GiB", context=64, threads=1, request=Request(prompt))
    assert words in str(error.value)


LENGTH, PATIENCE_S = 40, 60
IN_USE = "in use by another thread: wait"


@contextmanager
def held_at(owner: type, method: str, number: int, act: Callable[[], object]) -> Iterator["Future[Any]"]:
    """Another thread runs `act` up to such a call and stays there until the block is left."""
    there, go_on = threading.Event(), threading.Event()

    def stay() -> None:
        there.set()
        assert go_on.wait(PATIENCE_S)

    with ThreadPoolExecutor(1) as pool, at_call(owner, method, number, stay):
        outcome = pool.submit(act)
        try:
            assert there.wait(PATIENCE_S)
            yield outcome
        finally:
            go_on.set()


@pytest.mark.parametrize(("owner", "method"), [(Target, "score"), (TextStream, "push")], ids=["step", "between steps"])
def test_a_second_thread_is_refused_and_the_first_one_undisturbed(owner: type, method: str, looper: Path) -> None:
    with open_decoder(looper) as decoder:
        wanted = decoder.generate(PROMPT, max_new_tokens=LENGTH).token_ids
        with held_at(owner, method, 3, lambda: decoder.generate(PROMPT, max_new_tokens=LENGTH)) as first:
            for another in (decoder.generate, lambda prompt: next(decoder.stream(prompt))):
                with pytest.raises(offload.UserError, match=IN_USE):
                    another(PROMPT)
        assert first.result().token_ids == wanted
        assert decoder.generate(PROMPT, max_new_tokens=LENGTH).token_ids == wanted, "it is free again"


def test_one_run_that_two_threads_read_is_written_once(looper: Path) -> None:
    with open_decoder(looper) as decoder:
        wanted = decoder.generate(PROMPT, max_new_tokens=LENGTH)
        run = decoder.run(PROMPT, Sampling(), max_new_tokens=LENGTH)
        with held_at(TextStream, "push", 3, lambda: list(run)) as first, pytest.raises(offload.UserError, match=IN_USE):
            list(run)
        assert "".join(first.result()) == wanted.text == run.result().text


@pytest.mark.parametrize(("owner", "method"), [(Target, "score"), (TextStream, "push")], ids=["step", "between steps"])
def test_close_ends_what_another_thread_writes(owner: type, method: str, looper: Path) -> None:
    decoder = open_decoder(looper)
    with held_at(owner, method, 3, lambda: decoder.generate(PROMPT, max_new_tokens=LENGTH)) as first:
        closing = threading.Thread(target=decoder.close)
        closing.start()
        closing.join(0.1)
        assert closing.is_alive(), "a step is under way"
    with pytest.raises(offload.UserError, match="this decoder was closed"):
        first.result()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
