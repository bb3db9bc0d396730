"""A few damaged files of every kind, and faults put in on purpose that the harness must find.

Each run is a process of its own: forking needs one without threads.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from matrix import TEST_SEED
from targets.planted import TARGETS as PLANTED

HERE = Path(__file__).parent
NAMES = (
    "safetensors/header", "config/qwen3_moe", "tokenizer/unigram", "tokenizer/template", "fewer_bits/awq",
    "gguf_file/llama", "settings/profile", "texts/lines", "texts/session", "http/chat", "datastore/verify",
    "packed/verify", "verify/notes", "verify/manifest",
)  # fmt: skip
SECONDS = 300  # of which a quiet machine needs twenty
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs inotify, pidfd and /proc")


def fuzz(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(HERE), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


def test_a_few_damaged_files_of_each_kind() -> None:
    run = fuzz("--seed", TEST_SEED, "--cases", len(NAMES), *(word for name in NAMES for word in ("--target", name)))
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.full
def test_planted_faults_are_found() -> None:
    run = fuzz("--target", "planted", "--cases", len(PLANTED), "--wall-s", 5, "--resident-mib", 80, "--json")
    ends = {name: kind for name, kind, _ in json.loads(run.stdout)}
    wanted = {name: re.sub("-.*", "", name.partition("/")[2]) for name in ends}
    assert run.returncode == 1 and ends == wanted and len(ends) == len(PLANTED)
