"""Datastores for measuring: the standard library without prompt files, and permuted text.

Invariant: no file that `prompts` draws on is in either.
"""

import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from offload.bench.harness.prompts import held_out_files, read_source
from offload.checkpoint.files import cache_folder
from offload.cli.console import Console
from offload.cli.datastore_run import load_coder
from offload.cli.demo import PAIR
from offload.datastore.build import build

_RAM_BYTES = 3 << 30
_PERMUTED_TOKENS = 100_000_000
_BLOCK_TOKENS = 64


def library_store(screen: Console) -> Path:
    """Return the library's store for the packaged pair, built once. Raises `UserError`."""
    files = _files()
    sizes = repr([(str(path), path.stat().st_size) for path in files]).encode()
    path = cache_folder() / f"bench-library-{zlib.crc32(sizes):08x}.store"
    if not path.exists():
        cache_folder().mkdir(parents=True, exist_ok=True)
        screen.wait("making a store of the standard library")
        build(
            path,
            map(read_source, files),
            load_coder(str(PAIR / "target"), PAIR / "target")[0],
            _RAM_BYTES,
            screen.wait,
        )
    return path


def permuted_store(path: Path, screen: Console) -> str:
    """Make a store of 100 M tokens: every file again and again, its blocks in another order.

    Returns how it was made. Raises `UserError`.
    """
    coder = load_coder(str(PAIR / "target"), PAIR / "target")[0]
    files = _files()
    rng = np.random.default_rng(0)
    ids = [np.array(one) for one in coder.encode([read_source(path) for path in files]) if len(one)]
    num_rounds = -(-_PERMUTED_TOKENS // sum(map(len, ids)))

    def permuted(_: Sequence[str]) -> Iterator[Sequence[int]]:
        for one in ids:
            blocks = [one[lo : lo + _BLOCK_TOKENS] for lo in range(0, len(one), _BLOCK_TOKENS)]
            yield np.concatenate([blocks[at] for at in rng.permutation(len(blocks))]).tolist()

    # a batch of documents for each round
    every = islice(iter(lambda: " " * (1 << 21), None), num_rounds)
    build(path, every, coder._replace(encode=permuted), _RAM_BYTES, screen.wait)
    return f"{num_rounds} times the standard library, blocks of {_BLOCK_TOKENS} tokens in random order within each file"


def _files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    held_out = set(held_out_files())
    return sorted(
        one
        for one in root.rglob("*.py")
        if "site-packages" not in one.parts and one not in held_out
    )
