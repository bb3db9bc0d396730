"""Every command as it reads and writes tiny files: what is run, on what, and which files it may make."""

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from faults.forge import Forge
from reciting import TEMPLATE
from tiny import FAMILIES, build, save, save_pair, save_tokenizer, streaming_ram

CORPUS = "def f(x):\n    return x\n\n\nSay: Hello world, hello you. " * 20


class Scene(NamedTuple):
    """One command; the words of `argv` name files below the root.

    Attributes:
        is_timed: what it prints and writes tells times, which differ from run to run.
        stays: names of files that may stay unfinished, since the next run goes on with them.
        goes_on: the next run goes on with a text where this one has left it.
        visits: of a server, requests as they go over the wire.
    """

    name: str
    argv: tuple[object, ...]
    stdin: str = ""
    is_timed: bool = False
    stays: tuple[str, ...] = ()
    goes_on: bool = False
    visits: tuple[str, ...] = ()
    port: int = 0


def scenes(root: Path) -> list[Scene]:
    """All of them, on the files that `prepare` has made."""
    target, draft, out = root / "target", root / "draft", root / "out"
    small = ("--context", 128, "--threads", 1, "--ram", streaming_ram(target, context=128), "--no-invariant", "-q")
    pair = ("-m", target, "-d", draft, "--tree", "8x3", *small)
    write = ("generate", *pair, "-n", 16, "--greedy")
    say = (*write, "-p", "Say:")
    store = ("datastore", "append", root / "store", root / "more.txt", "-q")
    chat, port = ("chat", *pair, "-n", 8), _free_port()
    return [
        Scene("generate", say),
        Scene("session, new", (*say, "--session", out / "text"), stays=("out/text",), goes_on=True),
        Scene("session, gone on", (*write, "--session", root / "text"), stays=("text",), goes_on=True),
        Scene("chat", (*chat, "--session", out / "talk"), "Hi\nYou\n", stays=("out/talk",), goes_on=True),
        Scene("batch", (*write, "-f", root / "prompts.jsonl", "--out", out / "results"), stays=("out/results",)),
        Scene("batch, gone on", (*write, "-f", root / "prompts.jsonl", "--out", root / "half"), stays=("half",)),
        Scene("datastore build", (*_building(root), "--out", out / "store", "-q")),
        Scene("datastore append", store),
        Scene("generate --datastore", (*say, "--datastore", root / "store")),
        Scene("pack", ("pack", "-m", root / "plain", "--out", out / "packed", "-q"), stays=("out/packed.unfinished",)),
        Scene("pack --verify", ("pack", "-m", root / "packed", "--verify", "-q")),
        Scene("unpack", ("unpack", "-m", root / "packed", "--out", out / "back", "-q"), stays=("out/back.unfinished",)),
        Scene("serve", ("serve", *pair, "--parallel", 1, "--port", port), visits=_REQUESTS, port=port, is_timed=True),
        Scene("tune", ("tune", *_tuning(root)), is_timed=True, stays=("cache/offload/profiles",)),
        Scene("plan", ("plan", "-m", target, "-d", draft, "--ram", "1GiB", "--device", "cpu"), is_timed=True),
        Scene("demo", ("demo", "--size", "40MB", "-n", 2, "-q"), is_timed=True),
        Scene("generate, packed", ("generate", "-m", root / "packed", *small, "--ram", "1GiB", "-p", "a", "-n", 3)),
        Scene("generate --json", (*say, "--json"), is_timed=True),
    ]


def prepare(root: Path) -> None:
    """Models and texts."""
    for name in ("out", "cache", "config"):
        (root / name).mkdir(parents=True)
    for model in save_pair(FAMILIES["llama"](), root, noise=0.02):  # random ones, in whose text every weight shows
        save_tokenizer(model, chat_template=TEMPLATE)
    plain = save(build(FAMILIES["llama"]()).bfloat16(), root / "plain", max_shard_size="200KB")
    save_tokenizer(plain)
    (root / "corpus.txt").write_text(CORPUS)
    (root / "more.txt").write_text(CORPUS[::-1])
    lines = [{"prompt": "Say:"}, {"prompt": "Say", "max_tokens": 2}, {"prompt": "lo"}, {"prompt": "w:"}]
    (root / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def prepare_more(forge: Forge) -> None:
    """What earlier commands have left: a session, a store, a packed model, and results of which one is cut."""
    root = forge.root
    found = {scene.name: scene for scene in scenes(root)}
    for name in ("session, new", "batch", "datastore build", "pack"):
        ended = forge.run(found[name].argv)
        assert ended.code == 0, f"{name}: {ended.err}"
    for made in ("text", "store", "packed"):
        (root / "out" / made).rename(root / made)
    results = (root / "out" / "results").read_bytes().splitlines(keepends=True)
    (root / "half").write_bytes(b"".join(results[:2]) + results[2][:20])
    (root / "out" / "results").unlink()


def _building(root: Path) -> Sequence[object]:
    return ("datastore", "build", root / "corpus.txt", "--tokenizer", root / "target")


def _tuning(root: Path) -> Sequence[object]:
    pair = ("-m", root / "target", "-d", root / "draft", "--text", root / "corpus.txt")
    return (*pair, "--tokens", 8, "--tree", "4x2", "--threads", 1, "-q")


def _request(path: str, body: dict[str, object]) -> str:
    text = json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n{text}"


_REQUESTS = (
    _request("/v1/completions", {"model": "target", "prompt": "Say:", "max_tokens": 6, "temperature": 0}),
    _request(
        "/v1/completions", {"model": "target", "prompt": "Say:", "max_tokens": 6, "temperature": 0, "stream": True}
    ),
)


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])
