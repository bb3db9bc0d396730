"""Tensors of a checkpoint as entries: where they lie, how they are coded, and what is refused.

`with_codings` tells by names, types and shapes which tensors are the words and companions of one
weight; the config only adds what these cannot say. `check_method` refuses quantised checkpoints
that are not read, by name and with what would work instead, because their tensors have the names of
a format that is read, or names that explain nothing. `check_counts` and `check_types` guard
transformers, which counts up to numbers of a config while it reads them, in lists of layers and
tables of labels: a config of 10^12 layers would fill memory before anything could be refused. A
config is checked before it reaches transformers.

Invariant: every weight has the one name that models know, and no tensor belongs to two weights; no
model that exists and is read is refused.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from offload.encoding import bitsandbytes, exponents, floats, integers
from offload.encoding.base import (
    AGAIN,
    ENCODINGS,
    STORED,
    Coding,
    Format,
    RecognisedWeight,
    Settings,
)
from offload.errors import UserError, ensure, require

# behind the name of a weight that is stored in several tensors, and before the number of one
ROWS = ".rows."
# what files call a mixture, as a pattern: Step calls it `moe`, and its router `moe.gate`
MIXTURE = r"\b(?:experts|moe(?=\.(?:gate|up|down)_proj\b))\."
MOST_EXPERTS = 65_536  # of a layer, of any model that is taken
# in the order in which they are asked to recognise a weight
FORMATS: tuple[Format, ...] = (
    *exponents.FORMATS,
    floats.FLOAT8,
    floats.NVFP4,
    integers.COMPRESSED_INTEGERS,
    integers.GPTQ,
    integers.AWQ,
    floats.MXFP4,
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
    # which it is of tensors of one shape whose rows alternate in the model, and how many these are
    turn: int = 0
    num_woven: int = 1


Entries = Mapping[str, TensorEntry]
_IN_LAYER = re.compile(r"^(?:.*?\.)?layers\.(\d{1,9})\.(.+)$")
_SUFFIXES = sorted({suffix for one in FORMATS for suffix in one.suffixes}, key=len, reverse=True)


def in_layers(tensors: Entries, num_layers: int) -> Iterator[tuple[int, str, TensorEntry]]:
    """Yield the tensors of a decoder's layers: the layer, the name within it, and the entry."""
    for name, entry in tensors.items():
        match = _IN_LAYER.match(name)
        if match is not None and int(match[1]) < num_layers:
            yield int(match[1]), match[2], entry


def of_text(config: Settings) -> Settings:
    """Return the part of a config that is of the decoder of text: all of it, where none is named."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def first_size(config: Settings, *names: str, most: float = (1 << 31) - 1) -> int:
    """Return the first of these that is a whole number above 0, up to `most`; 0 where none is."""
    given = (config.get(name) for name in names)
    return next((size for size in given if type(size) is int and 0 < size <= most), 0)


def with_codings(where: str, config: Settings, tensors: Entries) -> dict[str, TensorEntry]:
    """Return the tensors by the names of models; a coded weight becomes one entry.

    Raises:
        UserError: tensors of a weight contradict each other, or are of a version that is not known.
    """
    keys = ("quantization_config", "compression_config")
    given = (place.get(key) for place in (config, of_text(config)) for key in keys)
    settings = next((one for one in given if isinstance(one, dict)), {})
    known = dict[str, TensorEntry]()
    grouped = dict[str, dict[str, TensorEntry]]()
    for name, entry in tensors.items():
        suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)
        if suffix is None:
            known[name] = entry
        else:
            grouped.setdefault(name[: -len(suffix)], {})[suffix] = entry
    for stem, own in grouped.items():
        known |= _weights_of(where, stem, own, settings)
    return known


def _weights_of(where: str, stem: str, own: Entries, settings: Settings) -> dict[str, TensorEntry]:
    """Return one coded weight, or the tensors as they are."""
    if own.keys() == {".weight"} and own[".weight"].dtype in ENCODINGS:
        return {f"{stem}.weight": own[".weight"]}
    for one in FORMATS:
        claimed = {suffix: entry for suffix, entry in own.items() if suffix in one.suffixes}
        try:
            found = one.recognise(claimed, settings)
            if found is not None:
                others = own.keys() - claimed.keys()
                kept = {f"{stem}{suffix}": own[suffix] for suffix in own if suffix in others}
                return {**kept, f"{stem}{one.parameter}": _entry(found, claimed)}
        except ValueError as error:
            raise UserError(f"{where}: {stem}: {error}") from None
    return {f"{stem}{suffix}": entry for suffix, entry in own.items()}


def _entry(found: RecognisedWeight, own: Entries) -> TensorEntry:
    for suffix in (*found.words, *found.companions):
        dtype = own[suffix].dtype
        rule = f"{suffix} must be of a type that is known"
        ensure(dtype in STORED, f"{rule}, is {dtype:.40}: {AGAIN}")
    words = [own[suffix] for suffix in found.words]
    rule = f"{' and '.join(found.words)} must lie one behind the other in a file"
    places = [((one.shard, one.hi), (other.shard, other.lo)) for one, other in pairwise(words)]
    ensure(all(end == start for end, start in places), f"{rule}, they do not: pack it again")
    coded = Coded(found.coding, tuple((suffix, own[suffix]) for suffix in found.companions))
    return words[0]._replace(shape=found.shape, hi=words[-1].hi, coded=coded)


_WORKS = "FP8, compressed-tensors, AWQ (gemm), GPTQ, MXFP4, NVFP4 or bitsandbytes"
_INSTEAD = f"take the same model in {_WORKS}, or in bf16"
_READ = {
    "fp8": "FP8", "compressed-tensors": "compressed-tensors", "awq": "AWQ", "gptq": "GPTQ", "auto-round": "AutoRound",
    "intel/auto-round": "AutoRound", "mxfp4": "MXFP4", "bitsandbytes": "bitsandbytes", "modelopt": "ModelOpt",
    "modelopt_fp4": "ModelOpt", "fbgemm_fp8": "FP8",
}  # fmt: skip
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
               "mixed-precision", "dense")  # fmt: skip
_BITS = {"awq": (4,), "gptq": (4, 8)}
_MODELOPT = ("NVFP4", "FP8", "MIXED_PRECISION")
_MLX = ("group_size", "bits")


def check_method(name: str, config: Settings) -> None:
    """Raise `UserError` for a method of quantisation, or a version of it, that is not read.

    `name` is of the folder; `config` is the model's, or its `text_config`.
    """
    mlx = config.get("quantization")
    if isinstance(mlx, dict) and all(key in mlx for key in _MLX):
        raise UserError(f"{name}: weights quantised by MLX are not read: {_INSTEAD}")
    settings = config.get("quantization_config") or config.get("compression_config")
    if not settings:
        return
    if not isinstance(settings, dict):
        rule = f"{name}: quantization_config must be an object"
        raise UserError(f"{rule}, got {settings!r:.40}: mend config.json")
    kinds = {"awq": _awq, "gptq": _gptq, "auto-round": _auto_round, "compressed-tensors": _compressed,
             "modelopt": _modelopt}  # fmt: skip
    method = _method(settings)
    problem = kinds[method](settings) if method in kinds else None
    if method is None:
        problem = f"quantised weights of method {settings.get('quant_method')!r:.40} are not read"
    if problem is not None:
        raise UserError(f"{name}: {problem}: {_INSTEAD}")


def _method(settings: Settings) -> str | None:
    """Return the name of the method, one for all its synonyms; None if it is not read."""
    method = settings.get("quant_method")
    if method is None:  # early bitsandbytes and compressed-tensors name none
        is_bitsandbytes = settings.get("load_in_4bit") or settings.get("load_in_8bit")
        method = "compressed-tensors" if "config_groups" in settings else None
        method = "bitsandbytes" if is_bitsandbytes else method
    if not isinstance(method, str) or method not in _READ:
        return None
    return {"intel/auto-round": "auto-round", "modelopt_fp4": "modelopt"}.get(method, method)


def _awq(settings: Settings) -> str | None:
    version = str(settings.get("version", "gemm")).lower()
    backend = settings.get("backend", "autoawq")
    if backend != "autoawq":
        return f"AWQ written by {backend!r:.40} is not read"
    if version != "gemm":
        return f"AWQ's version {version:.40} is not read, its version gemm is"
    return _bits("awq", settings.get("bits", settings.get("w_bit", 4)))


def _gptq(settings: Settings) -> str | None:
    form = settings.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        return f"GPTQ's checkpoint_format {form!r:.40} is not read, gptq and gptq_v2 are"
    if settings.get("is_marlin_format"):
        return "GPTQ in marlin's layout is not read, its own layout is"
    return _bits("gptq", settings.get("bits", 4))


def _auto_round(settings: Settings) -> str | None:
    form = str(settings.get("packing_format") or settings.get("backend") or "auto_round:auto_gptq")
    if "gptq" not in form and "awq" not in form and "llm_compressor" not in form:
        read = "auto_round:auto_gptq and auto_round:auto_awq are"
        return f"AutoRound's packing_format {form:.40} is not read, {read}"
    return _bits("awq" if "awq" in form else "gptq", settings.get("bits", 4))


def _compressed(settings: Settings) -> str | None:
    # weights are stored rotated, and activations would have to be
    if settings.get("transform_config"):
        return "compressed-tensors with a transform_config (rotations) is not read"
    form = settings.get("format", "pack-quantized")
    if form in _COMPRESSED:
        return None
    return f"compressed-tensors' format {form!r:.40} is not read, {', '.join(_COMPRESSED[:5])} are"


def _modelopt(settings: Settings) -> str | None:
    kind = settings.get("quant_algo", "NVFP4")
    if kind in _MODELOPT:
        return None
    return f"ModelOpt's {kind!r:.40} is not read, {' and '.join(_MODELOPT[:2])} are"


def _bits(method: str, bits: Any) -> str | None:
    if bits in _BITS[method]:
        return None
    read = " and ".join(map(str, _BITS[method]))
    return f"{_READ[method]} of {bits!r:.20} bits is not read, of {read} it is"


# classifiers of 20,000 labels are common
_MOST_LAYERS = 10_000
_MOST_LABELS = 100_000
_LAYERS = re.compile(r"(?:(?<!per_)layers?|depth)$")  # `..._per_layer` is a size
_LABELS = ("id2label", "label2id")
_FLOAT = "__float__"
_FLOATS = ("Infinity", "-Infinity", "NaN")
# one of each layer, in a list or as letters
_LAYER_KINDS = ("layers_block_type", "hybrid_override_pattern")


def check_counts(where: str, config: Settings, file: str = "config.json") -> None:
    """Raise `UserError` for a count, in any part of a config, that no model has."""
    for part in objects(config):
        for key, value in part.items():
            size = len(value) if key in _LABELS and isinstance(value, dict) else value
            most = _most(str(key))  # tables that were built, and not read, have numbers for keys
            if most is not None and isinstance(size, int | float):
                rule = f"{where}: {key} in {file} must be at most {most}"
                require(size <= most, rule, size, "fix it")


def spelled_out(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with `{"__float__": "Infinity"}` as a number, and its count of layers."""
    left: list[Any] = [config]
    while left:
        part = left.pop()
        for key, value in list(part.items() if isinstance(part, dict) else enumerate(part)):
            if isinstance(value, dict) and value.keys() == {_FLOAT} and value[_FLOAT] in _FLOATS:
                part[key] = float(value[_FLOAT])
            elif isinstance(value, dict | list):
                left.append(value)
        if isinstance(part, dict) and "num_hidden_layers" not in part:
            kinds = next((part[name] for name in _LAYER_KINDS if part.get(name)), None)
            if isinstance(kinds, list | str):
                part["num_hidden_layers"] = len(kinds)
    return config


def _most(key: str) -> int | None:
    """Return the largest count under this key; None for keys that are no counts."""
    if key in _LABELS or key.endswith("labels"):
        return _MOST_LABELS
    return _MOST_LAYERS if _LAYERS.search(key) else None


def check_types(where: str, config: Settings, file: str = "config.json") -> None:
    """Raise `UserError` where a part of a config has a model type that is not text."""
    rule = f"{where}: model_type in {file} must be text"
    for kind in (part.get("model_type") for part in objects(config)):
        require(isinstance(kind, str | None), rule, kind, "fix it")


def objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield all objects of a JSON value."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
        own = part.values() if isinstance(part, dict) else part
        left += (one for one in own if isinstance(one, dict | list))
