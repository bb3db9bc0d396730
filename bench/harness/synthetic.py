"""A synthetic checkpoint: the packaged pair in the shape of a large model, made in memory.

The files have headers and holes; reads through `Maker` get the weights. The large model computes
what the small one does, so acceptance is real and every token can be proved: the small weights lie
in a corner of the large matrices, everything else is random and meets zeros. Three things differ
from padding by a power of four: a head of 128 contains one of 32 because every fourth of its rotary
frequencies is one of the small head's; sqrt(8192 / 192) is no power of two, so norm weights round,
and `origin` writes the small model with the rounded ones, the reference of the proof; and one
hidden coordinate is the same for all tokens, too small to be seen by any norm (1e-6), until the
final norm enlarges it and the head makes of it a logit of -1000 or less for the ids that only the
large vocabulary has.
"""

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from offload.checkpoint.imagined import layer_shapes
from offload.checkpoint.layout import SlabLayout
from offload.checkpoint.open import open_checkpoint
from offload.checkpoint.packaged import stored_weights
from offload.checkpoint.safetensors import header_bytes
from offload.checkpoint.tensors import TensorEntry
from offload.streaming.disk import DiskReader

NUM_MAKERS = 16  # threads that copy, each without torch
NOTE = "synthetic.json"
_POOL_ITEMS = 16 << 20  # random numbers that ballast is copied from
# of the hidden coordinate that the head turns into a logit of -1000 or less
_CONSTANT = 2.0**-10
_ENLARGED = 2.0**24
_LAYER = "model.layers.{}."


class Shape(NamedTuple):
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int  # the small model's 32, or 4 or 16 times that
    ffn: int
    vocabulary: int
    num_layers: int

    @property
    def config(self) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocabulary,
            "num_hidden_layers": self.num_layers,
            "tie_word_embeddings": False,
        }

    @property
    def layer_bytes(self) -> int:
        return 2 * sum(map(math.prod, layer_shapes(self.config).values()))

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocabulary, self.hidden)
        for index in range(self.num_layers):
            for name, shape in layer_shapes(self.config).items():
                yield _LAYER.format(index) + name, shape


LLAMA_2_70B = Shape(8192, 64, 8, 128, 28672, 32000, 80)
LLAMA_2_7B = Shape(4096, 32, 32, 128, 11008, 32000, 32)
TINY = Shape(768, 16, 4, 128, 768, 5000, 8)
TINY_DRAFT = Shape(256, 4, 4, 128, 384, 5000, 3)


def sketch(source: Path, folder: Path, shape: Shape) -> Path:
    """Write some kilobytes that read as a checkpoint of that shape through `Maker`."""
    config = json.loads((source / "config.json").read_text())
    config["rms_norm_eps"] *= config["hidden_size"] / shape.hidden
    config |= shape.config
    folder.mkdir(parents=True)
    for path in source.glob("*token*.json"):
        shutil.copyfile(path, folder / path.name)
    entries = dict[str, TensorEntry]()
    end = 0
    for name, sizes in shape.tensors():
        lo = end
        end += 2 * math.prod(sizes)
        entries[name] = TensorEntry(0, "BF16", sizes, lo, end)
    # tensors begin 8 bytes off wide loads, as in half of all real files
    either = (header_bytes(entries, {"format": "pt", "pad": pad}, 8) for pad in ("", " " * 8))
    header = next(header for header in either if len(header) % 16)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + end)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / NOTE).write_text(json.dumps({"source": str(source), "shape": shape._asdict()}))
    return folder


def origin(source: Path, folder: Path, shape: Shape) -> Path:
    """Write the small model in float32 with the norms that the large one rounds to; return it."""
    small = stored_weights(source)
    config = json.loads((source / "config.json").read_text())
    factor = math.sqrt(shape.hidden / config["hidden_size"])
    for name, weight in small.items():
        small[name] = weight.float()
        if weight.ndim == 1:
            small[name] = (small[name] / factor).bfloat16().float() * factor
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(small, folder / "model.safetensors", {"format": "pt"})
    return folder


def open_source(shards: Sequence[Path], **options: Any) -> DiskReader:
    """Return the byte source of any checkpoint; sketched ones are made, others are read."""
    return Maker(shards) if (shards[0].parent / NOTE).is_file() else DiskReader(shards, **options)


class Maker(DiskReader):
    """Gives the weights of a sketch where its files have holes."""

    def __init__(self, shards: Sequence[Path], **_: object) -> None:
        super().__init__(shards)
        note = json.loads((shards[0].parent / NOTE).read_text())
        self._weights = _Weights(Path(note["source"]), Shape(**note["shape"]))
        tensors = open_checkpoint(shards[0].parent).tensors
        self._entries = sorted(tensors.items(), key=lambda item: item[1].lo)
        self._makers = ThreadPoolExecutor(NUM_MAKERS, thread_name_prefix="bench-make")

    def read(self, layout: SlabLayout, slab: np.ndarray) -> list[Future[None]]:
        made = []
        for piece in layout.pieces:
            for name, entry in self._entries:
                if piece.lo <= entry.lo and entry.hi <= piece.hi:
                    at = piece.slab_lo + entry.lo - piece.lo
                    place = slab[at : at + entry.hi - entry.lo]
                    fill = self._weights.fill
                    made.append(self._makers.submit(fill, name.removesuffix(".weight"), place))
        return made

    def close(self) -> None:
        self._makers.shutdown(wait=True, cancel_futures=True)
        super().close()


@cache
def _pool() -> np.ndarray:
    ballast = np.random.default_rng(0).standard_normal(_POOL_ITEMS, dtype=np.float32)
    return ((ballast * np.float32(0.02)).view(np.uint32) >> 16).astype(np.uint16)


class _Weights:
    """Writes whole tensors, as bits of bf16: ballast or zeros, then the small weights over them."""

    def __init__(self, source: Path, shape: Shape) -> None:
        small = json.loads((source / "config.json").read_text())
        self._weights = stored_weights(source)
        self._shape = shape
        self._sizes = dict(shape.tensors())
        self._h = small["hidden_size"]
        self._factor = math.sqrt(shape.hidden / self._h)
        self._k = small["head_dim"]
        self._groups = small["num_key_value_heads"]
        self._num_heads = small["num_attention_heads"]
        num_real = small["num_hidden_layers"]
        self._real = {
            (2 * real + 1) * shape.num_layers // (2 * num_real): real for real in range(num_real)
        }
        is_within = shape.num_layers >= num_real and self._h < shape.hidden
        assert is_within, "the small model must fit in"
        ratio = math.isqrt(shape.head_dim // self._k)
        assert ratio**2 * self._k == shape.head_dim, "q is scaled by a power of two"
        self._pool = _pool()

    def fill(self, name: str, slab: np.ndarray) -> None:
        is_even = slab.ctypes.data % 2 == 0
        weight = slab.view(np.uint16) if is_even else np.empty(len(slab) // 2, np.uint16)
        part = name
        small_name: str | None = f"{name}.weight"
        if name.startswith("model.layers."):
            _, _, layer, part = name.split(".", 3)
            real = self._real.get(int(layer))
            # none in a layer that was added
            small_name = None if real is None else f"{_LAYER.format(real)}{part}.weight"
        if part in ("self_attn.o_proj", "mlp.down_proj", "lm_head"):
            weight.fill(0)
        else:
            for lo in range(0, len(weight), _POOL_ITEMS):
                weight[lo : lo + _POOL_ITEMS] = self._pool[: len(weight) - lo]
        self._place(part, small_name, weight.reshape(self._sizes[f"{name}.weight"]))
        if not np.shares_memory(weight, slab):
            slab[:] = weight.view(np.uint8)

    def _place(self, part: str, small_name: str | None, weight: np.ndarray) -> None:
        # the hidden coordinate behind the small ones
        h = self._h
        constant = self._h
        if part in ("model.embed_tokens", "lm_head"):
            small = self._weights["model.embed_tokens.weight"]
            weight[: len(small), : h + 1] = 0
            weight[: len(small), :h] = _bits(small)
            weight[:, constant] = _bits(torch.tensor(_CONSTANT))
            if part == "lm_head":
                weight[:, constant] = 0
                weight[len(small) :, constant] = _bits(torch.tensor(-1.0))
            else:
                weight[:, h + 1 :] = 0
        elif weight.ndim == 1:
            weight[:] = _bits(torch.tensor(1.0))
            if small_name is not None:
                weight[:h] = _bits(self._weights[small_name].float() / self._factor)
            weight[constant] = _bits(torch.tensor(_ENLARGED if part == "model.norm" else 0.0))
        elif small_name is not None and part.startswith("mlp."):
            small = self._weights[small_name]
            weight[: small.shape[0], : small.shape[1]] = _bits(small)
        elif small_name is not None:
            self._place_heads(part, self._weights[small_name], weight)

    def _place_heads(self, part: str, small: torch.Tensor, weight: np.ndarray) -> None:
        """Write the small model's heads of one projection into the large one.

        h and k are the small model's hidden size and head width, K is the large head width.
        """
        h = self._h
        k = self._k
        K = self._shape.head_dim
        ratio = K // k
        per_group = self._shape.heads // self._shape.kv_heads
        # numbers of a large head with the rotary frequencies of a small one
        turned = np.concatenate([np.arange(k // 2) * ratio, K // 2 + np.arange(k // 2) * ratio])
        per_small_group = self._num_heads // self._groups
        # if large groups are narrower, each small head gets a group of its own: keys come twice
        is_wide = per_group >= per_small_group
        for index in range(self._num_heads):
            group, nth = divmod(index, per_small_group)
            kv = group if is_wide else index
            head = kv * per_group + (nth if is_wide else 0)
            rows = slice(index * k, (index + 1) * k)
            shared = slice(group * k, (group + 1) * k)
            if part == "self_attn.q_proj":
                # scores are divided by the root of the head width
                weight[head * K + turned, :h] = _bits(small[rows].float() * math.isqrt(ratio))
            elif part == "self_attn.k_proj":
                weight[kv * K : (kv + 1) * K] = 0
                weight[kv * K + turned, :h] = _bits(small[shared])
            elif part == "self_attn.v_proj":
                weight[kv * K : kv * K + k, :h] = _bits(small[shared])
            else:
                weight[:h, head * K : head * K + k] = _bits(small[:, rows])


def _bits(values: torch.Tensor) -> np.ndarray:
    return values.bfloat16().view(torch.int16).numpy().view(np.uint16)
