"""Models that are not here: a hub id costs its headers, a hub out of reach costs one line."""

import json
import os
import shutil
import socket
import threading
import zlib
from collections.abc import Callable
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import filter_repo_objects
from shell import ROOT, run_python
from tiny import Pair

import offload
from offload.bench.harness.models import find_setting
from offload.checkpoint import open as headers
from offload.checkpoint.download import folder_of
from offload.checkpoint.generation_config import suggested_sampling
from offload.checkpoint.open import open_checkpoint
from offload.checkpoint.whole import open_whole
from offload.cli.console import Console
from offload.engine.tokenizer import are_same
from offload.errors import UserError
from offload.options import OutputOptions
from offload.planning.load_options import LoadOptions
from offload.reports.estimate import estimate
from offload.reports.tune import tune
from offload.sampling_options import Sampling


class Hub:
    """Answers for one repository, out of a folder; counts what it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, []

    def get_safetensors_metadata(self, repo: str) -> Any:
        stored = open_checkpoint(self.folder)
        names, files = [shard.name for shard in stored.shards], {}
        for name, entry in stored.tensors.items():
            meta = SimpleNamespace(
                dtype=entry.dtype, shape=list(entry.shape), data_offsets=(entry.lo - 8, entry.hi - 8)
            )
            files.setdefault(names[entry.shard], SimpleNamespace(tensors={})).tensors[name] = meta
        files[names[0]].tensors["model.layers.0.stray.weight"] = meta  # in a file, but not in the index
        self.asked.append("headers")
        weight_map = {name: names[entry.shard] for name, entry in stored.tensors.items()}
        return SimpleNamespace(files_metadata=files, weight_map=weight_map)

    def snapshot_download(self, repo: str, **options: Any) -> str:
        if options == {"local_files_only": True}:
            raise FileNotFoundError("not in the cache")
        (name,) = options.pop("allow_patterns")
        assert name in ("config.json", "generation_config.json") and not options, "weights would be fetched"
        self.asked.append(name)
        return str(self.folder)


@pytest.fixture
def hub(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    served = Hub(Path(shutil.copytree(pair[0], tmp_path / "model")))
    for name in ("get_safetensors_metadata", "snapshot_download"):
        monkeypatch.setattr(f"huggingface_hub.{name}", getattr(served, name))
    return served


def test_a_hub_id_costs_headers_and_no_weights(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    got, wanted = (estimate(LoadOptions(name, ram="1GiB")) for name in ("org/model", str(hub.folder)))
    assert hub.asked == ["config.json", "headers"]
    assert headers.open_headers("org/model").tensors.keys() == open_checkpoint(hub.folder).tensors.keys()
    for ours, theirs in zip(got.plan.layer_bytes, wanted.plan.layer_bytes, strict=True):
        assert abs(ours - theirs) <= 4096, "where a header ends decides about one block"
    assert got.as_dict()["link_bytes_per_s"] is None and got.predictions == ()
    hub.asked.clear()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, local_files_only: str(hub.folder))
    assert headers.open_headers("org/model").is_here and hub.asked == [], "a snapshot in the cache is used"


class _Answers(BaseHTTPRequestHandler):
    """The hub's answers for org/model, out of a folder, to the library itself."""

    folder: Path

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        status, start, headers = 200, 0, {"X-Repo-Commit": COMMIT}
        if self.path.startswith("/api/"):
            blob = {"type": "file", "oid": "0" * 40}
            names = [
                {**blob, "rfilename": path.name, "path": path.name, "size": path.stat().st_size}
                for path in self.folder.iterdir()
            ]
            is_tree = "/tree/" in self.path
            body = json.dumps(names if is_tree else {"id": "org/model", "sha": COMMIT, "siblings": names}).encode()
        elif (self.folder / name).is_file():
            body = (self.folder / name).read_bytes()
            headers["ETag"] = f'"{zlib.crc32(body):040x}"'
            if (part := self.headers.get("Range")) is not None:
                start, end = map(int, part.removeprefix("bytes=").split("-"))
                status, headers["Content-Range"] = 206, f"bytes {start}-{end}/{len(body)}"
                body = body[start : end + 1]
        else:
            status, body, headers["X-Error-Code"] = 404, b"", "EntryNotFound"
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


_DOWNLOAD = """
from offload.checkpoint.open import fetch, open_headers
seen = []
headers = [open_headers("org/model")]
assert not headers[0].is_here
(model,) = fetch(["org/model"], headers, print, lambda *bytes: seen.append(bytes))
assert model.is_here
for done, total in seen:
    print(done, total)
"""


def test_a_download_tells_how_far_it_is(pair: Pair, tmp_path: Path) -> None:
    """By the hub's library itself."""
    _Answers.folder = pair[0]
    hub = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path)}
    environment["HF_HUB_OFFLINE"] = "0"
    phase, *lines = run_python("-c", _DOWNLOAD, environment=environment).splitlines()
    hub.shutdown()
    hub.server_close()
    assert phase == "downloading org/model"
    done, totals = zip(*(map(int, line.split()) for line in lines), strict=True)
    total = sum(path.stat().st_size for path in pair[0].glob("*.safetensors"))
    assert [*done] == sorted(done) and {*totals} == {done[-1]}
    assert 0.9 * total <= done[-1] <= total, "headers are no weights"


def test_headers_from_the_hub_are_checked_like_any(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = hub.get_safetensors_metadata("org/model")
    metadata.files_metadata[metadata.weight_map["model.norm.weight"]].tensors["model.norm.weight"].shape = [7]
    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", lambda repo: metadata)
    with pytest.raises(UserError, match=r"model.norm.weight of shape \[7\]"):
        headers.open_headers("org/model")

    # A hub out of reach is said so.
    def fail(repo: str) -> str:
        raise HfHubHTTPError.__bases__[0]("no route")

    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", fail)
    with pytest.raises(UserError, match=r"org/model .* the hub is out of reach \(no route\): check the network"):
        headers.open_headers("org/model")


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the hub's library has of org/model once it was loaded: never all that its listing of the commit names."""
    source, cache = pair[0], tmp_path / "cache"
    repo_folder = cache / "models--org--model"
    for folder in ("refs", "trees", "snapshots", "blobs"):
        (repo_folder / folder).mkdir(parents=True)
    (repo_folder / "refs" / "main").write_text(COMMIT)
    snapshot = Path(shutil.copytree(source, repo_folder / "snapshots" / COMMIT))
    names = [*(path.name for path in source.iterdir()), "README.md", "pytorch_model.bin"]
    files = {name: {"size": 7, "blob_id": "0" * 40} for name in names}
    (repo_folder / "trees" / f"{COMMIT}.json").write_text(json.dumps({"format_version": 1, "files": files}))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return snapshot


def nowhere(*_: object, **__: object) -> Any:
    raise socket.gaierror(-2, "Name or service not known")


@pytest.mark.parametrize("is_forbidden", [True, False])
def test_what_was_downloaded_is_found_without_a_network(
    is_forbidden: bool, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", is_forbidden)
    checkpoint = headers.open_headers("org/model")
    assert checkpoint.directory == cached and checkpoint.is_here
    (loaded,) = headers.fetch(["org/model"], [checkpoint], lambda phase: None)
    assert loaded.directory == cached
    assert checkpoint.name == "org/model", "and no hash of a commit"
    whole = open_whole("org/model")
    assert whole.path == cached and len(whole.files) == len(checkpoint.shards) and not whole.damage


def test_a_commit_that_is_here_stays_though_the_hub_has_a_newer_one(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was planned and compared is what is loaded; its small files come from its own commit."""
    checkpoint = headers.open_headers("org/model")
    newer = shutil.copytree(cached, cached.with_name("f" * 40))
    asked = list[str | None]()

    def snapshot(repo: str, revision: str | None = None, **_: Any) -> str:
        asked.append(revision)
        return str(cached if revision == COMMIT else newer)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    (loaded,) = headers.fetch(["org/model"], [checkpoint], lambda phase: None)
    assert loaded is checkpoint and set(asked) == {COMMIT}


@pytest.mark.parametrize("is_whole", [True, False])
def test_of_what_is_here_whole_the_hub_is_asked_nothing(
    is_whole: bool, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of reach, it would be waited for."""
    checkpoint = headers.open_headers("org/model")
    asked = list[bool]()
    if is_whole:
        (cached / "tokenizer.json").write_text("{}")

    def snapshot(repo: str, *, local_files_only: bool = False, **_: Any) -> str:
        asked.append(not local_files_only)
        return str(cached)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    headers.fetch(["org/model"], [checkpoint], lambda phase: None)
    assert any(asked) is not is_whole


def test_what_is_in_the_cache_in_part_is_asked_of_the_hub(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    open_checkpoint(cached).shards[0].unlink()
    with pytest.raises(UserError, match="the hub is out of reach"):
        headers.open_headers("org/model")
    (damage,) = open_whole("org/model").damage
    assert damage.fault == "is missing"


def test_a_tokenizer_is_fetched_without_weights(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def serve(repo: str, allow_patterns: list[str], ignore_patterns: list[str], revision: None) -> str:
        asked.append(allow_patterns)
        return str(hub.folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", serve)
    assert folder_of("org/model", with_weights=False) == folder_of(hub.folder, with_weights=False) == hub.folder
    (patterns,) = asked
    assert any(fnmatch("tokenizer.json", pattern) for pattern in patterns)
    assert not any(fnmatch(shard.name, pattern) for pattern in patterns for shard in open_checkpoint(hub.folder).shards)


REPOSITORY = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "merges.txt", "chat_template.jinja", "additional_chat_templates/tool_use.jinja", "model.safetensors.index.json",
    "a.safetensors", "b.safetensors", "other.safetensors", "consolidated.safetensors", "consolidated.00.pth",
    "pytorch_model.bin", "model.pt", "optimizer.pkl", "modeling_evil.py", "tokenizer_evil.py", "tokenizer.bin",
    "custom_generate/generate.py", "original/params.json", "original/tokenizer.model", "original/x.safetensors",
    "onnx/m.onnx", "m.gguf", "README.md", "training_args.bin", "1_Pooling/config.json",
    "original/consolidated.00.pth", "handler.py", "requirements.txt",
]  # fmt: skip
NEEDED = set(REPOSITORY[:9]) | {"requirements.txt"}


def served(patch: pytest.MonkeyPatch, folder: Path, offered: list[str]) -> list[str]:
    """Let the hub offer these files; return those that are fetched by what its library makes of patterns."""
    fetched = list[str]()

    def serve(repo: str, revision: str | None = None, tqdm_class: type | None = None, **patterns: Any) -> str:
        assert revision in (None, folder.name), "one commit"
        fetched.extend(filter_repo_objects(offered, **patterns))
        return str(folder)

    patch.setattr("huggingface_hub.snapshot_download", serve)
    return fetched


@pytest.mark.parametrize("is_indexed", [True, False])
def test_only_what_is_needed_is_fetched(is_indexed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pickle, no code, no second form of the weights."""
    folder = tmp_path / "c0ffee"
    folder.mkdir()
    if is_indexed:
        index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    fetched = served(monkeypatch, folder, REPOSITORY)
    folder_of("org/model", with_weights=False)
    assert set(fetched) == NEEDED
    fetched.clear()
    with pytest.raises(UserError, match=r"no config.json"):
        open_checkpoint("org/model")
    shards = {"a.safetensors", "b.safetensors"} | (set() if is_indexed else {"other.safetensors"})
    assert set(fetched) == NEEDED | shards and len(fetched) == len(set(fetched)) + 1


def test_a_file_here_is_not_asked_for_at_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "weights.safetensors").touch()
    with pytest.raises(UserError, match="is a file: give the folder it lies in"):
        headers.open_headers("here/weights.safetensors")
    assert hub.asked == []


def test_without_an_index_the_usual_name_is_fetched_and_no_other_precision(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hub.folder / "model.safetensors.index.json").unlink()
    (hub.folder / "model.safetensors").touch()
    fetched = served(monkeypatch, hub.folder, [*NEEDED, "model.safetensors", "model.fp16.safetensors"])
    with pytest.raises(UserError, match="header of 0 bytes"):
        open_checkpoint("org/model")
    assert [name for name in fetched if name.endswith(".safetensors")] == ["model.safetensors"]


@pytest.mark.parametrize("name", ["../b.safetensors", "/b.safetensors", "x/b.safetensors", "b.bin", "..", "*.py"])
def test_names_of_an_index_are_checked_before_anything_is_fetched(
    name: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = hub.get_safetensors_metadata("org/model")
    metadata.files_metadata[name] = SimpleNamespace(tensors={})
    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", lambda repo: metadata)
    with pytest.raises(UserError, match="the index names"):
        headers.open_headers("org/model")
    (hub.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    asked = list[Any]()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda _, **wish: asked.append(wish) or str(hub.folder))
    with pytest.raises(UserError, match="the index names"):
        open_checkpoint("org/model")
    assert len(asked) == 1, "small files alone"


def test_what_is_not_here_is_said_to_be_downloaded_but_for_one_small_file(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hub.folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6}')
    assert suggested_sampling("org/target", 3) == Sampling(temperature=0.6, seed=3)
    assert hub.asked == ["generation_config.json"]
    monkeypatch.setattr(headers, "open_checkpoint", lambda model, on_bytes=None: open_checkpoint(hub.folder))
    said, models = list[str](), [hub.folder, "org/model"]
    headers.fetch(models, list(map(headers.open_headers, models)), said.append)
    assert said == ["downloading org/model"]


OFFLINE = """
import socket, sys, time
def nowhere(*_, **__): raise socket.gaierror(-2, "Name or service not known")
socket.getaddrinfo = nowhere
from offload import errors
from offload.cli import main as cli
started = time.perf_counter()
try:
    from offload.checkpoint.open import open_checkpoint
    from offload.checkpoint.open import open_headers
    {"generate": open_checkpoint, "plan": open_headers}[sys.argv[1]]("org/model")
except errors.UserError as error:
    print(f"{time.perf_counter() - started:.2f}", error)
"""


@pytest.mark.parametrize("command", ["generate", "plan"])
def test_without_a_network_a_hub_id_is_refused_at_once(command: str, tmp_path: Path) -> None:
    """The hub's library is the real one; it sleeps 23 s between its tries where it is asked in the wrong way."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    seconds, line = run_python("-c", OFFLINE, command, environment=environment).split(" ", 1)
    assert "the hub is out of reach" in line and "Name or service not known" in line and "check the network" in line
    assert float(seconds) < 15


def tuned(**options: Any) -> object:
    return tune(LoadOptions("org/model", "org/model", **options), [Path(__file__)], Sampling())


TOO_LARGE: dict[str, Callable[[], object]] = {
    "load": lambda: offload.load("org/model", "org/model", ram="1MiB", context=64),
    "tune": lambda: tuned(ram="1MiB"),
    "tune with a tree": lambda: tuned(ram="180MiB", tree="65536x9"),
    "bench": lambda: find_setting("org/model", "org/model", "1GB", "1MiB", Console(OutputOptions(quiet=True))),
}


@pytest.mark.parametrize("ask", TOO_LARGE.values(), ids=TOO_LARGE)
def test_what_does_not_fit_is_not_fetched(
    ask: Callable[[], object], hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="raise `ram` to"):
        ask()
    assert hub.asked == ["config.json", "headers"] * 2


def test_ids_of_a_larger_vocabulary_mean_the_same_tokens() -> None:
    """One from a GGUF file is padded and rebuilt; from elsewhere both are the same."""
    small, large = {"a": 0, "b": 1}, {"a": 0, "b": 1, "pad": 2}
    assert are_same(small, large, is_exact=False) and are_same(large, small, is_exact=False)
    assert not are_same(small, {"a": 1, "b": 0, "pad": 2}, is_exact=False)
    assert not are_same(small, {"a": 0, "c": 1, "pad": 2}, is_exact=False)
    assert are_same(small, dict(small), is_exact=True) and not are_same(small, large, is_exact=True)
