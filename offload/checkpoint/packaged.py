"""The pair of models that the package carries, and its small target enlarged to any size on disk.

Speculation is only worth measuring against a trained target, so `inflate` enlarges that one without
changing what it computes. It adds hidden coordinates that are always zero, query heads and
feed-forward rows whose output is not read, and whole layers that add nothing. Padding that only
meets zeros is random, so that its bytes are real work. Experts grow, too. An added layer routes as
the nearest real layer does, so that it stays realistic which experts a text needs.

Invariant: weights that *read* a new coordinate are any finite numbers, weights that *write* to one
are zero. The hidden size grows fourfold, so RMSNorm divides by a root half as large, and its weight
makes up for the factor: exact in any binary float. Norms of queries and keys keep their width but
meet the smaller epsilon, so their input is halved. Logits equal the small model's up to the order
of summation.
"""

import hashlib
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from offload.checkpoint.download import INDEX
from offload.checkpoint.files import (
    INFLATED,
    BusyError,
    cache_folder,
    is_free,
    publish_atomically,
    read_json,
    require_disk,
    write_json,
)
from offload.checkpoint.imagined import layer_shapes
from offload.checkpoint.layout import BLOCK_BYTES
from offload.checkpoint.open import find_shards, shard_name
from offload.checkpoint.safetensors import header_bytes
from offload.checkpoint.tensors import TensorEntry
from offload.encoding.base import PLAIN_OF
from offload.errors import UserError, os_errors_as_user_error
from offload.options import DEMO_PAIR

_FORMAT_VERSION = 1  # raise it when the same parameters give other tensors
_WIDTH_FACTOR = 4
_NORM_DIVISOR = 2  # RMSNorm of a vector padded with zeros grows by the root of the factor
_LAYER_BYTES = 25_000_000
_EXPERT_BYTES = 2_500_000
_SHARD_BYTES = 1 << 30
_SEED = 0
_FFN_STEP = 64
_LAYER = "model.layers.{}."
_CARRIED = "mtp.layers.0."  # a layer that guesses ahead
_BALLAST_STD = 0.02
# Tensors that write to the hidden state are padded with zeros: they add nothing to new coordinates,
# and new heads or feed-forward rows add nothing through them.
_HIDDEN_WRITERS = frozenset({"embed_tokens", "o_proj", "down_proj", "fc"})
_ROUTER = "mlp.gate"
# the router: decides which experts are chosen
_ROUTING = frozenset({_ROUTER, "post_attention_layernorm"})
# only in families that norm queries and keys
_HEAD_NORMED = frozenset({"self_attn.q_proj", "self_attn.k_proj"})
_HEAD_NORMS = frozenset({"self_attn.q_norm", "self_attn.k_norm"})
_COPIED = (
    "generation_config.json",
    "*token*.json",
    "tokenizer.model",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)
_WRITE_BYTES = 4 << 20  # large enough for the disk, small beside a layer
_POOL_SLACK = 65_537  # how far the view of the random pool may shift from block to block
# The sizes of each stored dimension; a dimension of all query heads is split into
# (kv group, row within the group).
Axes = tuple[tuple[int, ...], ...]

PAIR = DEMO_PAIR
PROMPT = '''"""Read settings from a file."""

import os


class Settings:
    """A mapping of names to values, read once.
    """

    def __init__(self, path, encoding=None):
'''


class OtherInflationError(UserError):
    """A folder was inflated, but from other weights or to other sizes."""


class InflationPlan(NamedTuple):
    """The sizes of an inflated model; kv heads and head width stay those of the small one."""

    hidden_size: int
    num_heads: int
    ffn_size: int
    num_layers: int
    layer_bytes: int
    total_bytes: int  # of all tensors, headers not counted


def plan_inflation(small: dict[str, Any], target_bytes: int) -> InflationPlan:
    """Return the feed-forward size and the fewest layers of that size that reach `target_bytes`.

    Layers have about `_LAYER_BYTES` and experts about `_EXPERT_BYTES`, or less where the small
    model's own number of layers would overshoot. The total is never below `target_bytes`, and less
    than a layer above it unless the narrowest inflated model is larger already.
    """
    wide = {**small, **_widened(small)}
    grown = _inner_size_name(small)

    def layer_bytes(ffn_size: int) -> int:
        return _num_bytes(_layer_axes({**wide, grown: ffn_size}), small["dtype"])

    num_real = small["num_hidden_layers"]
    num_carried = _num_carried(small)
    outer_bytes = _num_bytes(_outer_axes(wide), small["dtype"])
    fixed_bytes = layer_bytes(0)
    share_bytes = (target_bytes - outer_bytes) / (num_real + num_carried)
    wanted_bytes = min(_most_layer_bytes(small), share_bytes)
    num_steps = round((wanted_bytes - fixed_bytes) / (layer_bytes(_FFN_STEP) - fixed_bytes))
    ffn_size = max(math.ceil(small[grown] / _FFN_STEP), num_steps) * _FFN_STEP
    each_bytes = layer_bytes(ffn_size)
    num_wanted = math.ceil((target_bytes - outer_bytes) / each_bytes) - num_carried
    num_layers = max(num_real, num_wanted)
    return InflationPlan(
        hidden_size=wide["hidden_size"],
        num_heads=wide["num_attention_heads"],
        ffn_size=ffn_size,
        num_layers=num_layers,
        layer_bytes=each_bytes,
        total_bytes=outer_bytes + (num_layers + num_carried) * each_bytes,
    )


def inflate(
    source: Path, destination: Path, target_bytes: int, *, progress: Callable[[int, int], None]
) -> Path:
    """Write the inflated checkpoint of `source`, unless it exists already; return its folder.

    `source` is a Llama without biases or a Qwen3-MoE with experts in every layer. Its head is tied,
    all its tensors are of one type, and an MTP layer has Qwen's form. `progress` is called with the
    bytes done and the bytes in all. Raises `UserError` for a destination with other
    content or that another process writes to, and for a full disk.
    """
    destination = destination.resolve()
    small = read_json(source / "config.json")
    made_from = {
        "format": _FORMAT_VERSION,
        "source_sha256": _digest(source),
        "seed": _SEED,
        "target_bytes": target_bytes,
        "layer_bytes": _most_layer_bytes(small),
        "width_factor": _WIDTH_FACTOR,
        "shard_bytes": _SHARD_BYTES,
    }
    if _is_finished(destination, made_from):
        return destination
    plan = plan_inflation(small, target_bytes)
    big = inflated_config(source, target_bytes)
    scratch = destination.with_name(f".{destination.name}.inflating")
    with publish_atomically(destination, scratch) as folder:
        remedy = "free some or ask for less"
        require_disk(folder, plan.total_bytes, "the inflated model needs", remedy)
        shards = _shards(_Corners(source, small), big, plan)
        for done_bytes in accumulate(_write_shards(folder, shards, small["dtype"])):
            progress(done_bytes, plan.total_bytes)
        write_json(folder / "config.json", big)
        for path in _companions(source):
            shutil.copyfile(path, folder / path.name)
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        made = {"made_from": made_from, "plan": plan._asdict(), "files": files}
        write_json(folder / INFLATED, made)
    return destination


def inflated_config(source: Path, target_bytes: int) -> dict[str, Any]:
    """Return the config that `inflate` will write."""
    small = read_json(source / "config.json")
    plan = plan_inflation(small, target_bytes)
    return {
        **small,
        **_widened(small),
        _inner_size_name(small): plan.ffn_size,
        "num_hidden_layers": plan.num_layers,
    }


def stored_weights(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder's files by name."""
    shards, _ = find_shards(folder)
    return {name: weight for shard in shards for name, weight in load_file(shard).items()}


def _inner_size_name(config: dict[str, Any]) -> str:
    """Return the config key of the size that makes layers larger."""
    return "moe_intermediate_size" if _num_experts(config) else "intermediate_size"


def _most_layer_bytes(config: dict[str, Any]) -> int:
    return _EXPERT_BYTES * _num_experts(config) or _LAYER_BYTES


def _num_experts(config: dict[str, Any]) -> int:
    """Return the experts of each layer, 0 for a Llama; transformers 5 uses the second key."""
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def _num_carried(config: dict[str, Any]) -> int:
    return int(config.get("num_nextn_predict_layers") or 0)


def _widened(small: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that the new width changes."""
    return {
        "hidden_size": small["hidden_size"] * _WIDTH_FACTOR,
        "num_attention_heads": small["num_attention_heads"] * _WIDTH_FACTOR,
        "rms_norm_eps": small["rms_norm_eps"] / _WIDTH_FACTOR,
    }


def _layer_axes(config: dict[str, Any]) -> dict[str, Axes]:
    """Return the axes of one layer's tensors, in file order; the small ones are their low corners."""
    shapes = _moe_shapes(config) if _num_experts(config) else layer_shapes(config)
    axes = {
        name.removesuffix(".weight"): tuple((size,) for size in shape)
        for name, shape in shapes.items()
    }
    groups = config["num_key_value_heads"]
    hidden = (config["hidden_size"],)
    queries = (groups, config["num_attention_heads"] // groups * config["head_dim"])
    return {**axes, "self_attn.q_proj": (queries, hidden), "self_attn.o_proj": (hidden, queries)}


def _moe_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's tensors by name, expert after expert."""
    width = config["hidden_size"]
    inner = config["moe_intermediate_size"]
    num_experts = _num_experts(config)
    dense = layer_shapes({**config, "model_type": "qwen3"}).items()
    shapes = {name: shape for name, shape in dense if not name.startswith("mlp.")}
    shapes[f"{_ROUTER}.weight"] = (num_experts, width)
    expert_shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    for expert in range(num_experts):
        stem = f"mlp.experts.{expert}"
        shapes |= {f"{stem}.{part}_proj.weight": shape for part, shape in expert_shapes.items()}
    return dict(sorted(shapes.items()))


def _outer_axes(config: dict[str, Any]) -> dict[str, Axes]:
    """Return the axes of the tensors outside the layers; the head is tied."""
    width = (config["hidden_size"],)
    axes: dict[str, Axes] = {
        "model.embed_tokens": ((config["vocab_size"],), width),
        "model.norm": (width,),
    }
    if _num_carried(config):
        # for an embedding and a hidden state
        axes["mtp.fc"] = (width, (2, *width))
        norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        axes |= {f"mtp.{name}": (width,) for name in norms}
    return axes


def _num_bytes(axes: dict[str, Axes], dtype: str) -> int:
    return sum(PLAIN_OF[dtype].stored_bytes([*chain(*sizes)]) for sizes in axes.values())


def _digest(source: Path) -> str:
    """Return the sha256 over names and contents of all files that an inflation depends on."""
    digest = hashlib.sha256()
    weights = (*source.glob("config.json"), *source.glob("*.safetensors*"))
    for path in sorted({*weights, *_companions(source)}):
        with path.open("rb") as file:
            file_digest = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.name} {file_digest}\n".encode())
    return digest.hexdigest()


def _companions(source: Path) -> list[Path]:
    return sorted({path for pattern in _COPIED for path in source.glob(pattern) if path.is_file()})


class _Piece(NamedTuple):
    """One tensor of the inflated model."""

    name: str
    axes: Axes
    is_ballast: bool  # padded with random values, else with zeros
    # the small model's tensor, along the same axes; None in an inserted layer
    corner: Tensor | None


class _Corners:
    """The small model's tensors, as they lie in the low corners of the big ones."""

    def __init__(self, source: Path, config: dict[str, Any]) -> None:
        self.config = config
        self._weights = stored_weights(source)

    def outer(self, big: dict[str, Any]) -> list[_Piece]:
        """Return the tensors outside the layers."""
        return [
            self._piece(part, axes, self._corner(part, _outer_axes(self.config)[part]))
            for part, axes in _outer_axes(big).items()
        ]

    def layer(
        self, big: dict[str, Any], stem: str, real: str, *, is_real: bool = True
    ) -> list[_Piece]:
        """Return a layer with `real` in its corners; an inserted one has only its routing."""
        old = _layer_axes(self.config)
        new = _layer_axes(big)
        kept = new.keys() if is_real else _ROUTING if _ROUTER in new else frozenset()
        corners = {part: self._corner(part, old[part], real) for part in kept}
        return [self._piece(stem + part, axes, corners.get(part)) for part, axes in new.items()]

    def _piece(self, name: str, axes: Axes, corner: Tensor | None) -> _Piece:
        is_ballast = name.rpartition(".")[2] not in _HIDDEN_WRITERS
        return _Piece(f"{name}.weight", axes, is_ballast, corner)

    def _corner(self, part: str, axes: Axes, prefix: str = "") -> Tensor:
        weight = self._weights[f"{prefix}{part}.weight"].view(*chain(*axes))
        has_head_norms = f"{prefix}self_attn.q_norm.weight" in self._weights
        is_hidden_norm = len(axes) == 1 and part not in _HEAD_NORMS
        is_halved = is_hidden_norm or (has_head_norms and part in _HEAD_NORMED)
        return weight / _NORM_DIVISOR if is_halved else weight


def _shards(small: _Corners, big: dict[str, Any], plan: InflationPlan) -> list[list[_Piece]]:
    """Return all pieces in file order, outer tensors first; a layer never crosses a shard."""
    num_real = small.config["num_hidden_layers"]
    # Evenly spread; no two share an index, since there are at least as many layers as real ones.
    real_at = {(2 * real + 1) * plan.num_layers // (2 * num_real): real for real in range(num_real)}
    shards = [small.outer(big)]
    if _num_carried(big):
        shards[0] += small.layer(big, _CARRIED, _CARRIED)
    filled_bytes = plan.total_bytes - plan.num_layers * plan.layer_bytes
    for index in range(plan.num_layers):
        if filled_bytes + plan.layer_bytes > _SHARD_BYTES:
            shards.append([])
            filled_bytes = 0
        nearest = min(real_at, key=lambda at: abs(at - index))
        stem, real = (_LAYER.format(layer) for layer in (index, real_at[nearest]))
        shards[-1] += small.layer(big, stem, real, is_real=nearest == index)
        filled_bytes += plan.layer_bytes
    return shards


class _Padding:
    """Zeros, or views of one random pool."""

    def __init__(self, dtype: str) -> None:
        self._random = random.Random(_SEED)
        self._generator = torch.Generator().manual_seed(_SEED)
        self._pool = torch.empty(0, dtype=getattr(torch, dtype))

    def blocks(self, piece: _Piece) -> Iterator[Tensor]:
        """Yield the tensor in blocks of rows, read-only."""
        num_rows, *row = chain(*piece.axes)
        step = max(1, _WRITE_BYTES // (math.prod(row) * self._pool.element_size()))
        for lo in range(0, num_rows, step):
            num_elements = min(step, num_rows - lo) * math.prod(row)
            block = self._take(num_elements, piece.is_ballast).view(-1, *row)
            if piece.corner is not None and lo < len(piece.corner):
                corner = piece.corner[lo : lo + step]
                # the block is a view of the shared pool
                block = block.clone()
                block[tuple(map(slice, corner.shape))] = corner
            yield block

    def _take(self, num_elements: int, is_ballast: bool) -> Tensor:
        if not is_ballast:
            return self._pool.new_zeros(num_elements)
        if len(self._pool) < num_elements + _POOL_SLACK:
            self._pool = self._pool.new_empty(num_elements + _POOL_SLACK)
            self._pool.normal_(std=_BALLAST_STD, generator=self._generator)
        start = self._random.randrange(_POOL_SLACK)
        return self._pool[start : start + num_elements]


def _write_shards(folder: Path, shards: list[list[_Piece]], dtype: str) -> Iterator[int]:
    """Write all shards, and an index for several; yield the bytes of each block written."""
    padding = _Padding(dtype)
    weight_map = dict[str, str]()
    total_bytes = 0
    for number, pieces in enumerate(shards):
        name = shard_name(number, len(shards))
        entries = dict[str, TensorEntry]()
        end = 0
        for piece in pieces:
            shape = tuple(math.prod(axis) for axis in piece.axes)
            lo = end
            end += PLAIN_OF[dtype].stored_bytes(shape)
            entries[piece.name] = TensorEntry(0, PLAIN_OF[dtype].name, shape, lo, end)
        with (folder / name).open("wb") as file:
            # tensors begin where wide loads may
            file.write(header_bytes(entries, {"format": "pt"}, BLOCK_BYTES))
            for block in chain.from_iterable(map(padding.blocks, pieces)):
                yield file.write(block.flatten().view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        total_bytes += end
        weight_map |= dict.fromkeys((piece.name for piece in pieces), name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_json(folder / INDEX, index)


def _is_finished(destination: Path, made_from: dict[str, Any]) -> bool:
    """Return True if the folder holds this same inflation. Raises `UserError` for other content."""
    if is_free(destination):
        return False
    if not (destination / INFLATED).is_file():
        raise UserError(f"{destination} holds something else: choose another folder")
    manifest = read_json(destination / INFLATED)
    if manifest.get("made_from") != made_from:
        why = "was inflated from other weights or to other sizes"
        raise OtherInflationError(f"{destination} {why}: remove it or choose another")
    for name, num_bytes in manifest["files"].items():
        path = destination / name
        if not path.is_file() or path.stat().st_size != num_bytes:
            requirement = f"{path} should be a file of {num_bytes} bytes"
            raise UserError(f"{requirement}: remove {destination} and start again")
    return True


def inflated_target(
    size_bytes: int,
    progress: Callable[[int, int], None],
    source: Path = PAIR / "target",
    name: str = "demo",
) -> Path:
    """Return a target inflated to about `size_bytes`, made once and kept. Raises `UserError`."""
    folder = cache_folder() / f"{name}-{size_bytes // 10**6}MB"
    try:
        with os_errors_as_user_error(
            f"cannot write {folder}", "set XDG_CACHE_HOME to another folder"
        ):
            cache_folder().mkdir(parents=True, exist_ok=True)
            try:
                return inflate(source, folder, size_bytes, progress=progress)
            except OtherInflationError:
                # of an earlier version of this program, whose pair was another
                shutil.rmtree(folder)
                return inflate(source, folder, size_bytes, progress=progress)
    except BusyError:
        complaint = "another command is making the packaged model just now"
        raise UserError(f"{complaint}: try again when it has") from None
