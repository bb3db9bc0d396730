"""Derive a Hugging Face config from a GGUF file's metadata, for architectures that are fully known.

The file states sizes. Some settings it does not state, since llama.cpp has them in its code
(Gemma's pattern of sliding windows). Invariant: metadata of the model that is not known here is
refused, not ignored.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from offload.checkpoint.gguf_header import Metadata
from offload.checkpoint.small_files import check_counts
from offload.errors import UserError
from offload.families.gguf import (
    ARCHITECTURES,
    CONFIG_TYPES,
    MIXTURE_TYPES,
    WINDOWED_TYPES,
)

Config = dict[str, Any]
_SIZES = {"hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
          "num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count",
          "max_position_embeddings": "context_length"}  # fmt: skip
_COMPARED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "sliding_window")  # fmt: skip
_KNOWN = {*_SIZES.values(), "attention.head_count_kv", "attention.key_length", "attention.value_length",
          "attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.dimension_count", "rope.freq_base",
          "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "vocab_size",
          "rope.scaling.finetuned", "expert_count", "expert_used_count", "tensor_data_layout"}  # fmt: skip
# names that some families' configs have for other sizes
_STATED = {
    "vocab_size": ("vocab_size",),
    "rope.freq_base": ("rope_theta",),
    "attention.head_count_kv": ("num_key_value_heads", "num_global_key_value_heads"),
    "attention.key_length": ("head_dim", "global_head_dim"),
    "attention.value_length": ("head_dim", "global_head_dim"),
    "attention.sliding_window": ("sliding_window",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "feed_forward_length": ("intermediate_size", "moe_intermediate_size"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok", "top_k_experts"),
    "expert_shared_count": ("n_shared_experts",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "leading_dense_block_count": ("first_k_dense_replace",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
}  # fmt: skip
_OF_HEADS = ("attention.head_count_kv", "attention.key_length", "attention.value_length")
_FEW_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")
_GEMMA_LOCAL_THETA = 10000.0
_GEMMA_PATTERN = 6
_GEMMA_27B_LAYERS = 62
# the same in Llama 3.1 to 3.3, except for `factor`
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_SPECIAL_TOKENS = {"bos": "bos", "pad": "padding"}
GIVE_CONFIG = "give `config`, the folder or hub id of the original model"


def config_of(
    where: str, metadata: Metadata, names: Mapping[str, Sequence[int]], factors: Sequence[float]
) -> Config:
    """Return the config of a model from its GGUF metadata alone.

    `names` has the tensors' shapes, `factors` the divisors in `rope_freqs.weight`, empty if there
    are none. Raises `UserError` for a size that is missing, or a key that is not known.
    """
    said = _ArchMetadata(where, metadata)
    unknown = said.keys() - _KNOWN - (ARCHITECTURES[said.arch].keys or set())
    if unknown:
        complaint = f"{where}: its header says {said.arch}.{min(unknown)}, which is not known here"
        raise UserError(f"{complaint}: {GIVE_CONFIG}")
    stated = stated_config(where, metadata)
    missing = next((key for key, gguf_key in _SIZES.items() if key not in stated), None)
    if missing:
        raise UserError(f"{where}: its header has no {said.arch}.{_SIZES[missing]}: {GIVE_CONFIG}")
    width = stated["hidden_size"]
    num_heads = stated["num_attention_heads"]
    config = {
        "num_key_value_heads": num_heads,
        "head_dim": width // max(num_heads, 1),
        "rope_theta": 10000.0,
        **stated,
    }
    table = names.get("token_embd.weight", (0,))
    config |= {"vocab_size": table[0], "tie_word_embeddings": "output.weight" not in names}
    for name, gguf_name in _SPECIAL_TOKENS.items():
        config[f"{name}_token_id"] = metadata.get(f"tokenizer.ggml.{gguf_name}_token_id")
    # tokens that end a text, a turn, or a message within a turn
    kinds = ("eos", "eot", "eom")
    named = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in kinds)
    ends = list(dict.fromkeys(token for token in named if type(token) is int))
    config["eos_token_id"] = ends if len(ends) > 1 else next(iter(ends), None)
    if said.get("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        complaint = f"{where}: rotary positions of part of a head are not known here"
        raise UserError(f"{complaint}: {GIVE_CONFIG}")
    config["model_type"] = CONFIG_TYPES.get(said.arch, said.arch)
    config["rope_scaling"] = _rope_scaling(said, config, factors)
    if said.arch == "gemma3":
        return config | _gemma_config(said, config)
    if said.get("expert_count"):
        return config | _mixture_config(said)
    if said.arch in WINDOWED_TYPES and config.get("sliding_window"):
        return config | {"model_type": WINDOWED_TYPES[said.arch]}
    if said.arch == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in names
    return config


def _mixture_config(said: "_ArchMetadata") -> Config:
    """Return the settings of a mixture: Mixtral in `llama`, or Qwen3-MoE."""
    counts = {"num_experts_per_tok": said.size("expert_used_count")}
    if said.arch == "llama":
        counts["num_local_experts"] = said.size("expert_count")
    else:
        counts["num_experts"] = said.size("expert_count")
        counts["moe_intermediate_size"] = said.size("expert_feed_forward_length")
    missing = next((key for key, value in counts.items() if value is None), None)
    if missing or said.arch not in MIXTURE_TYPES:
        raise UserError(f"{said.where}: its header does not say {missing or 'all'}: {GIVE_CONFIG}")
    return {**counts, "model_type": MIXTURE_TYPES[said.arch], "norm_topk_prob": True}


def stated_config(where: str, metadata: Metadata) -> Config:
    """Return the sizes that a file states. Raises `UserError` for models that cannot be read."""
    said = _ArchMetadata(where, metadata)
    are_few = ARCHITECTURES[said.arch].states_few_sizes
    stated: Config = {key: said.size(_SIZES[key]) for key in (_FEW_SIZES if are_few else _SIZES)}
    stated["rms_norm_eps"] = said.real("attention.layer_norm_rms_epsilon")
    if are_few:
        return _without_extra_layers(said, stated)
    stated["num_key_value_heads"] = said.size("attention.head_count_kv")
    stated["head_dim"] = said.size("attention.key_length")
    stated["sliding_window"] = said.size("attention.sliding_window")
    stated["rope_theta"] = said.real("rope.freq_base")
    if said.get("attention.value_length", stated["head_dim"]) != stated["head_dim"]:
        complaint = f"{where}: keys and values of different widths are not known here"
        raise UserError(f"{complaint}: take it in safetensors")
    return _without_extra_layers(said, stated)


def _without_extra_layers(said: "_ArchMetadata", stated: Config) -> Config:
    """Return the stated sizes without the layers that guess further ahead."""
    num_extra = said.get("nextn_predict_layers", 0)
    num_layers = stated.get("num_hidden_layers")
    if num_layers and type(num_extra) is int and 0 < num_extra < num_layers:
        stated["num_hidden_layers"] = num_layers - num_extra
    known = {key: value for key, value in stated.items() if value is not None}
    check_counts(said.where, known, "its header")
    return known


def require_same(
    where: str, config: Mapping[str, Any], stated: Mapping[str, Any], source: str
) -> None:
    """Raise `UserError` if a config belongs to another model than the file."""
    rope = config.get("rope_parameters")
    known = {**(rope if isinstance(rope, dict) else {}), **config}
    for key in _COMPARED:
        number = stated.get(key)
        other = known.get(key)
        if number is None or other is None or type(other) not in (int, float):
            continue
        if not math.isclose(number, other, rel_tol=1e-6):
            raise UserError(
                f"{where}: {key} is {number} there and {other} in {source}: {GIVE_CONFIG}"
            )


def require_stated(where: str, config: Mapping[str, Any], metadata: Metadata, source: str) -> None:
    """Raise `UserError` if a number in the header contradicts the config.

    A list with a number for each layer is compared, too. What the config leaves out is not
    compared.
    """
    said = _ArchMetadata(where, metadata)
    rope = config.get("rope_parameters")
    rope = rope if isinstance(rope, dict) else {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    places = [config, rope, *nested]
    for key, names in _STATED.items():
        value = said.get(key)
        numbers = value if isinstance(value, list) else [value]
        allowed = [
            place[name]
            for name in names
            for place in places
            if type(place.get(name)) in (int, float)
        ]
        if said.arch == "deepseek2" and key in _OF_HEADS:
            allowed = _latent_sizes(config, key)
        elif key in _OF_HEADS and not allowed:
            # the values that configs mean where they leave a key out
            width: Any = config.get("hidden_size")
            heads: Any = config.get("num_attention_heads")
            is_known = type(width) is int and type(heads) is int and heads > 0
            allowed = [width // heads if key != _OF_HEADS[0] else heads] if is_known else []
        if key == "feed_forward_length":
            # some layers of Gemma 4 are twice as wide
            allowed += [2 * size for size in allowed if config.get("use_double_wide_mlp")]
        for number in numbers:
            is_number = type(number) in (int, float) and bool(allowed)
            if is_number and not any(
                math.isclose(number, value, rel_tol=1e-6) for value in allowed
            ):
                requirement = f"{said.arch}.{key} is {number} there and {allowed[0]} in {source}"
                raise UserError(f"{where}: {requirement}: {GIVE_CONFIG}")


def _latent_sizes(config: Mapping[str, Any], key: str) -> list[int]:
    """Return the head sizes that latent attention may have: expanded, or the latent's."""
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    sizes = [size for size in map(config.get, names) if type(size) is int]
    if len(sizes) < len(names):
        return []
    latent, rotary, plain, value = sizes
    if key == "attention.key_length":
        return [plain + rotary, latent + rotary]
    if key == "attention.value_length":
        return [value, latent]
    heads = [config.get("num_attention_heads"), config.get("num_key_value_heads"), 1]
    return [size for size in heads if type(size) is int]


def llama3_factors(scaling: Mapping[str, Any], theta: float, head_dim: int) -> Iterator[float]:
    """Yield Llama 3's frequency divisors, as llama.cpp writes into `rope_freqs.weight`."""
    factor, low, high = (
        float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    context = float(scaling["original_max_position_embeddings"])
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        if wavelength < context / high:
            yield 1.0
        elif wavelength > context / low:
            yield factor
        else:
            smooth = (context / wavelength - low) / (high - low)
            yield 1 / ((1 - smooth) / factor + smooth)


def require_factors(
    where: str, config: Mapping[str, Any], factors: Sequence[float], stated: Mapping[str, Any]
) -> None:
    """Raise `UserError` where the config's frequency divisors differ from the file's."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    try:
        head_dim = stated.get("head_dim") or stated["hidden_size"] // stated["num_attention_heads"]
        theta = scaling.get("rope_theta") or config["rope_theta"]
        is_same = _are_equal(llama3_factors(scaling, theta, head_dim), factors)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError):
        is_same = False
    if not is_same:
        complaint = "the config's rope scaling is not that of rope_freqs.weight in the file"
        raise UserError(f"{where}: {complaint}: {GIVE_CONFIG}")


class _ArchMetadata:
    """The metadata of the file's own architecture, read by short keys."""

    def __init__(self, where: str, metadata: Metadata) -> None:
        self.where = where
        self.arch = metadata["general.architecture"]
        self._metadata = metadata

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self.arch}.{key}", default)

    def keys(self) -> set[str]:
        prefix = f"{self.arch}."
        return {key.removeprefix(prefix) for key in self._metadata if key.startswith(prefix)}

    def size(self, key: str) -> int | None:
        value = self.get(key)
        value = value[0] if isinstance(value, list) and value and len(set(value)) == 1 else value
        if value is None or (type(value) is int and 0 < value < 1 << 32):
            return value
        requirement = f"{self.where}: {self.arch}.{key} must be one whole number above 0"
        raise UserError(f"{requirement}, got {value!r:.80}: take the model in safetensors")

    def real(self, key: str) -> float | None:
        value = self.get(key)
        if value is None or (type(value) in (int, float) and 0 < value < math.inf):
            return None if value is None else _shortest_decimal(value)
        requirement = f"{self.where}: {self.arch}.{key} must be a number above 0"
        raise UserError(f"{requirement}, got {value!r:.80}: {GIVE_CONFIG}")


def _shortest_decimal(value: float) -> float:
    """Return the shortest decimal of a float32: 1e-05 for 9.999999747378752e-06."""
    if value >= 3e38:
        return value
    for digits in range(1, 9):
        short = float(f"{value:.{digits}g}")
        if struct.unpack("<f", struct.pack("<f", short))[0] == value:
            return short
    return value


def _rope_scaling(said: _ArchMetadata, config: Config, factors: Sequence[float]) -> Config | None:
    """Return the rope scaling, None without any. Raises `UserError` for an unknown kind."""
    kind = said.get("rope.scaling.type", "none")
    factor = said.real("rope.scaling.factor")
    context = said.size("rope.scaling.original_context_length")
    if factors:
        scaling = {**_LLAMA3, "factor": float(max(factors))}
        computed = llama3_factors(scaling, config["rope_theta"], config["head_dim"])
        if kind == "none" and said.arch == "llama" and _are_equal(computed, factors):
            return scaling
    elif kind == "none" or (kind == "linear" and factor in (None, 1.0)):
        return None
    elif kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    elif kind == "yarn" and None not in (factor, context):
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}
    named = "rope_freqs.weight" if factors else f"{kind!r:.40}"
    complaint = f"{said.where}: its rope scaling ({named}) is not known from the file alone"
    raise UserError(f"{complaint}: {GIVE_CONFIG}")


def _are_equal(numbers: Iterable[float], other: Iterable[float]) -> bool:
    """Return True if numbers are equal in float32; stops at the first that is not."""
    pairs = zip_longest(numbers, other, fillvalue=math.nan)
    return all(math.isclose(a, b, rel_tol=1e-5) for a, b in pairs)


def _gemma_config(said: _ArchMetadata, config: Config) -> Config:
    """Return Gemma 3's own settings: five layers with a sliding window for each layer without one.

    The 27B model scales scores by hidden size over heads, the others by the head width.
    """
    num_layers = config["num_hidden_layers"]
    pattern = said.get("attention.sliding_window_pattern", _GEMMA_PATTERN)
    if type(pattern) is not int or pattern < 1 or "sliding_window" not in config:
        complaint = f"{said.where}: its pattern of windows is not known from the file alone"
        raise UserError(f"{complaint}: {GIVE_CONFIG}")
    is_whole = [(index + 1) % pattern == 0 for index in range(num_layers)]
    local = said.real("rope.freq_base_swa") or _GEMMA_LOCAL_THETA
    scale = config["hidden_size"] // config["num_attention_heads"]
    return {
        "layer_types": ["full_attention" if whole else "sliding_attention" for whole in is_whole],
        "rope_local_base_freq": local,
        "query_pre_attn_scalar": scale if num_layers == _GEMMA_27B_LAYERS else config["head_dim"],
        "final_logit_softcapping": said.real("final_logit_softcapping"),
        "attn_logit_softcapping": said.real("attn_logit_softcapping"),
    }
