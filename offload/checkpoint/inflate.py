"""Turns a small trained Llama checkpoint into one of any size on disk that computes the same function.

Speculation is only worth measuring against a trained target, and a machine without a model hub has no big one. So a
small target is padded: hidden coordinates that are always zero, query heads and feed-forward rows that nothing listens
to, whole layers that add nothing. The padding is random wherever it only meets zeros, so its bytes are real work.

Invariant: what is *read* from a new coordinate is any finite number, what is *written* to one is zero. The hidden size
grows by 4^k, so RMSNorm divides by a root that is 2^k times smaller, and its weight takes the factor back: exact in any
binary float. Logits therefore equal the small model's up to the order of summation.
"""

import fcntl
import hashlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig

from offload.checkpoint.layout import BLOCK_BYTES
from offload.checkpoint.safetensors import Checkpoint, open_checkpoint, read_json
from offload.config import format_bytes
from offload.encoding.registry import ENCODINGS, PLAIN_OF
from offload.errors import UserError

MANIFEST_NAME = "inflation.json"
_FORMAT_VERSION = 1  # raise it when the same parameters come to give other tensors
_FFN_STEP = 64
_LAYER = "model.layers.{}."
_BALLAST_STD = 0.02
# What writes into the hidden state adds nothing to new coordinates, and nothing from new heads or ffn rows.
_HIDDEN_WRITERS = frozenset({"model.embed_tokens", "self_attn.o_proj", "mlp.down_proj"})
_COPIED = ("generation_config.json", "*token*.json", "tokenizer.model", "vocab.*", "merges.txt", "chat_template*")
_BLOCK_BYTES = 4 << 20  # written at once: large for the disk, small beside a layer
_POOL_SLACK = 65_537  # how far the view on the random pool may be shifted from block to block
_DISK_MARGIN_BYTES = 64 << 20  # headers, tokenizer, the file system's own blocks
# one entry per stored dimension; where the rows of all query heads lie, (kv group, row within the group)
Axes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class InflationPlan:
    """The sizes of an inflated model; kv heads and head width stay those of the small one."""

    hidden_size: int
    num_heads: int
    ffn_size: int
    num_layers: int
    layer_bytes: int
    total_bytes: int  # of all tensors, headers not counted


def plan_inflation(
    config: dict[str, Any], target_bytes: int, *, width_factor: int = 4, layer_bytes: int = 25_000_000
) -> InflationPlan:
    """Choose the feed-forward size for layers of about `layer_bytes`, then the fewest layers that reach `target_bytes`.

    Layers become smaller than `layer_bytes` where the small model's own number of layers would overshoot. The total is
    never below `target_bytes`, and less than a layer above it unless the narrowest inflated model is bigger already.

    `config` is the small model's config.json with the stored type as `dtype`; hidden size and query heads grow by
    `width_factor`, a power of four.

    Raises:
        UserError: not a plain Llama, no known dtype, or a width factor other than 4, 16, 64, ...
    """
    small = _complete(config)
    big = {**small, **_widened(small, width_factor)}
    _require(small["dtype"] in PLAIN_OF, f"dtype must be bfloat16, float16 or float32, got {small['dtype']}")
    item_bytes = PLAIN_OF[small["dtype"]].align_bytes
    outer_bytes = _num_bytes(_outer_axes(big).values(), item_bytes)
    fixed_bytes = _num_bytes(_layer_axes({**big, "intermediate_size": 0}).values(), item_bytes)
    step_bytes = _num_bytes(_layer_axes({**big, "intermediate_size": _FFN_STEP}).values(), item_bytes) - fixed_bytes
    wish_bytes = min(layer_bytes, (target_bytes - outer_bytes) / small["num_hidden_layers"])
    num_steps = max(math.ceil(small["intermediate_size"] / _FFN_STEP), round((wish_bytes - fixed_bytes) / step_bytes))
    layer_bytes = fixed_bytes + num_steps * step_bytes
    num_layers = max(small["num_hidden_layers"], math.ceil((target_bytes - outer_bytes) / layer_bytes))
    total_bytes = outer_bytes + num_layers * layer_bytes
    hidden_size, num_heads = big["hidden_size"], big["num_attention_heads"]
    return InflationPlan(hidden_size, num_heads, num_steps * _FFN_STEP, num_layers, layer_bytes, total_bytes)


def inflate(
    source: Path,
    destination: Path,
    target_bytes: int,
    *,
    layer_bytes: int = 25_000_000,
    width_factor: int = 4,
    shard_bytes: int = 1 << 30,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the inflated checkpoint of `source`; return its folder, at once when `destination` already holds it.

    `progress(done_bytes, total_bytes)` is called after every block. The folder gets its name only when it is whole.

    Raises:
        UserError: not a plain Llama, `destination` holds anything else, another process writes it, or the disk is full.
    """
    source, destination = Path(source), Path(destination).resolve()
    sizes = {"target_bytes": target_bytes, "layer_bytes": layer_bytes, "width_factor": width_factor}
    origin = {"format": _FORMAT_VERSION, "source_sha256": _digest(source), "seed": seed}
    made_from = {**origin, **sizes, "shard_bytes": shard_bytes}
    if _is_finished(destination, made_from):
        return destination
    small = open_checkpoint(source)
    old = _complete(small.config)
    dtype = _check_tensors(small, old)
    old["dtype"] = ENCODINGS[dtype].dtype  # as stored, whatever the config wants it cast to
    plan = plan_inflation(old, target_bytes, width_factor=width_factor, layer_bytes=layer_bytes)
    changes = dict(_widened(old, width_factor), intermediate_size=plan.ffn_size, num_hidden_layers=plan.num_layers)
    with _workspace(destination) as folder:
        _check_disk(folder, plan.total_bytes)
        shards = _shards(old, {**old, **changes}, plan, shard_bytes)
        for done_bytes in accumulate(_write_shards(folder, shards, _BlockMaker(small, dtype, seed))):
            if progress:
                progress(done_bytes, plan.total_bytes)
        _write_json(folder / "config.json", {**small.config, **changes})
        for path in _companions(source):
            shutil.copyfile(path, folder / path.name)
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        _write_json(folder / MANIFEST_NAME, {"made_from": made_from, "plan": asdict(plan), "files": files})
    return destination


def _complete(config: dict[str, Any]) -> dict[str, Any]:
    """The config with Hugging Face's defaults for what it leaves out. Raises `UserError` if it is no plain Llama."""
    model_type = config.get("model_type")
    _require(model_type == "llama", f"only model_type llama can be inflated, got {model_type}: choose a Llama")
    full = LlamaConfig.from_dict(config).to_dict()
    has_biases = full["attention_bias"] or full["mlp_bias"]
    _require(not has_biases, "only a Llama without attention_bias and mlp_bias can be inflated: choose another one")
    heads, kv_heads = full["num_attention_heads"], full["num_key_value_heads"]
    _require(heads % kv_heads == 0, f"{heads} query heads are no multiple of {kv_heads} kv heads: mend config.json")
    return full


def _widened(small: dict[str, Any], width_factor: int) -> dict[str, Any]:
    """What a new width changes in the config, and what would otherwise be derived from it and must stay."""
    powers = [4**k for k in range(1, 16)]
    _require(width_factor in powers, f"width_factor must be a power of 4, got {width_factor}: try 4 or 16")
    return {
        "hidden_size": small["hidden_size"] * width_factor,
        "num_attention_heads": small["num_attention_heads"] * width_factor,
        "num_key_value_heads": small["num_key_value_heads"],
        "head_dim": small["head_dim"],
        "rms_norm_eps": small["rms_norm_eps"] / width_factor,
    }


def _layer_axes(config: dict[str, Any]) -> dict[str, Axes]:
    """One layer in file order. The small tensor is the low corner of the big one on every axis, groups included."""
    D, F, G = config["hidden_size"], config["intermediate_size"], config["num_key_value_heads"]
    group_rows = config["num_attention_heads"] // G * config["head_dim"]
    kv_rows = G * config["head_dim"]
    return {
        "input_layernorm": ((D,),),
        "self_attn.q_proj": ((G, group_rows), (D,)),
        "self_attn.k_proj": ((kv_rows,), (D,)),
        "self_attn.v_proj": ((kv_rows,), (D,)),
        "self_attn.o_proj": ((D,), (G, group_rows)),
        "post_attention_layernorm": ((D,),),
        "mlp.gate_proj": ((F,), (D,)),
        "mlp.up_proj": ((F,), (D,)),
        "mlp.down_proj": ((D,), (F,)),
    }


def _outer_axes(config: dict[str, Any]) -> dict[str, Axes]:
    """What lies outside the layers; a tied model stores no head."""
    D, V = config["hidden_size"], config["vocab_size"]
    axes: dict[str, Axes] = {"model.embed_tokens": ((V,), (D,)), "model.norm": ((D,),)}
    return axes if config["tie_word_embeddings"] else {**axes, "lm_head": ((V,), (D,))}


def _stored_shape(axes: Axes) -> tuple[int, ...]:
    return tuple(math.prod(axis) for axis in axes)


def _num_bytes(shapes: Iterable[Axes], item_bytes: int) -> int:
    return sum(math.prod(_stored_shape(axes)) for axes in shapes) * item_bytes


def _digest(source: Path) -> str:
    """sha256 over names and contents of everything that an inflation depends on."""
    digest = hashlib.sha256()
    for path in sorted({*source.glob("config.json"), *source.glob("*.safetensors*"), *_companions(source)}):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _companions(source: Path) -> list[Path]:
    return sorted({path for pattern in _COPIED for path in source.glob(pattern) if path.is_file()})


def _check_tensors(small: Checkpoint, config: dict[str, Any]) -> str:
    """The dtype that all tensors share, once names and shapes are exactly those that the config implies."""
    outer, layer = _outer_axes(config), _layer_axes(config)
    pieces = _pieces("", "", outer, outer)
    for index in range(config["num_hidden_layers"]):
        pieces += _pieces(_LAYER.format(index), "", layer, layer)
    wanted = {piece.name: _stored_shape(piece.axes) for piece in pieces}
    # old checkpoints keep the rotary frequencies, which the config gives as well
    entries = {name: entry for name, entry in small.tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    for name in sorted(wanted.keys() | entries.keys()):
        found = entries[name].shape if name in entries else None
        is_right = found == wanted.get(name)
        _require(is_right, f"{small.directory}: {name} is {found}, config.json implies {wanted.get(name)}: mend either")
    names = ", ".join(sorted({entry.dtype for entry in entries.values()}))
    _require(names in ENCODINGS, f"all tensors must share BF16, F16 or F32, got {names}: convert {small.directory}")
    return names


class _Piece(NamedTuple):
    """One tensor of the inflated model."""

    name: str
    axes: Axes
    is_ballast: bool  # padded with random values, else with zeros
    source: str | None  # the small tensor in its low corner; None in an inserted layer
    corner: tuple[int, ...]  # extent of the small tensor on every axis

    @property
    def divisor(self) -> int:
        """Of the small tensor's values: RMSNorm of a vector padded with zeros is larger by sqrt(H / h)."""
        return math.isqrt(self.axes[0][0] // self.corner[0]) if len(self.axes) == 1 else 1


def _pieces(prefix: str, source_prefix: str | None, old: dict[str, Axes], new: dict[str, Axes]) -> list[_Piece]:
    def piece(part: str, axes: Axes) -> _Piece:
        source = None if source_prefix is None else f"{source_prefix}{part}.weight"
        return _Piece(f"{prefix}{part}.weight", axes, part not in _HIDDEN_WRITERS, source, tuple(chain(*old[part])))

    return [piece(part, axes) for part, axes in new.items()]


def _shards(old: dict[str, Any], new: dict[str, Any], plan: InflationPlan, shard_bytes: int) -> list[list[_Piece]]:
    """All pieces in file order: what is outside the layers first; a layer never crosses a shard."""
    num_real = old["num_hidden_layers"]
    # evenly spread, and never two at one place since there are at least as many places as real layers
    real_at = {(2 * real + 1) * plan.num_layers // (2 * num_real): real for real in range(num_real)}
    shards = [_pieces("", "", _outer_axes(old), _outer_axes(new))]
    filled_bytes = plan.total_bytes - plan.num_layers * plan.layer_bytes
    for index in range(plan.num_layers):
        if filled_bytes + plan.layer_bytes > shard_bytes:
            shards.append([])
            filled_bytes = 0
        source_prefix = _LAYER.format(real_at[index]) if index in real_at else None
        shards[-1] += _pieces(_LAYER.format(index), source_prefix, _layer_axes(old), _layer_axes(new))
        filled_bytes += plan.layer_bytes
    return shards


class _BlockMaker:
    """Gives a piece's elements block by block; padding is zeros or a view of one random pool."""

    def __init__(self, small: Checkpoint, dtype: str, seed: int) -> None:
        self.dtype, self._small = dtype, small
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._pool = torch.empty(0, dtype=getattr(torch, ENCODINGS[dtype].dtype))

    def blocks(self, piece: _Piece) -> Iterator[Tensor]:
        """The piece from its first element to its last, to be read only."""
        num_rows, *row = chain(*piece.axes)
        step = max(1, _BLOCK_BYTES // (ENCODINGS[self.dtype].stored_bytes(row)))
        for lo in range(0, num_rows, step):
            hi, small_hi = min(lo + step, num_rows), min(lo + step, piece.corner[0])
            block = self._padding((hi - lo) * math.prod(row), piece.is_ballast).view(hi - lo, *row)
            if piece.source and lo < small_hi:
                block = block.clone()  # the pool is shared
                block[tuple(map(slice, (small_hi - lo, *piece.corner[1:])))] = self._read(piece, lo, small_hi)
            yield block

    def _padding(self, num_elements: int, is_ballast: bool) -> Tensor:
        if not is_ballast:
            return self._pool.new_zeros(num_elements)
        if len(self._pool) < num_elements + _POOL_SLACK:
            self._pool = self._pool.new_empty(num_elements + _POOL_SLACK)
            self._pool.normal_(std=_BALLAST_STD, generator=self._generator)
        start = self._random.randrange(_POOL_SLACK)
        return self._pool[start : start + num_elements]

    def _read(self, piece: _Piece, lo: int, hi: int) -> Tensor:
        """Rows [lo, hi) of the small tensor, along the piece's first axis."""
        assert piece.source, "an inserted layer has nothing to read"
        entry = self._small.tensors[piece.source]
        row_bytes = ENCODINGS[self.dtype].stored_bytes(piece.corner[1:])
        data = bytearray((hi - lo) * row_bytes)
        with self._small.shards[entry.shard].open("rb") as file:
            file.seek(entry.lo + lo * row_bytes)
            _require(file.readinto(data) == len(data), f"{file.name} shrank while it was read: start again")
        rows = torch.frombuffer(data, dtype=self._pool.dtype).view(hi - lo, *piece.corner[1:])
        scaled = rows / piece.divisor
        is_exact = torch.equal(scaled * piece.divisor, rows)
        _require(is_exact, f"{piece.source} cannot be divided exactly in {self.dtype}: convert the checkpoint to BF16")
        return scaled


def _write_shards(folder: Path, shards: list[list[_Piece]], maker: _BlockMaker) -> Iterator[int]:
    """Write all shards, and the index when there are several; yields the bytes of every block once it is written."""
    weight_map: dict[str, str] = {}
    for number, pieces in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        yield from _write_shard(folder / name, pieces, maker)
        weight_map |= dict.fromkeys((piece.name for piece in pieces), name)
    if len(shards) > 1:
        total_bytes = _num_bytes((piece.axes for piece in chain(*shards)), ENCODINGS[maker.dtype].align_bytes)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _write_shard(path: Path, pieces: list[_Piece], maker: _BlockMaker) -> Iterator[int]:
    """One safetensors file: u64 header length, JSON padded to a block, tensors in the order of the pieces."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece in pieces:
        lo, end = end, end + _num_bytes([piece.axes], ENCODINGS[maker.dtype].align_bytes)
        header[piece.name] = {"dtype": maker.dtype, "shape": _stored_shape(piece.axes), "data_offsets": (lo, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % BLOCK_BYTES)  # so that tensors begin where wide loads can
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for block in chain.from_iterable(map(maker.blocks, pieces)):
            yield file.write(block.flatten().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _is_finished(destination: Path, made_from: dict[str, Any]) -> bool:
    """Whether the folder holds this very inflation; False when it is empty. Raises `UserError` for anything else."""
    if not destination.exists() or (destination.is_dir() and not any(destination.iterdir())):
        return False
    _require((destination / MANIFEST_NAME).is_file(), f"{destination} holds something else: choose another folder")
    manifest = read_json(destination / MANIFEST_NAME)
    is_same = manifest.get("made_from") == made_from
    _require(is_same, f"{destination} was inflated from other weights or to other sizes: remove it or choose another")
    for name, num_bytes in manifest["files"].items():
        path = destination / name
        is_whole = path.is_file() and path.stat().st_size == num_bytes
        _require(is_whole, f"{path} should be a file of {num_bytes} bytes: remove {destination} and start again")
    return True


@contextmanager
def _workspace(destination: Path) -> Iterator[Path]:
    """An empty sibling folder: becomes `destination` when the body ends well, disappears when it does not.

    Its lock tells the leftovers of a killed run, which are removed, from the files of a living one.
    """
    folder = destination.with_name(f".{destination.name}.inflating")
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        _take_lock(lock, folder)
        for leftover in folder.iterdir():
            leftover.unlink()
        try:
            yield folder
            folder.replace(destination)
        except BaseException:
            shutil.rmtree(folder)
            raise
    finally:
        os.close(lock)


def _take_lock(lock: int, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another process is writing to {folder}: wait for it or choose another folder") from None


def _check_disk(folder: Path, total_bytes: int) -> None:
    needed_bytes, free_bytes = total_bytes + _DISK_MARGIN_BYTES, shutil.disk_usage(folder).free
    sizes = f"needs {format_bytes(needed_bytes)} of disk, {folder.parent} has {format_bytes(free_bytes)}"
    _require(needed_bytes <= free_bytes, f"the inflated model {sizes}: free some or ask for less")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UserError(message)
