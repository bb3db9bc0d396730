"""Damage to one file: its bytes, its JSON, or the file itself. All of it is drawn from the `Random` that is given."""

import copy
import json
import math
import os
import random
import shutil
import struct
from pathlib import Path
from typing import Any

from case import Damage

INTERESTING = (0, 1, 2, 7, 8, 127, 128, 255, 256, 4095, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53,
    2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -128, -(2**31), -(2**63))  # fmt: skip
ESCAPES = ("../outside/canary.json", "../outside/canary.safetensors", "../../outside/canary.txt", "/etc/passwd", "..",
    ".", "/", "/dev/zero", "file:///etc/passwd", "~/canary.json", "a\0b", "x/../../outside/canary.json")  # fmt: skip
STRINGS = ("", " ", "\n", "a\nb\x1b[31m\x07c", "\ud800", "é" * 300, "x" * 100_000, "\u202e",
    "%s%n", "{{ x }}", "0", "-1",
    "1e999", "nan", "true", "null", "float32", "torch.float16", "Llama", "llama", "../x", "\0", *ESCAPES)  # fmt: skip
PLAUSIBLE = (1, 2, 3, 4, 6, 16, 24, 64, 0.5, 2.0, True, False, None, "linear", "default", "dynamic", "yarn", "llama3",
    "longrope", "proportional", "mrope", "silu", "gelu", "relu", "gelu_pytorch_tanh", "float16", "bfloat16", "float64",
    "int8", "eager", "sdpa", "flash_attention_2", "full_attention", "sliding_attention", "chunked_attention", "sparse",
    ["full_attention", "sliding_attention"], ["sliding_attention"] * 2, [1, 0], [0, 1], {"rope_type": "linear"},
    {"rope_type": "yarn", "factor": 4.0}, {"full_attention": {"rope_type": "default"}}, "LlamaForCausalLM", "gemma2",
    "mistral", "qwen3", "phi3", "t5", "group", "channel", "block", "tensor", "int", "float", [16, 16])  # fmt: skip
_HUGE = 10**30


def flip(path: Path, rng: random.Random) -> str:
    raw, places = bytearray(path.read_bytes()), []
    for _ in range(rng.choice((1, 1, 2, 16))):
        if raw:
            at = rng.randrange(len(raw))
            raw[at] ^= 1 << rng.randrange(8)
            places.append(at)
    path.write_bytes(raw)
    return f"flip at {places}"


def cut(path: Path, rng: random.Random) -> str:
    """The end is missing, or a piece within."""
    raw = path.read_bytes()
    lo = rng.choice((0, 1, 7, 8, 9, rng.randrange(len(raw) + 1), max(0, len(raw) - rng.randrange(1, 9))))
    hi = rng.choice((len(raw), len(raw), lo + rng.randrange(1, 64)))
    path.write_bytes(raw[:lo] + raw[hi:])
    return f"cut {lo}:{hi} of {len(raw)}"


def piece(path: Path, rng: random.Random) -> str:
    """A piece is repeated, inserted elsewhere, exchanged or overwritten."""
    raw = path.read_bytes()
    lo, size = rng.randrange(len(raw) + 1), rng.choice((1, 2, 4, 8, 16, 256, 4096))
    at, middle = rng.randrange(len(raw) + 1), raw[lo : lo + size]
    options = rng.choice(("repeat", "insert", "over", "noise", "zero", "tail"))
    if options == "repeat":
        raw = raw[:lo] + middle * rng.choice((2, 3, 1000)) + raw[lo + size :]
    elif options == "insert":
        raw = raw[:at] + middle + raw[at:]
    elif options == "tail":
        raw = raw + rng.choice((b"\0", b" ", b"\n", b"}", b"x" * 5000, rng.randbytes(64)))
    else:
        middle = {"over": middle, "noise": rng.randbytes(len(middle)), "zero": bytes(len(middle))}[options]
        raw = raw[:at] + middle + raw[at + len(middle) :]
    path.write_bytes(raw)
    return f"{options} {len(middle)} bytes of {lo} at {at}"


def integer(path: Path, rng: random.Random) -> str:
    """A word somewhere, most of them near the beginning, is one of the numbers that arithmetic stumbles over."""
    raw = bytearray(path.read_bytes())
    width, value = rng.choice((1, 2, 4, 8)), rng.choice(INTERESTING)
    most = rng.choice((16, 64, 512, len(raw)))
    at = rng.randrange(max(1, min(most, len(raw))))
    at -= at % rng.choice((1, width))
    raw[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    path.write_bytes(raw)
    return f"{value} as {width} bytes at {at}"


def text(path: Path, rng: random.Random) -> str:
    """Words of JSON and others are put into a text or overwrite what is there."""
    raw = path.read_bytes()
    words = (b"0", b"9" * 30, b"-1", b"null", b"true", b"[]", b"{}", b'""', b",", b'"', b"{", b"[" * 2000, b"1e999",
        b"NaN", b"\xff", b"\xef\xbb\xbf", b"\\ud800", b"\0", b"\n", "é".encode("utf-16"))  # fmt: skip
    done = []
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(raw) + 1)
        word, size = rng.choice(words), rng.choice((0, 0, 1, 4, 40))
        raw = raw[:at] + word + raw[at + size :]
        done.append(f"{word[:12]!r} over {size} at {at}")
    path.write_bytes(raw)
    return ", ".join(done)


def front(size: int, damage: Damage) -> Damage:
    """Do this damage to the first bytes alone, where a header lies."""

    def damage_front(path: Path, rng: random.Random) -> str:
        raw, part = path.read_bytes(), path.with_name("front.tmp")
        part.write_bytes(raw[:size])
        done = damage(part, rng)
        path.write_bytes(part.read_bytes() + raw[size:])
        part.unlink()
        return f"front: {done}"

    return damage_front


def special(path: Path, rng: random.Random) -> str:
    """The file is missing, empty, or something else."""
    outside = path.parent
    while outside.name != "case":
        outside = outside.parent
    canary = outside.parent / "outside" / rng.choice(("canary.json", "canary.safetensors"))
    options = rng.choice(
        ("missing", "empty", "link", "loop", "fifo", "folder", "zero", "unreadable", "dangling", "large")
    )
    if options == "unreadable":
        path.chmod(0)
        return options if os.geteuid() else "unreadable, but to root"
    raw = path.read_bytes()
    path.unlink()
    if options in ("empty", "folder", "fifo"):
        {"empty": path.touch, "folder": path.mkdir, "fifo": lambda: os.mkfifo(path)}[options]()
    elif options == "large":
        path.write_bytes(raw)
        os.truncate(path, rng.choice((1 << 31, 1 << 36)))  # a hole: it takes no room on the disk
    elif options != "missing":
        path.symlink_to({"link": canary, "loop": path.name, "zero": "/dev/zero", "dangling": "not-there"}[options])
    return options


def json_value(path: Path, rng: random.Random) -> str:
    """One or two values of a JSON file; what is no JSON any more is damaged as text."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return text(path, rng)
    changed, done = damaged_value(value, rng)
    path.write_text(dumped(changed, rng))
    return done


def json_line(path: Path, rng: random.Random) -> str:
    lines = path.read_text(errors="replace").split("\n")
    at = rng.randrange(len(lines))
    try:
        value, done = damaged_value(json.loads(lines[at]), rng)
    except (ValueError, RecursionError):
        return text(path, rng)
    lines[at] = dumped(value, rng)
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    return f"line {at}: {done}"


def only(*keys: str) -> Damage:
    """Values of a JSON object below these keys alone, where one is there; `a.b` is `b` in `a`."""

    def damage(path: Path, rng: random.Random) -> str:
        try:
            value = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            return text(path, rng)
        key = rng.choice(keys)
        *steps, last = key.split(".")
        place = value
        for step in steps:
            place = place.setdefault(step, {}) if isinstance(place, dict) else {}
        if not isinstance(place, dict):
            return "nothing to change"
        if isinstance(place.get(last), (dict, list)) and place[last] and rng.random() < 0.7:
            place[last], done = damaged_value(place[last], rng)
        else:
            place[last] = strange(rng, place.get(last))
            done = f"{str(place[last])[:60]!r}"
        path.write_text(dumped(value, rng))
        return f"{key}: {done}"

    return damage


def damaged_value(value: Any, rng: random.Random) -> tuple[Any, str]:
    """A JSON value with one or two places changed, and what was done."""
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place, key, name = _place(value, rng)
        if place is None:
            value = strange(rng, value)
            done.append("the whole")
            continue
        done.append(f"{name}: {_change(place, key, rng)}")
    return value, ", ".join(done)


def strange(rng: random.Random, usual: Any = None) -> Any:
    """A value that has another type, or is of no use."""
    kinds = [
        lambda: rng.choice(INTERESTING), lambda: rng.choice(STRINGS), lambda: rng.choice((True, False, None)),
        lambda: rng.choice((0.0, -0.5, 1.5, 1e-300, 1e300, float("nan"), float("inf"), -float("inf"), 1e-45)),
        lambda: rng.choice(([], {}, [[]], [None], {"a": 1}, [1, 2, 3], ["x"], {"": {}}, [0] * 10_000)),
        lambda: _nested(rng), lambda: rng.choice((_HUGE, -_HUGE, 10**400, 12345678901)),
        lambda: str(usual), lambda: [usual], *[lambda: copy.deepcopy(rng.choice(PLAUSIBLE))] * 6,
    ]  # fmt: skip
    if type(usual) is int and abs(usual) < 2**64 and rng.random() < 0.6:  # more is no float
        return rng.choice(
            (usual + 1, usual - 1, -usual, usual * 2, usual // 2, usual * 1000, usual + 0.5, 0, usual << 40)
        )
    if isinstance(usual, float) and math.isfinite(usual) and rng.random() < 0.5:
        return rng.choice((-usual, usual * 1e6, usual / 1e6, 0.0, int(usual)))
    return rng.choice(kinds)()


def dumped(value: Any, rng: random.Random) -> str:
    """JSON, sometimes with a key twice, which no dictionary holds."""
    whole = json.dumps(value)
    if isinstance(value, dict) and value and rng.random() < 0.05:
        key = rng.choice(list(value))
        whole = f"{whole[:-1]}, {json.dumps(key)}: {json.dumps(strange(rng, value[key]))}}}"
    return whole


def header(path: Path, rng: random.Random) -> str:
    """The JSON that a safetensors file begins with: its values, its text or its length."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    if size + 8 > len(raw):
        return piece(path, rng)
    part, data = path.with_name("header.tmp"), raw[8 + size :]
    part.write_bytes(raw[8 : 8 + size])
    done = rng.choice((json_value, json_value, json_value, text, flip, piece))(part, rng)
    new = part.read_bytes()
    part.unlink()
    length = rng.choice((len(new),) * 9 + (size, rng.choice(INTERESTING) % 2**64))
    path.write_bytes(struct.pack("<Q", length) + new + data)
    return f"header: {done}, length {length}"


def data(path: Path, rng: random.Random) -> str:
    """What follows the header of a safetensors file, as numbers: not finite, huge, zero."""
    raw = bytearray(path.read_bytes())
    lo = min(len(raw), 8 + int.from_bytes(raw[:8], "little"))
    if len(raw) - lo < 8:
        return piece(path, rng)
    at = lo + rng.randrange((len(raw) - lo) // 4) * 4
    word = rng.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff" * 4, bytes(4), b"\xff\xff\x7f\x7f", rng.randbytes(4)))
    count = min(rng.choice((1, 1, 16, 4096)), (len(raw) - at) // 4)
    raw[at : at + 4 * count] = word * count
    path.write_bytes(raw)
    return f"{count} words {word.hex()} at {at}"


def other(*contents: str) -> Damage:

    def damage(path: Path, rng: random.Random) -> str:
        number = rng.randrange(len(contents))
        path.write_text(contents[number])
        return f"content {number}: {contents[number][:40]!r}"

    return damage


def strange_key(path: Path, rng: random.Random) -> str:
    name = rng.choice((f"x{path.name}", f"{path.stem}-00001-of-00002{path.suffix}", f"{path.name}.bak", "model.bin"))
    shutil.copy(path, path.with_name(name))
    return f"copied to {name}"


BYTES: tuple[Damage, ...] = (flip, cut, piece, integer)
JSON: tuple[Damage, ...] = (json_value, json_value, json_value, text, flip, cut, special)


def _place(value: Any, rng: random.Random) -> tuple[Any, Any, str]:
    """A container anywhere inside, a key or index of it, and the path to it."""
    place, key, name = None, None, ""
    while isinstance(value, (dict, list)) and value:
        if place is not None and rng.random() < 0.35:
            break
        place, key = value, rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        name, value = f"{name}.{str(key)[:40]}", value[key]
    return place, key, name.lstrip(".")


def _change(place: Any, key: Any, rng: random.Random) -> str:
    options = rng.choice(("strange", "strange", "strange", "strange", "drop", "rename", "double", "swap"))
    if options == "drop":
        del place[key]
    elif options == "rename" and isinstance(place, dict):
        place[rng.choice((*STRINGS, f"{key}x", f"x.{key}"))] = place.pop(key)
    elif options == "double":
        if isinstance(place, dict):
            place[f"{key}.2"] = place[key]
        else:
            place.append(place[key])
    elif options == "swap":
        another = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        place[key], place[another] = place[another], place[key]
    else:
        place[key] = strange(rng, place[key])
        return f"{str(place[key])[:60]!r}"
    return options


def _nested(rng: random.Random) -> Any:
    value: Any = 1
    for _ in range(rng.choice((3, 50, 400))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value
