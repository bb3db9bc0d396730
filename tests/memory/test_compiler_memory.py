"""What numba takes when it is imported and compiles is planned for: a run of coded weights stays in its budget."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from quantised import save_quantised
from tiny import FAMILIES, build, save

from offload.checkpoint.held import Held
from offload.checkpoint.safetensors import open_checkpoint
from offload.kernels.compiled import HAS_NUMBA
from offload.memory import planner
from offload.memory.planner import COMPILER_BYTES, RUNTIME_BYTES, ModelFiles, plan_memory

_RUN = """
import json, sys
import torch, transformers, offload, offload.engine.load
from offload.machine import peak_rss_bytes, rss_bytes
from offload.kernels.expansion import COMPILED
own_bytes = rss_bytes()
more = {"context": 128, "threads": 1, "tree": "none", "profile": "none", "lookup": False}
with offload.load(sys.argv[1], None, sys.argv[2], **more) as decoder:
    decoder.target._model.expand_with(COMPILED)  # whatever was the faster one
    decoder.generate([5, 6, 7], max_new_tokens=8)
    print(json.dumps([peak_rss_bytes() - own_bytes, decoder.plan.total_bytes]))
"""


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coded")
    return save_quantised(save(build(FAMILIES["llama"]()), folder / "plain"), "fp8-block", folder / "fp8").directory


@pytest.mark.full
@pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")
def test_the_peak_with_an_empty_cache_is_within_the_plan(
    coded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(coded), "1GiB"], capture_output=True, text=True, timeout=120, check=True
    )
    peak_bytes, planned_bytes = json.loads(done.stdout.splitlines()[-1])
    assert 0.3 * planned_bytes < peak_bytes <= planned_bytes


def test_it_counts_where_weights_are_expanded_by_a_cpu(coded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8, plain = open_checkpoint(coded), open_checkpoint(coded.with_name("plain"))

    def runtime_bytes(files: ModelFiles) -> int:
        return plan_memory(files, ram="4GiB", dtype="auto", context=64, num_nodes=4).runtime_bytes

    with_numba = RUNTIME_BYTES + COMPILER_BYTES
    int4, int8 = (replace(plain, held=Held(bits, is_copy=True)) for bits in (4, 8))
    cases = [
        (ModelFiles(fp8), with_numba), (ModelFiles(plain), RUNTIME_BYTES), (ModelFiles(plain, int4), with_numba),
        (ModelFiles(plain, int8), RUNTIME_BYTES), (ModelFiles(plain, fp8), with_numba),
    ]  # fmt: skip
    for has_numba in (True, False):
        monkeypatch.setattr(planner, "_HAS_COMPILER", has_numba)
        for files, wanted in cases:
            assert runtime_bytes(files) == (wanted if has_numba else RUNTIME_BYTES)
