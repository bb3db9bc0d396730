"""What a decoder gives back: threads, files and memory when it closes, its state when a run is left or overtaken."""

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from reciting import PROMPT, at_sweep, failing_reads, interrupt, num_readers, open_decoder
from tiny import save_reciter

import offload
from offload.machine import rss_bytes
from offload.sampling_options import Sampling
from offload.streaming import disk as host_store


@pytest.fixture
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collection")
@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
def test_a_decoder_gives_back_threads_files_and_memory(
    is_closed: bool, looper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers: list[weakref.ref[np.ndarray]] = []
    allocate = host_store.allocate

    def remembered(num_bytes: int) -> np.ndarray:
        buffer = allocate(num_bytes)
        buffers.append(weakref.ref(buffer))
        return buffer

    for module in ("disk", "device"):
        monkeypatch.setattr(f"offload.streaming.{module}.allocate", remembered)
    before = None
    for _ in range(4):
        decoder = open_decoder(looper)
        decoder.generate(PROMPT, max_new_tokens=5)
        assert num_readers() > 0
        if is_closed:
            decoder.close()
        else:
            del decoder
        after = (threading.active_count(), len(os.listdir("/proc/self/fd")))
        assert before in (None, after), "every round leaves what the first one left"
        before = after
        assert num_readers() == 0
        assert len(buffers) > 10 and all(buffer() is None for buffer in buffers), "not with the next collection"


@pytest.mark.usefixtures("_no_collection")
def test_a_reader_may_collect_a_decoder(looper: Path) -> None:
    """It closes its own readers, of which one cannot wait for itself."""
    held = [open_decoder(looper)]
    reader = threading.Thread(target=held.clear, name="offload-read_0")
    reader.start()
    reader.join(60)
    assert not reader.is_alive()
    for thread in threading.enumerate():
        if thread.name.startswith("offload-read"):  # a line or an idle team of another test stays
            thread.join(60)
    assert num_readers() == 0


def test_failed_loads_give_back_threads_and_files(looper: Path, tmp_path: Path) -> None:
    stranger = save_reciter(tmp_path, [":", " un", " deux"])
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(offload.UserError, match="vocabulary"):
            offload.load(looper, stranger, ram="1GiB", context=64, threads=1)
        with failing_reads(12), pytest.raises(offload.ReadError):
            open_decoder(looper)
    gc.collect()
    assert num_readers() == 0 and len(os.listdir("/proc/self/fd")) == files


def test_what_was_abandoned_goes_on_and_what_was_closed_refuses(looper: Path) -> None:
    with open_decoder(looper) as decoder:
        wanted = decoder.generate(PROMPT, max_new_tokens=40)
        for _, __ in zip(decoder.stream(PROMPT, max_new_tokens=40), range(2), strict=False):
            pass
        with at_sweep(3, interrupt), pytest.raises(KeyboardInterrupt):
            decoder.generate(PROMPT, max_new_tokens=40)
        assert decoder.generate(PROMPT, max_new_tokens=40).token_ids == wanted.token_ids
        run = decoder.run(PROMPT, Sampling(), max_new_tokens=40)
        first = next(iter(run))
        assert first + "".join(run) == wanted.text, "its reader came back"
        before = run.result()
        assert list(run) == [] and run.result() == before, "there is nothing behind the end"
    decoder.close()
    with pytest.raises(offload.UserError, match="closed: load the model again"):
        decoder.generate(PROMPT)


def test_memory_between_what_is_still_held_goes_back_to_the_system(looper: Path) -> None:
    """C's allocator gives back what lies at its end alone, and something always lies behind."""
    decoder, before = open_decoder(looper), rss_bytes()
    held = [bytearray(b"x" * 60_000) for _ in range(2000)]
    kept = held[::100]
    held.clear()
    assert rss_bytes() - before > 80e6
    decoder.close()
    assert rss_bytes() - before < 30e6 and len(kept) == 20
