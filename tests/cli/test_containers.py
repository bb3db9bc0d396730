"""What containers and services do to a run: little memory, few files, closed output, another user."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from offload.checkpoint.open import open_checkpoint
from offload.cli.failures import machine_failure
from offload.errors import UserError, system_reason
from offload.planning.load_options import LoadOptions
from offload.server.app import create_app
from offload.server.http_server import HttpServer
from offload.server.listening import bind
from offload.server.settings import ServerSettings

MIB = 1 << 20


@pytest.mark.parametrize("free_mib", [420, 660, 950, 1430, 8000, 64000])
def test_a_budget_fits_beside_python(free_mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.planning.load_options.available_ram_bytes", lambda: free_mib * MIB)
    monkeypatch.setattr("offload.planning.load_options.library_bytes", lambda: 320 * MIB)
    allowed = LoadOptions("model").ram_bytes
    assert 0 < allowed <= (free_mib - 320) * MIB and allowed <= 0.75 * free_mib * MIB


def test_no_flag_is_blamed_that_was_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.planning.load_options.available_ram_bytes", lambda: 300 * MIB)
    monkeypatch.setattr("offload.planning.load_options.library_bytes", lambda: 320 * MIB)
    with pytest.raises(UserError, match="take some 320 MiB of memory, 300 MiB are free here: end other programs"):
        _ = LoadOptions("model").ram_bytes


def test_output_that_is_closed_is_a_failure() -> None:
    command = ["bash", "-c", 'exec "$@" >&-', "bash", sys.executable, "-m", "offload", "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (1, "offload: cannot write to standard output (it is closed)\n")


def test_what_answers_get_answers_head() -> None:
    app = create_app(None, ServerSettings(model_id="m"))
    with HttpServer(app, bind("127.0.0.1", 0)) as served:
        for path in ("/", "/health", "/v1/models", "/metrics"):
            asked = httpx.head(served.address + path)
            assert asked.status_code == httpx.get(served.address + path).status_code and not asked.content
        assert httpx.head(f"{served.address}/v1/completions").status_code == 405


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "of-root" / "model"
    model.mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != model.parent)
    with pytest.raises(UserError, match="of-root may not be looked into by this user: let it read"):
        open_checkpoint(model)


def test_remedies_are_not_lost_behind_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ulimit -n" in system_reason(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 30, 1 << 30))
    for error in (RuntimeError("can't start new thread"), MemoryError()):
        assert "raise the limit of address space (ulimit -v)" in str(machine_failure(error))
