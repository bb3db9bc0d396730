"""What every test takes for granted: no network, no GPU, no one's cache, silent libraries, one thread.

And the models that several files of tests share. One thread is ten times faster for tiny products. Torch is imported
where it is used: the process that hands tests out to others needs none.
"""

import gc
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
from costs import Meter, mark_costly, slice_of_the_seed
from matrix import TEST_SEED

# Shells start background jobs with SIGINT ignored, `nohup` what it starts with SIGHUP, and children inherit that; tests
# of these signals must not depend on it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


# Why a test may be left out, as patterns of the whole reason; for any other reason it fails. What the extra `test`
# installs is on no list: where it is missing, a test that needs it says so by failing.
_MAY_BE_MISSING = (
    "needs a CUDA device",  # and only `-m gpu` takes such tests at all
    "this processor: .*",  # products whose bits agree are promised where a trial has found some
    "this torch has no .*",
    "this transformers has no .*",  # the oldest admitted one
    "this gguf has no .*",  # which has no names for what is newer
    "older transformers take other versions of Hugging Face's kernels, and other names from it",
    "faults are injected by a shim in C, for Linux and Python before 3.13",
    "memory groups cannot be made here",
    "no file system of one's own can be mounted here",
    "the peak cannot be reset here: .*",
    "no Chromium: .*",
    "curl is not installed",
    "Triton's interpreter cuts what it stores as bfloat16",
    "a card has to be asked, which torch does",
    "(lm-eval|openai-agents) is not installed: .*",  # `make test-eval` has it
)
_MAY_BE_MISSING_ELSEWHERE = (  # than on Linux
    "needs Triton",
    "needs inotify, pidfd and /proc",
    "no /dev/shm",
    "no other system limits addresses",
    "no such signals",
    "no fork",
    "/proc",
    "open files are counted in /proc",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run what is marked `full`, too: all rows of every table")
    parser.addoption("--slice", action="store_true", help="run the day's share of what is marked `full` alone")
    parser.addoption("--meter", type=Path, help="append the processor seconds of every test to this file, see costs.py")


def pytest_configure(config: pytest.Config) -> None:
    """Show a GPU to `-m gpu` alone: any other test says what it says on a machine without one.

    Triton reads at the definition of a kernel whether to interpret it, so this must stand before a test imports one.
    """
    if config.option.meter:
        config.pluginmanager.register(Meter(config.option.meter))
    if not _is_for_gpu(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_report_header(config: pytest.Config) -> str:
    target = "test-full" if config.option.full else "test"
    return f"rows are drawn by the commit's seed {TEST_SEED}: `make {target} TEST_SEED={TEST_SEED}` draws them again"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU, or the full run, where neither is asked for; a test that is named by `::` runs."""
    mark_costly(items)
    left_out = set() if _is_for_gpu(config) else {"gpu"}
    is_asked_for = "full" in config.option.markexpr or any("::" in argument for argument in config.args)
    if not (config.option.full or config.option.slice or _is_for_gpu(config) or is_asked_for):
        left_out.add("full")
    kept = {item for item in items if not left_out & _marks(item)}
    if config.option.slice:
        kept &= {item for item in slice_of_the_seed(items) if "full" in _marks(item)}
    if deselected := [item for item in items if item not in kept]:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item in kept]


def _marks(item: pytest.Item) -> set[str]:
    """Return the names of its marks; what runs always is not left to the full run, whatever its table says."""
    names = {mark.name for mark in item.iter_markers()}
    return names - {"full"} if "always" in names else names


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    return _told_if_skipped(item.config, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    return _told_if_skipped(collector.config, (yield))


def _told_if_skipped(config: pytest.Config, report: Any) -> Any:
    """Let a test, or a file, fail that is skipped for a reason that is on no list."""
    if not report.skipped or hasattr(report, "wasxfail") or _is_for_gpu(config):
        return report
    reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    allowed = _MAY_BE_MISSING + (() if sys.platform == "linux" else _MAY_BE_MISSING_ELSEWHERE)
    if not any(re.fullmatch(pattern, reason.removeprefix("Skipped: ")) for pattern in allowed):
        report.outcome = "failed"
        report.longrepr = f"tests/conftest.py lists no such reason to be left out: {reason}"
    return report


def _is_for_gpu(config: pytest.Config) -> bool:
    return bool(config.option.markexpr == "gpu")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """All that is imported stays: looking for waste meanwhile takes a quarter of the time."""
    gc.disable()
    if [Path(arg).resolve() for arg in session.config.args] == [Path(__file__).parent]:
        _import_from_the_end()
    yield
    gc.freeze()
    gc.enable()


def _import_from_the_end() -> None:
    """Let every second worker begin with the last file: in a new clone each is compiled by one of them, and kept."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    if int(worker.removeprefix("gw")) % 2 == 0:
        return
    for path in sorted(Path(__file__).parent.rglob("test_*.py"), reverse=True):
        with suppress(pytest.skip.Exception):  # pytest says so itself where it comes to the file
            if find_spec(path.stem):
                import_module(path.stem)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Profiles, inflated models and settings of the user are neither seen nor added to."""
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


def _reciter(name: str, pieces: Sequence[str] = (), *, is_chat: bool = False, **options: Any) -> Any:
    """Return the fixture of a model that says these pieces, or those of all."""

    @pytest.fixture(scope="session", name=name)
    def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
        from reciting import PIECES, TEMPLATE
        from tiny import save_reciter

        template = TEMPLATE if is_chat else None
        return save_reciter(tmp_path_factory.mktemp(name), pieces or PIECES, chat_template=template, **options)

    return model


ender = _reciter("ender", ends=True)  # says its text once
looper = _reciter("looper")  # for ever, with the colon between
sound = _reciter("sound", (":", " one", " two", " three"))  # several shards with an index, and a tokenizer
talker = _reciter("talker", is_chat=True, ends=True)  # answers everything with the same text
# in tokens that its text is made of when it is read again
letters = _reciter("letters", (":", "O", "k", "."), is_chat=True, ends=True)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Llama and a draft that is often right; no test changes their files."""
    from tiny import FAMILIES, save_pair

    return save_pair(FAMILIES["llama"](), tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one file's tests, for models that are written once."""
    return tmp_path_factory.mktemp("models")


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
def sound_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in one file."""
    from tiny import FAMILIES, build, save, save_tokenizer

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
    from small_llama import save_small

    return partial(save_small, tmp_path / "small")
