"""Tensors of a checkpoint as entries: where they lie, and how they are coded.

`with_codings` tells by names, types and shapes which tensors are the words and companions of one
weight; the config only adds what these cannot say. Invariant: every weight has the one name that
models know, and no tensor belongs to two weights.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from offload.checkpoint.methods import quantisation
from offload.checkpoint.small_files import first_size, of_text
from offload.encoding import (
    bitsandbytes,
    compressed,
    exponents,
    floats,
    gptq,
    mlx,
    residuals,
    torchao,
)
from offload.encoding.base import (
    ANOTHER,
    ENCODINGS,
    STORED,
    Coding,
    Format,
    RecognisedWeight,
    Settings,
    Site,
)
from offload.errors import UserError, ensure

# behind the name of a weight that is stored in several tensors, and before the number of one
ROWS = ".rows."
# what files call a mixture, as a pattern: Step calls it `moe`, and its router `moe.gate`
MIXTURE = r"\b(?:experts|moe(?=\.(?:gate|up|down)_proj\b))\."
MOST_EXPERTS = 65_536  # of a layer, of any model that is taken
# in the order in which they are asked to recognise a weight
FORMATS: tuple[Format, ...] = (
    *exponents.FORMATS,
    residuals.RESIDUAL,
    floats.FLOAT8,
    floats.NVFP4,
    floats.MXFP4,
    compressed.COMPRESSED_INTEGERS,
    gptq.GPTQ,
    gptq.AWQ,
    floats.MXFP4_STACK,
    mlx.MLX,
    torchao.TORCHAO,
    bitsandbytes.BITSANDBYTES_4,
    bitsandbytes.BITSANDBYTES_8,
)


class TensorEntry(NamedTuple):
    """A tensor on disk; for a coded weight, its words with the weight's shape."""

    shard: int  # index into Checkpoint.shards
    dtype: str  # name used by the format: BF16, F16, F32; of a coded weight that of its words
    shape: tuple[int, ...]
    lo: int  # absolute byte offsets in the shard: [lo, hi)
    hi: int
    coded: "Coded | None" = None  # None: its numbers are stored as they are

    @property
    def num_bytes(self) -> int:
        return self.hi - self.lo

    @property
    def companions(self) -> "tuple[tuple[str, TensorEntry], ...]":
        """Return the companions by their suffixes; there are none for plain numbers."""
        return self.coded.companions if self.coded else ()


class Coded(NamedTuple):
    """How words are expanded, and the companions that this takes."""

    coding: Coding
    companions: tuple[tuple[str, TensorEntry], ...] = ()  # by their suffixes
    # rows of `num_woven` tensors alternate in one parameter, and this is number `turn` of them
    turn: int = 0
    num_woven: int = 1


Entries = Mapping[str, TensorEntry]
_IN_LAYER = re.compile(r"^((?:.*?\.)?(?:layers|(?:de|en)coder\.block))\.(\d{1,9})\.(.+)$")
_SUFFIXES = sorted({suffix for kind in FORMATS for suffix in kind.suffixes}, key=len, reverse=True)


class LayerName(NamedTuple):
    """The name of a tensor of a layer, taken apart at the layer's number."""

    stack: str  # such as `model.layers`; T5 has `decoder.block` and `encoder.block`
    layer: int
    inner: str  # within the layer, such as `self_attn.q_proj.weight`

    def at(self, layer: int) -> str:
        """Return the name of such a tensor in another layer."""
        return f"{self.stack}.{layer}.{self.inner}"


def layer_name(name: str) -> LayerName | None:
    """Return the parts of a layer tensor's name; None for other tensors, such as embeddings."""
    match = _IN_LAYER.match(name)
    return None if match is None else LayerName(match[1], int(match[2]), match[3])


def with_codings(where: str, config: Settings, tensors: Entries) -> dict[str, TensorEntry]:
    """Return the tensors by the names of models; a coded weight becomes one entry.

    Raises:
        UserError: tensors of a weight contradict each other, or are of a version that is not known.
    """
    given = quantisation(config)
    settings = given if isinstance(given, dict) else {}
    known = dict[str, TensorEntry]()
    grouped = dict[str, dict[str, TensorEntry]]()
    for name, entry in tensors.items():
        suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)
        if suffix is None:
            known[name] = entry
        else:
            grouped.setdefault(name[: -len(suffix)], {})[suffix] = entry
    rows_of = {
        stem: parts[suffix].shape[-2]
        for stem, parts in grouped.items()
        for suffix in (".weight", ".weight_packed")
        if suffix in parts and len(parts[suffix].shape) > 1
    }
    for stem, parts in grouped.items():
        site = Site(stem, columns_at(config, stem, rows_of))
        known |= _weights_of(where, site, parts, settings)
    return known


def _weights_of(
    where: str, site: Site, parts: Entries, settings: Settings
) -> dict[str, TensorEntry]:
    """Return one coded weight, or the tensors as they are."""
    stem = site.name
    if parts.keys() == {".weight"} and parts[".weight"].dtype in ENCODINGS:
        return {f"{stem}.weight": parts[".weight"]}
    for kind in FORMATS:
        claimed = {suffix: entry for suffix, entry in parts.items() if suffix in kind.suffixes}
        try:
            recognised = kind.recognise(claimed, settings, site)
            if recognised is not None:
                others = parts.keys() - claimed.keys()
                kept = {f"{stem}{suffix}": parts[suffix] for suffix in parts if suffix in others}
                return {**kept, f"{stem}{kind.parameter}": _entry(recognised, claimed)}
        except ValueError as error:
            raise UserError(f"{where}: {stem}: {error}") from None
    return {f"{stem}{suffix}": entry for suffix, entry in parts.items()}


def _entry(recognised: RecognisedWeight, parts: Entries) -> TensorEntry:
    """Return a coded weight's entry. Raises `ValueError` for unknown types or scattered words."""
    for suffix in (*recognised.words, *recognised.companions):
        dtype = parts[suffix].dtype
        requirement = f"{suffix} must be of a type that is known"
        ensure(dtype in STORED, f"{requirement}, is {dtype:.40}: {ANOTHER}")
    words = [parts[suffix] for suffix in recognised.words]
    requirement = f"{' and '.join(recognised.words)} must lie one behind the other in a file"
    places = [((word.shard, word.hi), (other.shard, other.lo)) for word, other in pairwise(words)]
    ensure(all(end == start for end, start in places), f"{requirement}, they do not: pack it again")
    coded = Coded(
        recognised.coding, tuple((suffix, parts[suffix]) for suffix in recognised.companions)
    )
    dtype = recognised.dtype or words[0].dtype
    return words[0]._replace(dtype=dtype, shape=recognised.shape, hi=words[-1].hi, coded=coded)


# weights that take a layer's input, or are embedding tables
_NAMES = """
q_proj k_proj v_proj qkv_proj gate_proj up_proj gate_up_proj w1 w3 fc1 gate embed_tokens lm_head
q_a_proj kv_a_proj_with_mqa in_proj_qkv in_proj_qkvz in_proj_ba in_proj_z in_proj_a in_proj_b
"""
_OF_HIDDEN = frozenset(_NAMES.split())
# weights that take the output of the weights named with them
_AFTER = {"down_proj": ("gate_proj", "up_proj"), "w2": ("w1", "w3"), "fc2": ("fc1",)}


def columns_at(config: Settings, stem: str, rows_of: Mapping[str, int]) -> int:
    """Return the columns of the weight `stem`; 0 where config and names do not tell.

    Packed words alone do not. A wrong number, as in a family with other names, does no harm:
    loading compares every weight with the model. `rows_of` has the rows of each matrix by its name.
    """
    text = of_text(config)
    hidden = first_size(text, "hidden_size", "d_model")
    parent, _, name = stem.rpartition(".")
    if name in _OF_HIDDEN:
        return hidden
    if name == "o_proj":
        heads = first_size(text, "num_attention_heads")
        width = first_size(text, "v_head_dim", "head_dim")
        return heads * width if width else hidden
    beside = (rows_of.get(f"{parent}.{other}", 0) for other in _AFTER.get(name, ()))
    return next(filter(None, beside), 0)
