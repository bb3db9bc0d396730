"""One decoder and several threads: each gets the text that it would get alone, or is refused in one line."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from reciting import PROMPT, at_call, open_decoder

import offload
from offload.engine.decoder import Decoder
from offload.engine.text import TextStream
from offload.model.target import Target
from offload.sampling_options import Sampling
from offload.streaming.layers import Layers

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


def test_threads_that_collide_get_the_right_text_or_a_refusal(looper: Path) -> None:
    with open_decoder(looper) as decoder:
        wanted, started = decoder.generate(PROMPT, max_new_tokens=12).text, threading.Barrier(4)

        def write() -> list[str]:
            started.wait(PATIENCE_S)
            return [attempt(lambda: "".join(decoder.stream(PROMPT, max_new_tokens=12))) for _ in range(25)]

        with ThreadPoolExecutor(4) as pool:
            outcomes = [one for future in [pool.submit(write) for _ in range(4)] for one in future.result()]
    assert set(outcomes) <= {wanted, "refused"} and wanted in outcomes


def attempt(act: Callable[[], str]) -> str:
    try:
        return act()
    except offload.UserError:
        return "refused"


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


@pytest.mark.parametrize("act", [lambda decoder: decoder.generate(PROMPT), Decoder.close], ids=["generate", "close"])
def test_what_a_step_calls_cannot_use_the_decoder(act: Callable[[Decoder], object], looper: Path) -> None:
    with open_decoder(looper) as decoder:
        wanted = decoder.generate(PROMPT, max_new_tokens=LENGTH).text
        use = at_call(Layers, "release", 7, lambda: act(decoder))
        with use, pytest.raises(offload.UserError, match="in the middle of a step"):
            decoder.generate(PROMPT, max_new_tokens=LENGTH)
        assert decoder.generate(PROMPT, max_new_tokens=LENGTH).text == wanted
