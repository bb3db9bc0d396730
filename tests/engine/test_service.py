"""Many callers of one decoder: each gets the text that it would get alone, and none waits for one that is gone."""

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reciting import PROMPT, before_steps, failing_reads, open_decoder, recited
from waiting import PATIENCE_S, until

import offload
from offload.engine.decoder import Decoder
from offload.engine.job import MOST_PIECES, Cancelled
from offload.engine.request import Request
from offload.engine.service import Closing, Engine, QueueFull
from offload.engine.text_stream import TextStream
from offload.errors import ReadError, UserError
from offload.sampling_options import Sampling

FOR_EVER = 200


def request(num_new: int = 12, **sampling: Any) -> Request:
    return Request(PROMPT, Sampling(**sampling), num_new)


@contextmanager
def engine_of(model: Path, **options: Any) -> Iterator[Engine]:
    with open_decoder(model) as decoder, Engine(decoder, **options) as engine:
        yield engine
    assert not any(thread.name == "offload-engine" for thread in threading.enumerate())


@contextmanager
def held_passes() -> Iterator[threading.Semaphore]:
    """A pass takes place for every release."""
    passes = threading.Semaphore(0)
    with before_steps(lambda: passes.acquire(timeout=PATIENCE_S) or _fail()):
        try:
            yield passes
        finally:
            passes.release(1 << 20)


def test_each_caller_gets_what_it_would_get_alone_and_texts_share_passes(looper: Path) -> None:
    """They leave one after the other as they end, and one is cancelled in between."""
    wishes: list[Any] = [(num, {"temperature": 9.0, "seed": seed}) for seed, num in enumerate((30, 5, 18, 9, 24))]
    with open_decoder(looper) as decoder:
        wanted = [decoder.generate(PROMPT, max_new_tokens=num, **wish).token_ids for num, wish in wishes]
        assert len(set(map(tuple, wanted))) > 1, "else the test could not tell them apart"
        with Engine(decoder) as engine:
            assert [engine.submit(request(num, **wish)).result(PATIENCE_S).token_ids for num, wish in wishes] == wanted
            alone = engine.figures()
    assert (alone.num_done, alone.num_tokens) == (5, sum(map(len, wanted)))
    assert (alone.num_active, alone.num_waiting) == (0, 0) and alone.num_passes == len(alone.recent) > 0
    assert alone.moved.num_bytes == sum(recent_pass.moved.num_bytes for recent_pass in alone.recent) > 0
    with shared_by(looper, 3) as engine, ThreadPoolExecutor(5) as pool:
        goner = engine.submit(request(FOR_EVER))
        result = pool.map(lambda wish: engine.submit(request(wish[0], **wish[1])).result(PATIENCE_S).token_ids, wishes)
        next(iter(goner))
        goner.cancel()
        assert list(result) == wanted
        shared = engine.figures()
        assert shared.num_passes < alone.num_passes, "texts share passes"
        assert max(recent_pass.num_texts for recent_pass in shared.recent) == engine.decoder.num_parallel == 3


def test_what_others_have_gained_by_the_pass_of_one_that_fails_is_handed_out(
    looper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts before it in the pass have their piece already; so have those behind it."""
    push = TextStream.push

    def failing(stream: TextStream, tokens: Any) -> Any:
        return _fail() if "!" in stream._stop and len(stream.tokens) > 5 else push(stream, tokens)

    monkeypatch.setattr(TextStream, "push", failing)
    with shared_by(looper, 3) as engine, held_passes() as passes:
        jobs = [engine.submit(wish) for wish in (request(40), replace(request(FOR_EVER), stop="!"), request(40))]
        passes.release(1 << 20)
        for job in (jobs[0], jobs[2]):
            pieces = list(job)
            assert "".join(piece.text for piece in pieces) == job.result().text
            assert [token for piece in pieces for token in piece.token_ids] == job.result().token_ids


def test_a_decoder_that_is_closed_too_early_leaves_nobody_waiting(looper: Path) -> None:
    with shared_by(looper, 2) as engine, held_passes() as passes:
        jobs = [engine.submit(replace(request(FOR_EVER), tree="none")) for _ in range(4)]
        until(lambda: engine.figures().num_active >= 1)
        passes.release(3)
        until(lambda: engine.figures().num_active == 2 and engine.figures().num_passes == 3)
        closing = threading.Thread(target=engine.decoder.close)
        closing.start()
        passes.release(1 << 20)
        for job in jobs:
            with pytest.raises(UserError, match=r"was closed|another thread|closing"):
                job.result(PATIENCE_S)
        closing.join()


def test_who_has_ended_does_not_wait_for_the_others_next_pass(looper: Path) -> None:
    with shared_by(looper, 2) as engine, held_passes() as passes:
        long = engine.submit(replace(request(FOR_EVER), tree="none"))
        until(lambda: engine.figures().num_active == 1)
        short = engine.submit(replace(request(2), tree="none"))
        passes.release(3)  # one for the first alone
        assert short.result(PATIENCE_S).finish_reason == "length"
        assert not long.is_done
        long.cancel()
        passes.release(2)
        long.result(PATIENCE_S)


@contextmanager
def shared_by(model: Path, parallel: int) -> Iterator[Engine]:
    options: Any = {"ram": "512MiB", "context": 256, "threads": 1, "profile": "none", "tree": "8x3"}
    with offload.load(model, model, parallel=parallel, **options) as decoder, Engine(decoder) as engine:
        yield engine


def test_pieces_are_the_text_in_order_and_a_slow_reader_gets_fewer_and_longer_ones(looper: Path) -> None:
    with engine_of(looper) as engine:
        job, slow = engine.submit(request(40)), engine.submit(replace(request(FOR_EVER), tree="none"))
        pieces, result = list(job), job.result()
        whole = slow.result(PATIENCE_S)
        longer = list(slow)
    assert "".join(piece.text for piece in pieces) == result.text
    assert [token for piece in pieces for token in piece.token_ids] == result.token_ids
    assert len(pieces) > 3 and all(piece.last_pass is not None for piece in pieces)
    assert len(longer) == MOST_PIECES < len(whole.token_ids) and longer[-1].last_pass is None
    assert "".join(piece.text for piece in longer) == whole.text


def test_requests_wait_in_order_and_too_many_are_refused(looper: Path) -> None:
    with engine_of(looper, max_waiting=2) as engine, held_passes() as passes:
        jobs = [engine.submit(request(1)) for _ in range(3)]
        until(lambda: engine.figures().num_active == 1)
        with pytest.raises(QueueFull, match="2 requests wait already"):
            engine.submit(request(1))
        assert engine.figures().num_refused == 1
        for number in range(3):
            passes.release()
            jobs[number].result(PATIENCE_S)
            assert [job.is_done for job in jobs] == [True] * (number + 1) + [False] * (2 - number)


def test_a_bad_request_is_refused_at_once_and_takes_no_place(looper: Path) -> None:
    with engine_of(looper) as engine:
        with pytest.raises(UserError, match="exceed the context"):
            engine.submit(request(10_000))
        with pytest.raises(UserError, match="tree"):
            engine.submit(replace(request(), tree="nonsense"))
        figures = engine.figures()
        assert (figures.num_active, figures.num_waiting, figures.num_failed) == (0, 0, 0)


def test_cancelled_ones_leave_at_the_next_pass(looper: Path) -> None:
    with engine_of(looper) as engine, held_passes() as passes:
        active, waiting, third = (engine.submit(request(FOR_EVER)) for _ in range(3))
        until(lambda: engine.figures().num_active == 1)
        waiting.cancel()
        assert engine.figures().num_waiting == 1, "its place in the queue is free at once"
        passes.release()
        active.cancel()
        result = active.result(PATIENCE_S)
        assert (result.finish_reason, recited(300).startswith(result.text)) == ("interrupted", True)
        with pytest.raises(Cancelled):
            waiting.result(PATIENCE_S)
        third.cancel()
        passes.release(FOR_EVER)
        third.result(PATIENCE_S)
        assert engine.figures().num_cancelled == 3


def test_a_dropped_ticket_cancels_its_request(looper: Path) -> None:
    with engine_of(looper) as engine:
        job = engine.submit(request(FOR_EVER))
        next(iter(job))
        del job
        gc.collect()
        # it is counted as it ends, and leaves its place a moment before
        until(lambda: engine.figures().num_cancelled == 1)
        assert engine.figures().num_active == 0


def test_one_that_is_dropped_is_cancelled_though_the_error_of_another_is_kept(
    looper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows the calls that it came by: under way, or where a job could not begin."""
    push, begin = TextStream.push, Decoder.begin
    monkeypatch.setattr(TextStream, "push", lambda stream, new: _fail() if "!" in stream._stop else push(stream, new))
    with shared_by(looper, 3) as engine:
        failing, other = engine.submit(replace(request(FOR_EVER), stop="!")), engine.submit(request(FOR_EVER))
        with pytest.raises(ZeroDivisionError) as under_way:
            failing.result(PATIENCE_S)
        monkeypatch.setattr(
            Decoder,
            "begin",
            lambda self, *of, **options: _fail() if options["limits"][0] == 7 else begin(self, *of, **options),
        )
        failing, third = engine.submit(request(7)), engine.submit(request(FOR_EVER))
        with pytest.raises(ZeroDivisionError) as before:
            failing.result(PATIENCE_S)
        next(iter(third))
        assert engine.figures().num_active == 2
        del other, third
        until(lambda: engine.figures().num_cancelled == 2)
        assert under_way.value is not before.value, "both are kept"


def test_a_disk_that_fails_ends_what_is_under_way(looper: Path) -> None:
    with engine_of(looper) as engine:
        with failing_reads(4):
            job = engine.submit(request(FOR_EVER))
            with pytest.raises(ReadError):
                list(job)
        assert engine.submit(request(3)).result(PATIENCE_S).finish_reason == "length", "it may have been a moment's"


def test_closing_lets_texts_end_within_the_grace(looper: Path) -> None:
    with open_decoder(looper) as decoder:
        engine = Engine(decoder)
        first, second = engine.submit(request(30)), engine.submit(request(30))
        until(lambda: engine.figures().num_active == 1)
        engine.close(grace_s=PATIENCE_S)
        assert first.result().finish_reason == "length"
        with pytest.raises(Closing):
            second.result()
        with pytest.raises(Closing):
            engine.submit(request())
        engine.close()


def test_closing_without_grace_cancels(looper: Path) -> None:
    with open_decoder(looper) as decoder:
        with held_passes() as passes:
            engine = Engine(decoder)
            job = engine.submit(request(FOR_EVER))
            until(lambda: engine.figures().num_active == 1)
            threading.Timer(0.1, passes.release, [1]).start()
            engine.close()
        assert job.result().finish_reason == "interrupted"
        assert decoder.generate(PROMPT, max_new_tokens=1).finish_reason == "length", "the decoder is free again"


def _fail() -> None:
    raise ZeroDivisionError
