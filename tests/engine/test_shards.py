"""One target on several ranks: the same ids as one process gives, whatever the shares, trees and families."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from in_memory import InMemory, in_memory
from tiny import FAMILIES, VOCAB_SIZE, save_pair, streaming_ram

import offload
from offload.engine.decoder import Decoder
from offload.engine.load import open_decoder
from offload.planning.options import LoadOptions

PROMPT = torch.randint(3, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(5)).tolist()
NUM_NEW = 24
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def pair(family: str) -> Pair:
        if family not in made:
            made[family] = save_pair(FAMILIES[family](), tmp_path_factory.mktemp(family))
        return made[family]

    return pair


class _Followers:
    """Ranks that are threads, with what has ended each of them."""

    def __init__(self, transports: Sequence[InMemory], load: Callable[[InMemory], Any]) -> None:
        self.errors: list[BaseException | None] = [None] * len(transports)
        self._threads = [threading.Thread(target=self._run, args=(one, load)) for one in transports]
        for thread in self._threads:
            thread.start()

    def _run(self, transport: InMemory, load: Callable[[InMemory], Any]) -> None:
        torch.set_num_threads(1)
        try:
            load(transport)
        except BaseException as error:
            self.errors[transport.rank - 1] = error
            if not isinstance(error, SystemExit):
                transport.close()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank does not end"


@contextmanager
def _sharded(
    num_ranks: int, target: Path, draft: Path | None, options: Callable[[int], LoadOptions]
) -> Iterator[Decoder]:
    transports = in_memory(num_ranks)

    def load(transport: InMemory) -> Decoder:
        return open_decoder(str(target), draft and str(draft), options(transport.rank), transport=transport)

    followers = _Followers(transports[1:], load)
    try:
        with load(transports[0]) as decoder:
            yield decoder
    finally:
        transports[0].close()
        followers.join()
    assert all(isinstance(error, SystemExit) for error in followers.errors), followers.errors


def _texts(decoder: Decoder) -> list[list[int]]:
    runs = [decoder.generate(PROMPT, max_new_tokens=NUM_NEW, temperature=heat, seed=3) for heat in (0.0, 0.8)]
    return [run.token_ids for run in runs]


@pytest.fixture(autouse=True)
def _as_started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)


def _options(ram: int | str, **more: Any) -> LoadOptions:
    usual: dict[str, Any] = {"context": 128, "threads": 1, "profile": "none", "dtype": "float32", "lookup": False}
    return LoadOptions(ram=ram, ranks="shards", **usual | more)


@pytest.mark.parametrize(("family", "num_ranks"), [("llama", 2), ("llama", 3), ("qwen2", 2), ("qwen3-sliding", 2),
                                                   ("gemma3", 2), ("phi3", 3), ("mistral-sliding", 2)])  # fmt: skip
def test_ids_are_those_of_one_process(pairs: Callable[[str], Pair], family: str, num_ranks: int) -> None:
    target, draft = pairs(family)
    ram = streaming_ram(target, draft, context=128, num_nodes=17)
    with offload.load(target, None, ram, "none", dtype="float32", context=128, threads=1, invariant=False) as alone:
        wanted = _texts(alone)
    with _sharded(num_ranks, target, draft, lambda rank: _options(ram, tree="dynamic:16x6")) as decoder:
        for _ in range(2):
            assert _texts(decoder) == wanted
