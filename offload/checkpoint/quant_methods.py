"""Quantised checkpoints that are not read, told by their config, by name and with what would work instead.

What is read is decided by tensors (`coded.py`); here stands what must be refused before, because its tensors have the
names of a format that is read, or none that would tell anybody what is wrong. Invariant: a config that is read passes.
"""

from collections.abc import Mapping
from typing import Any

from offload.errors import UserError

_WORKS = "FP8, compressed-tensors, AWQ (gemm), GPTQ, MXFP4, NVFP4 or bitsandbytes"
_INSTEAD = f"take the same model in {_WORKS}, or in bf16"
_READ = {
    "fp8": "FP8", "compressed-tensors": "compressed-tensors", "awq": "AWQ", "gptq": "GPTQ", "auto-round": "AutoRound",
    "intel/auto-round": "AutoRound", "mxfp4": "MXFP4", "bitsandbytes": "bitsandbytes", "modelopt": "ModelOpt",
    "modelopt_fp4": "ModelOpt", "fbgemm_fp8": "FP8",
}  # fmt: skip
_COMPRESSED = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized"),
    *("mixed-precision", "dense"),
)
_BITS = {"awq": (4,), "gptq": (4, 8)}
_MODELOPT = ("NVFP4", "FP8", "MIXED_PRECISION")
_MLX = ("group_size", "bits")


def check_method(name: str, config: Mapping[str, Any]) -> None:
    """Nothing where a config names no quantisation, or one that is read.

    Args:
        name: of the folder, for the message.
        config: the model's, or its `text_config`.

    Raises:
        UserError: the method, its version or its number of bits is not read.
    """
    mlx = config.get("quantization")
    if isinstance(mlx, dict) and all(key in mlx for key in _MLX):
        raise UserError(f"{name}: weights quantised by MLX are not read: {_INSTEAD}")
    settings = config.get("quantization_config") or config.get("compression_config")
    if not settings:
        return
    if not isinstance(settings, dict):
        raise UserError(f"{name}: quantization_config must be an object, got {settings!r:.40}: mend config.json")
    problem = _problem(settings)
    if problem is not None:
        raise UserError(f"{name}: {problem}: {_INSTEAD}")


def _problem(settings: Mapping[str, Any]) -> str | None:
    method = _method(settings)
    if method is None:
        return f"quantised weights of method {settings.get('quant_method')!r:.40} are not read"
    kinds = {"awq": _awq, "gptq": _gptq, "auto-round": _auto_round, "compressed-tensors": _compressed,
             "modelopt": _modelopt}  # fmt: skip
    return kinds[method](settings) if method in kinds else None


def _method(settings: Mapping[str, Any]) -> str | None:
    """Which of those that are read, by one name each."""
    method = settings.get("quant_method")
    if method is None:  # early bitsandbytes and compressed-tensors name none
        is_bitsandbytes = settings.get("load_in_4bit") or settings.get("load_in_8bit")
        method = "bitsandbytes" if is_bitsandbytes else "compressed-tensors" if "config_groups" in settings else None
    if not isinstance(method, str) or method not in _READ:
        return None
    return {"intel/auto-round": "auto-round", "modelopt_fp4": "modelopt"}.get(method, method)


def _awq(settings: Mapping[str, Any]) -> str | None:
    version, backend = str(settings.get("version", "gemm")).lower(), settings.get("backend", "autoawq")
    if backend != "autoawq":
        return f"AWQ written by {backend!r:.40} is not read"
    if version != "gemm":
        return f"AWQ's version {version:.40} is not read, its version gemm is"
    return _bits("awq", settings.get("bits", settings.get("w_bit", 4)))


def _gptq(settings: Mapping[str, Any]) -> str | None:
    form = settings.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        return f"GPTQ's checkpoint_format {form!r:.40} is not read, gptq and gptq_v2 are"
    if settings.get("is_marlin_format"):
        return "GPTQ in marlin's layout is not read, its own layout is"
    return _bits("gptq", settings.get("bits", 4))


def _auto_round(settings: Mapping[str, Any]) -> str | None:
    form = str(settings.get("packing_format") or settings.get("backend") or "auto_round:auto_gptq")
    if "gptq" not in form and "awq" not in form and "llm_compressor" not in form:
        return f"AutoRound's packing_format {form:.40} is not read, auto_round:auto_gptq and auto_round:auto_awq are"
    return _bits("awq" if "awq" in form else "gptq", settings.get("bits", 4))


def _compressed(settings: Mapping[str, Any]) -> str | None:
    if settings.get("transform_config"):  # weights are stored rotated, and activations would have to be
        return "compressed-tensors with a transform_config (rotations) is not read"
    form = settings.get("format", "pack-quantized")
    if form in _COMPRESSED:
        return None
    return f"compressed-tensors' format {form!r:.40} is not read, {', '.join(_COMPRESSED[:5])} are"


def _modelopt(settings: Mapping[str, Any]) -> str | None:
    kind = settings.get("quant_algo", "NVFP4")
    return None if kind in _MODELOPT else f"ModelOpt's {kind!r:.40} is not read, {' and '.join(_MODELOPT[:2])} are"


def _bits(method: str, bits: Any) -> str | None:
    if bits in _BITS[method]:
        return None
    return f"{_READ[method]} of {bits!r:.20} bits is not read, of {' and '.join(map(str, _BITS[method]))} it is"
