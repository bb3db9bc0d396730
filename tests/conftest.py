"""What every test takes for granted: no network, silent libraries, one thread (ten times faster for tiny products).

And the models that several files of tests share.
"""

import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined, so it must stand before any test imports one.
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)

# Shells start background jobs with SIGINT ignored, and children inherit that; tests of Ctrl-C must not depend on it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# They import the package, hence kernels, for which all of the above must stand.
from reciting import PIECES  # noqa: E402
from small_llama import save_small  # noqa: E402
from tiny import FAMILIES, build, save, save_reciter, save_tokenizer  # noqa: E402


@pytest.fixture(scope="session")
def ender(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says its text once."""
    return save_reciter(tmp_path_factory.mktemp("ender"), PIECES, ends=True)


@pytest.fixture(scope="session")
def looper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says its text for ever, with the colon between."""
    return save_reciter(tmp_path_factory.mktemp("looper"), PIECES)


@pytest.fixture
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("weights are read although the command cannot run")

    monkeypatch.setattr("offload.host_store.HostStore.read", forbidden)


@pytest.fixture
def _instant_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan` measures the disk for half a second, which no case of a refusal is about."""
    monkeypatch.setattr("offload.calibrate.link_bytes_per_s", lambda shard: 1e9)


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in several shards with an index and a tokenizer."""
    return save_reciter(tmp_path_factory.mktemp("sound"), [":", " one", " two", " three"])


@pytest.fixture(scope="session")
def sound_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in one file."""
    directory = save(build(FAMILIES["llama"]()), tmp_path_factory.mktemp("sound_file"), max_shard_size="1GB")
    save_tokenizer(directory)
    return directory


@pytest.fixture
def broken(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "broken"))


@pytest.fixture
def broken_file(sound_file: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound_file, tmp_path / "broken"))


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Path]:
    """Writes the little Llama that tests inflate; keywords are those of `save_small`."""
    return partial(save_small, tmp_path / "small")
