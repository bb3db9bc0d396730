"""What every test takes for granted: no network, no GPU, no one's cache, silent libraries, one thread.

And the models that several files of tests share. One thread is ten times faster for tiny products. Torch is imported
where it is used: the process that hands tests out to others needs none.
"""

import gc
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest

# Shells start background jobs with SIGINT ignored, `nohup` what it starts with SIGHUP, and children inherit that; tests
# of these signals must not depend on it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    """Show a GPU to `-m gpu` alone: any other test says what it says on a machine without one.

    Triton reads at the definition of a kernel whether to interpret it, so this must stand before a test imports one.
    """
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """All that is imported stays: looking for waste meanwhile takes a quarter of the time."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Profiles, inflated models and settings of whoever runs the tests are neither seen nor added to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _old_triton_beside_new_numpy() -> Iterator[None]:
    """Triton 3.6 interprets a loop's bounds as NumPy before 2.5 let it: an array of one number was a number."""
    from offload.kernels.jit import HAS_TRITON

    with pytest.MonkeyPatch.context() as patch:
        if HAS_TRITON:
            from triton.runtime import interpreter

            rest = interpreter._patch_lang_tensor

            def patch_tensor(tensor: Any, *scope: Any) -> None:
                rest(tensor, *scope)
                for undone_later in scope:  # Triton 3.5 has none, nor did it meet NumPy 2.5
                    undone_later.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

            patch.setattr(interpreter, "_patch_lang_tensor", patch_tensor)
        yield


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One core and one thread, for a decoder leaves the number that its last step had; and no decoder is left open."""
    import torch

    monkeypatch.setattr("offload.machine.num_cores", lambda: 1)
    torch.set_num_threads(1)
    before = _num_readers()
    yield
    assert _num_readers() <= before, "a store was left open, and its threads with it"


def _num_readers() -> int:
    return sum(thread.name.startswith("offload-read") for thread in threading.enumerate())


@pytest.fixture(scope="session")
def ender(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says its text once."""
    from reciting import PIECES
    from tiny import save_reciter

    return save_reciter(tmp_path_factory.mktemp("ender"), PIECES, ends=True)


@pytest.fixture(scope="session")
def looper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says its text for ever, with the colon between."""
    from reciting import PIECES
    from tiny import save_reciter

    return save_reciter(tmp_path_factory.mktemp("looper"), PIECES)


@pytest.fixture
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("weights are read although the command cannot run")

    monkeypatch.setattr("offload.streaming.disk.DiskReader.read", forbidden)


@pytest.fixture
def _instant_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan` measures the disk for half a second, which no case of a refusal is about."""
    monkeypatch.setattr("offload.calibration.link.link_bytes_per_s", lambda shards, **_: 1e9)


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in several shards with an index and a tokenizer."""
    from tiny import save_reciter

    return save_reciter(tmp_path_factory.mktemp("sound"), [":", " one", " two", " three"])


@pytest.fixture(scope="session")
def sound_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in one file."""
    from tiny import FAMILIES, build, save, save_tokenizer

    directory = save(build(FAMILIES["llama"]()), tmp_path_factory.mktemp("sound_file"), max_shard_size="1GB")
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers everything with the same text."""
    from reciting import PIECES, TEMPLATE
    from tiny import save_reciter

    return save_reciter(tmp_path_factory.mktemp("talker"), PIECES, ends=True, chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in tokens that its text is made of when it is read again."""
    from reciting import TEMPLATE
    from tiny import save_reciter

    return save_reciter(tmp_path_factory.mktemp("letters"), (":", "O", "k", "."), ends=True, chat_template=TEMPLATE)


@pytest.fixture
def broken(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "broken"))


@pytest.fixture
def broken_file(sound_file: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound_file, tmp_path / "broken"))


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Path]:
    """Writes the little Llama that tests inflate; keywords are those of `save_small`."""
    from small_llama import save_small

    return partial(save_small, tmp_path / "small")
