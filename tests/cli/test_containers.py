"""What containers and services do to a run: little memory, few files, closed output, another user."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from refusals import contents

from offload.checkpoint.open import open_checkpoint
from offload.cli.failures import machine_failure
from offload.errors import UserError, system_reason
from offload.planning.load_options import LoadOptions
from offload.server.app import create_app
from offload.server.http_server import HttpServer
from offload.server.listening import bind
from offload.server.settings import ServerSettings

MIB = 1 << 20
SOURCE = Path(__file__).parents[2]


@pytest.mark.parametrize("free_mib", [420, 660, 950, 1430, 8000, 64000])
def test_a_budget_fits_beside_python(free_mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.planning.load_options.available_ram_bytes", lambda: free_mib * MIB)
    monkeypatch.setattr("offload.planning.load_options.library_bytes", lambda: 320 * MIB)
    allowed = LoadOptions("model").ram_bytes
    assert 0 < allowed <= (free_mib - 320) * MIB and allowed <= 0.75 * free_mib * MIB


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


def _run(model: Path, *before: str, rights: Sequence[str] = (), **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `generate` behind these lines of a shell, by a program that takes rights away."""
    lines = "; ".join([*before, 'exec "$@"'])
    asked = ["-p", "Count:", "-n", "2", "--ram", "1GiB", "--context", "64", "--threads", "1", "--raw", "-q"]
    command = [*rights, "bash", "-c", lines, "bash", sys.executable, "-m", "offload", "generate", "-m", str(model)]
    return subprocess.run([*command, *asked], capture_output=True, text=True, timeout=300, **options)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="root alone can be another user")
def test_another_users_files_are_read_as_far_as_they_may_be(sound_file: Path, tmp_path: Path) -> None:
    """All belongs to another user, the home as well, and root's right to pass over that is taken away."""
    model = Path(shutil.copytree(sound_file, tmp_path / "others" / "model"))
    for path in (model.parent, model, *model.iterdir()):
        path.chmod(0o755)
        os.chown(path, 65534, 65534)
    options: dict[str, Any] = {"rights": ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")}
    options |= {"cwd": model, "env": {**os.environ, "HOME": str(model.parent), "XDG_CACHE_HOME": str(model / "cache")}}
    options["env"]["PYTHONPATH"] = str(SOURCE)
    before = contents(tmp_path)
    wanted = _run(model)
    ended = _run(model, **options)
    assert (ended.returncode, ended.stdout) == (0, wanted.stdout) and wanted.stdout, ended.stderr
    assert contents(tmp_path) == before
    (model / "model.safetensors").chmod(0o600)
    ended = _run(model, **options)
    assert ended.returncode == 2 and "Permission denied" in ended.stderr and "yours to read" in ended.stderr
    options["cwd"] = "/"
    model.parent.chmod(0o700)
    ended = _run(model, **options)
    assert ended.returncode == 2 and "others may not be looked into by this user" in ended.stderr, ended.stderr


def test_remedies_are_not_lost_behind_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ulimit -n" in system_reason(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 30, 1 << 30))
    for error in (RuntimeError("can't start new thread"), MemoryError()):
        assert "raise the limit of address space (ulimit -v)" in str(machine_failure(error))
