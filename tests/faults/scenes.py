"""Every command as it reads and writes tiny files: what is run, on what, and which files it may make."""

import json
from pathlib import Path
from typing import NamedTuple

from faults.forge import Forge
from quantised import save_quantised
from reciting import TEMPLATE
from tiny import FAMILIES, build, save, save_pair, save_tokenizer, streaming_ram

from offload.cli.launch import free_port

CORPUS = "def f(x):\n    return x\n\n\nSay: Hello world, hello you. " * 20

_SHARD = "target/model-00003-of-00005.safetensors"
_PAIR = (_SHARD, "draft/model-00001-of-00005.safetensors", "target/config.json", "target/tokenizer.json")
_PACKED = ("packed/model-00001-of-00002.safetensors", "packed/offload_pack.json", "packed/config.json")
_PLAIN = ("plain/model-00002-of-00002.safetensors", "plain/config.json", "plain/model.safetensors.index.json")
_QUANTISED = ("awq/model.safetensors", "awq/config.json")
_STORE = ("store/store.json", "store/chunk-00000.tokens", "store/chunk-00000.positions")


class Scene(NamedTuple):
    """One command; the words of `argv` name files below the root.

    Attributes:
        is_timed: what it prints and measures tells times, which differ from run to run.
        stays: names of files that may stay unfinished, since the next run goes on with them.
        goes_on: the next run goes on with a text where this one has left it.
        reads: names of files that could be damaged meanwhile.
        visits: of a server, requests as they go over the wire.
    """

    name: str
    argv: tuple[object, ...]
    stdin: str = ""
    is_timed: bool = False
    stays: tuple[str, ...] = ()
    goes_on: bool = False
    reads: tuple[str, ...] = _PAIR
    visits: tuple[str, ...] = ()
    port: int = 0


def scenes(root: Path) -> list[Scene]:
    """All of them, on the files that `prepare` has made."""
    target, draft, out = root / "target", root / "draft", root / "out"
    small = ("--context", 128, "--threads", 1, "--ram", streaming_ram(target, context=128), "--no-invariant", "-q")
    pair = ("-m", target, "-d", draft, "--tree", "8x3", *small)
    write = ("generate", *pair, "-n", 16, "--greedy")
    say = (*write, "-p", "Say:")
    batch, packed = (*write, "-f", root / "prompts.jsonl", "--out"), ("-m", root / "packed", "-q")
    chat, port, prompts = ("chat", *pair, "-n", 8), free_port(), (_SHARD, "prompts.jsonl")
    half_packed, half_back = ("out/packed.unfinished",), ("out/back.unfinished",)
    tuning = ("-m", target, "-d", draft, "--text", root / "corpus.txt", "--tokens", 8, "--tree", "4x2", "--threads", 1)
    return [
        Scene("generate", say),
        Scene(
            "generate, alone", ("generate", "-m", target, *small, "-n", 8, "--greedy", "-p", "Say:"), reads=_PAIR[::2]
        ),
        Scene("session, new", (*say, "--session", out / "text"), stays=("out/text",), goes_on=True),
        Scene(
            "session, gone on",
            (*write, "--session", root / "text"),
            stays=("text",),
            goes_on=True,
            reads=(_SHARD, "text"),
        ),
        Scene("chat", (*chat, "--session", out / "talk"), "Hi\nYou\n", stays=("out/talk",), goes_on=True),
        Scene("batch", (*batch, out / "results"), stays=("out/results",), reads=prompts),
        Scene("batch, two at once", (*batch, out / "results", "--parallel", 2), stays=("out/results",), reads=prompts),
        Scene("batch, gone on", (*batch, root / "half"), stays=("half",), reads=(*prompts, "half")),
        Scene(
            "datastore build",
            ("datastore", "build", root / "corpus.txt", "--tokenizer", target, "--out", out / "store", "-q"),
            reads=("corpus.txt", _PAIR[-1]),
        ),
        Scene(
            "datastore append",
            ("datastore", "append", root / "store", root / "more.txt", "-q"),
            reads=(*_STORE, "more.txt"),
        ),
        Scene("generate --datastore", (*say, "--datastore", root / "store"), reads=(_SHARD, *_STORE)),
        Scene("pack", ("pack", "-m", root / "plain", "--out", out / "packed", "-q"), stays=half_packed, reads=_PLAIN),
        Scene("pack --verify", ("pack", *packed, "--verify"), reads=_PACKED),
        Scene("unpack", ("unpack", *packed, "--out", out / "back"), stays=half_back, reads=_PACKED),
        Scene("verify", ("verify", root / "plain", "-q", "--manifest", out / "sums"), is_timed=True, reads=_PLAIN),
        Scene("serve", ("serve", *pair, "--parallel", 1, "--port", port), visits=_REQUESTS, port=port),
        Scene("tune", ("tune", *tuning, "-q"), is_timed=True, reads=(*_PAIR, "corpus.txt")),
        Scene("plan", ("plan", "-m", target, "-d", draft, "--ram", "1GiB", "--device", "cpu"), is_timed=True),
        Scene("demo", ("demo", "--size", "40MB", "-n", 2, "-q"), reads=()),
        Scene("generate, packed", ("generate", *packed, *small, "--ram", "1GiB", "-p", "a", "-n", 3), reads=_PACKED),
        Scene(
            "generate, quantised",
            ("generate", "-m", root / "awq", *small, "--ram", "1GiB", "-p", "a", "-n", 8),
            reads=_QUANTISED,
        ),
        Scene("generate --json", (*say, "--json"), is_timed=True),
    ]


def prepare(root: Path) -> None:
    for name in ("out", "cache", "config"):
        (root / name).mkdir(parents=True)
    for model in save_pair(FAMILIES["llama"](), root, noise=0.02):  # random ones, in whose text every weight shows
        save_tokenizer(model, chat_template=TEMPLATE)
    plain = save(build(FAMILIES["llama"]()).bfloat16(), root / "plain", max_shard_size="200KB")
    save_tokenizer(plain)
    save_quantised(root / "target", "awq", root / "awq", max_shard_size="1GB")
    (root / "corpus.txt").write_text(CORPUS)
    (root / "more.txt").write_text(CORPUS[::-1])
    lines = [{"prompt": "Say:"}, {"prompt": "Say", "max_tokens": 2}, {"prompt": "lo"}, {"prompt": "w:"}]
    (root / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def prepare_more(forge: Forge) -> None:
    """What earlier commands have left: a session, a store, a packed model, and results of which one is cut."""
    root = forge.root
    by_name = {scene.name: scene for scene in scenes(root)}
    for name in ("session, new", "batch", "datastore build", "pack"):
        ended = forge.run(by_name[name].argv)
        assert ended.code == 0, f"{name}: {ended.err}"
    for made in ("text", "store", "packed"):
        (root / "out" / made).rename(root / made)
    results = (root / "out" / "results").read_bytes().splitlines(keepends=True)
    (root / "half").write_bytes(b"".join(results[:2]) + results[2][:20])
    (root / "out" / "results").unlink()


def _request(path: str, body: dict[str, object]) -> str:
    text = json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n{text}"


_REQUESTS = (
    _request("/v1/completions", {"model": "target", "prompt": "Hi", "max_tokens": 12, "temperature": 0}),
    _request(
        "/v1/completions", {"model": "target", "prompt": "Hi", "max_tokens": 12, "temperature": 0, "stream": True}
    ),
)
