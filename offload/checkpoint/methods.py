"""Quantisation methods, told by a config and by the names of tensors.

Checkpoints that cannot be read are refused by their method: their tensors may have the names of a
format that can be read, or names that explain nothing. Invariant: what decides between two readings
of the same tensors is looked up under every key that tools use for it, and an unknown value is
refused.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from offload.checkpoint.small_files import of_text
from offload.encoding.base import Settings
from offload.encoding.gptq import VERSION_KEYS, gptq_version
from offload.errors import UserError

_WORKS = "FP8, compressed-tensors, AWQ (gemm), GPTQ, MLX, torchao, MXFP4, NVFP4 or bitsandbytes"
INSTEAD = f"take the same model in {_WORKS}, or in bf16"
_READ = {
    "fp8": "FP8", "compressed-tensors": "compressed-tensors", "awq": "AWQ", "gptq": "GPTQ", "auto-round": "AutoRound",
    "intel/auto-round": "AutoRound", "mxfp4": "MXFP4", "bitsandbytes": "bitsandbytes", "modelopt": "ModelOpt",
    "modelopt_fp4": "ModelOpt", "fbgemm_fp8": "FP8", "mlx": "MLX", "torchao": "torchao",
}  # fmt: skip
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
               "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense")  # fmt: skip
_BITS = {"awq": (4,), "gptq": (2, 3, 4, 8)}
_MODELOPT = ("NVFP4", "FP8", "MIXED_PRECISION")
_MLX = ("group_size", "bits")
_MLX_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
# endings of tensor names in formats that cannot be read
_UNREAD = {
    ".weight._data": "optimum-quanto",
    ".weight._data._data": "optimum-quanto",
    ".W_q": "HQQ",
    ".q_weight": "EXL2",
    ".trellis": "EXL3",
}


def quantisation(config: Settings) -> Any:
    """Return a config's settings of quantisation, or its text part's, or None."""
    keys = ("quantization_config", "compression_config", "quantization")
    given = (place.get(key) for place in (config, of_text(config)) for key in keys)
    return next(filter(None, given), None)


def check_method(name: str, config: Settings) -> None:
    """Raise `UserError` for a quantisation method, or a version of one, that cannot be read."""
    settings = quantisation(config)
    if settings is None:
        return
    if not isinstance(settings, dict):
        requirement = f"{name}: quantization_config must be an object"
        raise UserError(f"{requirement}, got {settings!r:.40}: mend config.json")
    kinds = {"awq": _awq, "gptq": _gptq, "auto-round": _auto_round, "compressed-tensors": _compressed,
             "modelopt": _modelopt, "fp8": _fp8, "mlx": _mlx}  # fmt: skip
    method = method_of(settings)
    problem = kinds[method](settings) if method in kinds else None
    if method is None:
        problem = f"quantised weights of method {settings.get('quant_method')!r:.40} are not read"
    if problem is not None:
        raise UserError(f"{name}: {problem}: {INSTEAD}")


def check_names(name: str, tensors: Iterable[str]) -> None:
    """Raise `UserError` for tensors of a format that cannot be read, whatever the config says."""
    endings = tuple(_UNREAD)
    stranger = next((tensor for tensor in tensors if tensor.endswith(endings)), None)
    if stranger is not None:
        method = next(_UNREAD[ending] for ending in endings if stranger.endswith(ending))
        raise UserError(f"{name}: weights of {method} ({stranger}) are not read: {INSTEAD}")


def unexplained(name: str, config: Settings) -> UserError:
    """Return the error for a config with quantisation settings where no weight is quantised."""
    settings = quantisation(config)
    method = method_of(settings) if isinstance(settings, dict) else None
    requirement = f"{name}: weights must be stored as {_READ.get(str(method), 'config.json')} says"
    plain = "or remove quantization_config from config.json if its weights are plain numbers"
    return UserError(f"{requirement}, no tensor is: {INSTEAD}, {plain}")


def method_of(settings: Settings) -> str | None:
    """Return the one name of the method among its synonyms; None if it cannot be read."""
    method = settings.get("quant_method")
    if method is None:  # early bitsandbytes and compressed-tensors name no method, nor does MLX
        is_bitsandbytes = settings.get("load_in_4bit") or settings.get("load_in_8bit")
        method = "compressed-tensors" if "config_groups" in settings else None
        method = "mlx" if all(key in settings for key in _MLX) else method
        method = "bitsandbytes" if is_bitsandbytes else method
    if not isinstance(method, str) or method not in _READ:
        return None
    return {"intel/auto-round": "auto-round", "modelopt_fp4": "modelopt"}.get(method, method)


def _fp8(settings: Settings) -> str | None:
    meaning = settings.get("weight_scale_semantics")
    if meaning in (None, "inverse"):
        return None
    return f"FP8 whose weight_scale_semantics is {meaning!r:.40} is not read, inverse is"


def _mlx(settings: Settings) -> str | None:
    given = (settings, *(each for each in settings.values() if isinstance(each, Mapping)))
    for mode in (each.get("mode", "affine") for each in given):
        if mode not in _MLX_MODES:
            return f"MLX's mode {mode!r:.40} is not read, {', '.join(_MLX_MODES)} are"
    return None


def _awq(settings: Settings) -> str | None:
    version = str(settings.get("version", "gemm")).lower()
    backend = settings.get("backend", "autoawq")
    if backend != "autoawq":
        return f"AWQ written by {backend!r:.40} is not read"
    if version != "gemm":
        return f"AWQ's version {version:.40} is not read, its version gemm is"
    return _bits("awq", settings.get("bits", settings.get("w_bit", 4)))


def _gptq(settings: Settings) -> str | None:
    try:
        gptq_version(settings)
    except ValueError:
        given = " and ".join(
            f"{key} {settings[key]!r:.40}" for key in VERSION_KEYS if settings.get(key)
        )
        return f"GPTQ's {given} is not read, gptq and gptq_v2 are"
    if settings.get("is_marlin_format"):
        return "GPTQ in marlin's layout is not read, its own layout is"
    return _bits("gptq", settings.get("bits", 4))


def _auto_round(settings: Settings) -> str | None:
    form = str(settings.get("packing_format") or settings.get("backend") or "auto_round:auto_gptq")
    if "fp8" in form or "llm_compressor" in form:
        return None
    if "gptq" not in form and "awq" not in form:
        read = "auto_round:auto_gptq, auto_round:auto_awq, auto_round:llm_compressor and fp8 are"
        return f"AutoRound's packing_format {form:.40} is not read, {read}"
    return _bits("awq" if "awq" in form else "gptq", settings.get("bits", 4))


def _compressed(settings: Settings) -> str | None:
    # weights are stored rotated, and activations would have to be
    if settings.get("transform_config"):
        return "compressed-tensors with a transform_config (rotations) is not read"
    form = settings.get("format", "pack-quantized")
    if form in _COMPRESSED:
        return None
    return f"compressed-tensors' format {form!r:.40} is not read, {', '.join(_COMPRESSED[:7])} are"


def _modelopt(settings: Settings) -> str | None:
    kind = settings.get("quant_algo", "NVFP4")
    if kind in _MODELOPT:
        return None
    return f"ModelOpt's {kind!r:.40} is not read, {' and '.join(_MODELOPT[:2])} are"


def _bits(method: str, bits: Any) -> str | None:
    if bits in _BITS[method]:
        return None
    *others, last = map(str, _BITS[method])
    read = f"{', '.join(others)} and {last}" if others else last
    return f"{_READ[method]} of {bits!r:.20} bits is not read, of {read} it is"
