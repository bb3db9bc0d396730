"""Reads against safetensors' own, with and without O_DIRECT; and what a disk that fails or lags does to the caller."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from matrix import matrix
from random_files import assert_same_bytes, parameter_bytes, random_checkpoint, stored_bytes
from shell import run_python

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.layout import BLOCK_BYTES, SlabLayout, SlabRead, TensorPart, allocate, slab_layout
from offload.errors import ReadError, UserError
from offload.streaming import disk as host_store
from offload.streaming.disk import DiskReader

SEEDS = range(6)
SHM = Path("/dev/shm")
Open = Callable[..., DiskReader]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def layer_layout(checkpoint: Checkpoint, layer: int) -> SlabLayout:
    prefix = f"model.layers.{layer}."
    rows = {name: entry for name, entry in checkpoint.tensors.items() if name.startswith(prefix)}
    return slab_layout({name: (entry.shape, [TensorPart(entry)]) for name, entry in rows.items()})


def read(store: DiskReader, layout: SlabLayout) -> np.ndarray:
    slab = allocate(layout.slab_bytes)
    slab[:] = 0xA5
    for future in store.read(layout, slab):
        future.result()
    return slab


def assert_reads_like_safetensors(checkpoint: Checkpoint, store: DiskReader) -> None:
    stored = stored_bytes(checkpoint)
    for layer in range(3):
        layout = layer_layout(checkpoint, layer)
        got = parameter_bytes(layout, read(store, layout))
        assert_same_bytes(got, {name: stored[name] for name in layout.parameters})


@pytest.fixture
def opened() -> Iterator[Open]:
    with ExitStack() as stack:
        yield lambda *given, **options: stack.enter_context(closing(DiskReader(*given, **options)))


@pytest.fixture(params=["direct", "buffered"])
def is_direct(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "buffered":
        monkeypatch.setattr(host_store, "open_direct", lambda path: None)
    return request.param == "direct"


@pytest.mark.parametrize("remainder", [0, 1])
@matrix("seed", SEEDS, always=[0], daily=2)
def test_every_parameter_is_what_safetensors_reads(
    seed: int, remainder: int, is_direct: bool, tmp_path: Path, opened: Open
) -> None:
    checkpoint = random_checkpoint(tmp_path, seed, remainder=remainder)
    assert any(shard.stat().st_size % BLOCK_BYTES for shard in checkpoint.shards), "an end inside a block"
    store = opened(checkpoint.shards)
    assert_reads_like_safetensors(checkpoint, store)
    assert store.is_direct == is_direct, "this test needs a temporary directory with O_DIRECT"
    assert (store.note is None) == is_direct


@pytest.mark.usefixtures("is_direct")
@pytest.mark.parametrize("remainder", [0, 1])
def test_a_layer_of_many_requests(
    remainder: int, tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_store, "REQUEST_BYTES", 2 * BLOCK_BYTES)
    checkpoint = random_checkpoint(tmp_path, 1, remainder=remainder)
    store = opened(checkpoint.shards)
    layouts = [layer_layout(checkpoint, layer) for layer in range(3)]
    assert max(len(store.read(layout, allocate(layout.slab_bytes))) for layout in layouts) > 5
    assert_reads_like_safetensors(checkpoint, store)


@pytest.mark.skipif(not SHM.is_dir(), reason="no /dev/shm")
def test_a_file_system_in_memory() -> None:
    """tmpfs refuses O_DIRECT or has it, which the kernel decides; both must read right and say which."""
    with TemporaryDirectory(dir=SHM) as folder:
        checkpoint = random_checkpoint(Path(folder), 2)
        with closing(DiskReader(checkpoint.shards)) as store:
            assert_reads_like_safetensors(checkpoint, store)
            assert (store.note is None) == store.is_direct


def test_one_shard_without_direct_reads_makes_all_of_them_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = random_checkpoint(tmp_path, 3)
    open_direct = host_store.open_direct
    refuses = checkpoint.shards[-1]
    monkeypatch.setattr(host_store, "open_direct", lambda path: None if path == refuses else open_direct(path))
    before = open_files()
    store = DiskReader(checkpoint.shards)
    assert open_files() == before + len(checkpoint.shards), "direct descriptors were left open"
    assert not store.is_direct and "no O_DIRECT" in str(store.note)
    assert_reads_like_safetensors(checkpoint, store)
    store.close()
    assert open_files() == before


def test_a_shard_that_is_gone_is_named_and_nothing_stays_open(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path, 3)
    checkpoint.shards[-1].unlink()
    before = open_files()
    with pytest.raises(ReadError, match=rf"{checkpoint.shards[-1].name} cannot be opened any more: No such file"):
        DiskReader(checkpoint.shards)
    assert open_files() == before


def test_more_shards_than_may_be_open_are_told_of_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, before, opens = random_checkpoint(tmp_path, 3), open_files(), os.open
    first, *_ = checkpoint.shards

    def only_first(path: Path, flags: int) -> int:
        if path != first:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opens(path, flags)

    monkeypatch.setattr(os, "open", only_first)
    num = len(checkpoint.shards)
    with pytest.raises(UserError, match=rf"{num} files of weights must be open at once, Too many .*: raise .*ulimit"):
        DiskReader(checkpoint.shards)
    monkeypatch.undo()
    assert num > 1 and open_files() == before


def test_opening_is_not_enough_for_direct_reads(tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems accept the flag and refuse the read."""
    checkpoint, preadv = random_checkpoint(tmp_path, 3), os.preadv
    refused = []

    def refuse_first(fd: int, buffers: list[memoryview], offset: int) -> int:
        if not refused:
            refused.append(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse_first)
    store = opened(checkpoint.shards)
    assert not store.is_direct
    assert_reads_like_safetensors(checkpoint, store)


def one_piece(path: Path) -> SlabLayout:
    num_bytes = path.stat().st_size
    return SlabLayout((SlabRead(0, 0, num_bytes, 0),), {}, -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES, is_direct=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "shard.safetensors"
    path.write_bytes(np.random.default_rng(0).bytes((1 << 20) + 100))
    return path


def test_short_reads_are_continued(file: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][: 16 * BLOCK_BYTES]], at))
    assert read(opened([file]), one_piece(file))[: file.stat().st_size].tobytes() == file.read_bytes()


def of_a_driver(monkeypatch: pytest.MonkeyPatch, *arrays: np.ndarray) -> None:
    """A disk cannot write into these: their pages are no ordinary memory."""
    preadv, spans = os.preadv, [(array.ctypes.data, array.nbytes) for array in arrays]

    def refuse(fd: int, views: list[memoryview], at: int) -> int:
        address = np.frombuffer(views[0], np.uint8).ctypes.data
        if any(lo <= address < lo + size for lo, size in spans):
            raise OSError(errno.EFAULT, "Bad address")
        return preadv(fd, views, at)

    monkeypatch.setattr(os, "preadv", refuse)


def test_memory_that_a_disk_cannot_write_into_is_read_by_way_of_ours(
    file: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = one_piece(file)
    slab, store = allocate(layout.slab_bytes), opened([file])
    plain = store.fetch(layout)
    assert store.note is None
    of_a_driver(monkeypatch, slab)
    for future in store.read(layout, slab):
        future.result()
    assert np.array_equal(slab, plain) and store.note is not None and "locked memory" in store.note
    assert store.bytes_read == 2 * file.stat().st_size


def test_close_drops_what_is_queued_and_rate_limit_holds(file: Path, opened: Open) -> None:
    """The readers sleep on a slow link: closing must not wait for a hundred reads."""
    before, rate = open_files(), 20 * file.stat().st_size
    store = DiskReader([file], rate_limit_bytes_per_s=rate)
    futures = [store.read(one_piece(file), allocate(2 << 20))[0] for _ in range(100)]
    store.close()
    assert sum(future.cancelled() for future in futures) > 80
    assert open_files() == before
    assert not any(thread.name.startswith("offload-read") for thread in threading.enumerate())
    store, started = opened([file], rate_limit_bytes_per_s=rate), time.perf_counter()
    for _ in range(6):
        read(store, one_piece(file))
    assert 0.98 * 6 / 20 <= time.perf_counter() - started <= 10, "seconds, on a busy machine too"


@pytest.mark.parametrize("number", [errno.EIO, errno.EFAULT])
def test_a_failing_disk_is_the_callers_business(
    number: int, file: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is a bad address of our own."""
    store, why = opened([file]), os.strerror(number)

    def fail(*_: object) -> int:
        raise OSError(number, why)

    monkeypatch.setattr(os, "preadv", fail)
    (future,) = store.read(one_piece(file), allocate(2 << 20))
    with pytest.raises(ReadError, match=rf"shard\.safetensors failed: {why}"):
        future.result()


CUTS = (0, BLOCK_BYTES, BLOCK_BYTES + 77, 1 << 20)
CHANGES = [(partial(os.truncate, length=size), rf"ends at byte {size}: it was cut short") for size in CUTS]
# of the same size, and the same file: only its time tells that these are other weights
WRITTEN = "changed while in use: load the model again"
CHANGES += [(lambda file: file.write_bytes(file.read_bytes()[::-1]), WRITTEN)]


@pytest.mark.usefixtures("is_direct")
@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_a_file_that_changes_while_in_use(
    change: Callable[[Path], object], words: str, file: Path, opened: Open
) -> None:
    store, layout = opened([file]), one_piece(file)
    assert len(read(store, layout)) > 0
    change(file)
    (future,) = store.read(layout, allocate(2 << 20))
    with pytest.raises(ReadError, match=rf"shard\.safetensors {words}"):
        future.result()


@pytest.mark.usefixtures("is_direct")
def test_a_layout_beyond_the_end_of_its_file_leaves_nothing_unread(file: Path, opened: Open) -> None:
    """Not even where the layout is of another file: what is not read would stay zero, and pass for weights."""
    layout = one_piece(file)
    os.truncate(file, 1 << 20)
    with pytest.raises(ReadError, match=r"shard\.safetensors ends before byte \d+: it was cut short"):
        opened([file]).read(layout, allocate(2 << 20))


@pytest.mark.parametrize("num_bytes", [0, 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 5])
def test_buffers_are_aligned_to_blocks(num_bytes: int) -> None:
    buffer = allocate(num_bytes)
    assert buffer.nbytes == num_bytes
    assert num_bytes == 0 or buffer.ctypes.data % BLOCK_BYTES == 0


_FORK = """
import os, signal, sys
from pathlib import Path
from offload.checkpoint.layout import SlabLayout, SlabRead
from offload.errors import ReadError
from offload.streaming.disk import DiskReader
layout = SlabLayout((SlabRead(0, 0, 4096, 0),), {}, 4096, is_direct=True)
store = DiskReader([Path(sys.argv[1])])
store.fetch(layout)
if not os.fork():
    signal.alarm(20)
    try:
        store.fetch(layout)
    except ReadError as error:
        print(error)
    os._exit(0)
os.wait()
"""


def test_a_forked_process_is_told_that_it_has_no_readers(file: Path) -> None:
    """The mistake that was: it waited for them for ever."""
    assert "load the model in the process that uses it" in run_python("-u", "-c", _FORK, file)


def test_several_readers_work_at_once(file: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request at a time leaves a third of the disk unused: all readers meet at a barrier that fewer cannot pass."""
    barrier, preadv = threading.Barrier(host_store.NUM_READERS), os.preadv
    store = opened([file])

    def meet(fd: int, views: list[memoryview], at: int) -> int:
        barrier.wait(timeout=60)
        return preadv(fd, views, at)

    monkeypatch.setattr(os, "preadv", meet)
    for future in [store.read(one_piece(file), allocate(2 << 20))[0] for _ in range(host_store.NUM_READERS)]:
        future.result()
