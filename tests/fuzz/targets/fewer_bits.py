"""Checkpoints in each format of fewer bits: what config.json says of the format, the tensors' headers, their data."""

import shutil
from functools import partial
from pathlib import Path

from case import Target
from damage import BYTES, JSON, data, header, only
from model_files import generate, save_files
from quantised import save_quantised

_FORMATS = ("fp8-block", "fp8-channel", "ct-w4-zeros", "ct-w4-order", "ct-int8", "awq", "gptq-order", "nf4-nested",
    "nvfp4", "mxfp4", "fp8-inverse", "gptq-3", "ct-w3", "mx-fp8", "mlx-3", "mlx-mxfp4", "torchao")  # fmt: skip
_QC = "quantization_config"
_KEYS = tuple(f"{_QC}.{key}" for key in ("quant_method", "fmt", "activation_scheme", "weight_block_size", "format",
    "config_groups", "ignore", "bits", "group_size", "zero_point", "version", "desc_act", "sym", "checkpoint_format",
    "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "modules_to_not_convert",
    "kv_cache_scheme", "quantization_status", "bnb_4bit_compute_dtype", "modules_in_block_to_quantize",
    "weight_scale_semantics", "mode"))  # fmt: skip


def _save(folder: Path, *, format: str) -> None:
    plain = save_files(folder / "plain", family="gpt_oss" if format == "mxfp4" else "llama")
    save_quantised(plain, format, folder / "model", max_shard_size="1GB")
    shutil.rmtree(plain)


_FILES = {"model/config.json": (only(_QC, *_KEYS), only(*_KEYS), *JSON), "model/*.safetensors": (header, header, data,
    *BYTES)}  # fmt: skip
TARGETS = [
    Target(f"fewer_bits/{format}", partial(_save, format=format), _FILES, lambda folder: generate(folder / "model"))
    for format in _FORMATS
]
