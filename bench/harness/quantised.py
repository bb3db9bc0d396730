"""A checkpoint in a format of fewer bytes, written by the plainest rule: round to nearest.

It measures speed; that its numbers are what libraries make of them is up to the tests.

Invariant: the folder has its name only when it is whole.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from offload.checkpoint.safetensors import open_checkpoint
from offload.engine.session import write_tensors
from offload.errors import require
from offload.packing.pack import pack

_GROUP = 128
_BLOCK = 128
_FP8_MAX = 448.0
PACKED = "packed"  # without loss
_PLAIN = ("embed_tokens", "lm_head", "norm")


def int4(weight_NK: Tensor) -> dict[str, Tensor]:
    """Return words as compressed-tensors packs them, in groups of 128 along K, symmetric."""
    groups_NGg = weight_NK.float().unflatten(1, (-1, _GROUP))
    scale_NG = (groups_NGg.abs().amax(-1) / 7.5).clamp(min=1e-8).bfloat16()
    code_NK = (groups_NGg / scale_NG.float()[..., None]).round().clamp(-8, 7).flatten(1).int() + 8
    shift_8 = torch.arange(0, 32, 4, dtype=torch.int32)
    words = (code_NK.unflatten(1, (-1, 8)) << shift_8).sum(-1, dtype=torch.int32)
    shape = torch.tensor(weight_NK.shape)
    return {"weight_packed": words, "weight_scale": scale_NG, "weight_shape": shape}


def fp8(weight_NK: Tensor) -> dict[str, Tensor]:
    """Return words as DeepSeek stores them, in blocks of 128 x 128.

    Sizes are multiples of these or smaller.
    """
    rows = weight_NK.float().unflatten(0, (-1, min(_BLOCK, len(weight_NK))))
    blocks = rows.unflatten(2, (-1, _BLOCK))
    scale = (blocks.abs().amax((1, 3)) / _FP8_MAX).clamp(min=1e-12)
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return {"weight": codes.flatten(2).flatten(0, 1), "weight_scale_inv": scale}


_INT4_WEIGHTS = {
    **{"num_bits": 4, "type": "int", "strategy": "group"},
    **{"group_size": _GROUP, "symmetric": True},
}
_INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4_WEIGHTS}},
}
_FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "weight_block_size": [_BLOCK, _BLOCK],
    "activation_scheme": "dynamic",
}
FORMATS = {"int4": (int4, _INT4), "fp8": (fp8, _FP8)}


def quantised(source: Path, name: str) -> Path:
    """Return the checkpoint of `source` in one of `FORMATS`, or packed; made once, then reused.

    Raises `UserError` for layers that do not come in whole groups and blocks.
    """
    folder = source.with_name(f"{source.name}-{name}")
    if folder.is_dir():
        return folder
    if name == PACKED:
        pack(source, folder, progress=lambda done, total: None)
        return folder
    checkpoint = open_checkpoint(source)
    for tensor, entry in checkpoint.tensors.items():
        if len(entry.shape) == 2 and not any(part in tensor for part in _PLAIN):
            num_rows, width = entry.shape
            is_whole = width % _GROUP == 0 and num_rows % min(_BLOCK, num_rows) == 0
            rule = f"{source.name}: widths of layers must be multiples of {_GROUP} in these formats"
            got = f"{num_rows} x {width} in {tensor}"
            require(is_whole, rule, got, "give a larger --size")
    quantise, settings = FORMATS[name]
    scratch = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(source, scratch, ignore=shutil.ignore_patterns("*safetensors*"))
    held = dict[str, Tensor]()
    for shard in checkpoint.shards:
        with safe_open(shard, "pt") as file:
            for tensor in file.keys():  # noqa: SIM118
                weight = file.get_tensor(tensor)
                if weight.ndim < 2 or any(part in tensor for part in _PLAIN):
                    held[tensor] = weight
                else:
                    stem = tensor.removesuffix("weight")
                    held |= {f"{stem}{key}": one for key, one in quantise(weight).items()}
    # as the format's own writer has them: by type, then by name
    ordered = sorted(held.items(), key=lambda item: (-item[1].element_size(), item[0]))
    write_tensors(scratch / "model.safetensors", {}, dict(ordered))
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": settings}
    (scratch / "config.json").write_text(json.dumps(config))
    return scratch.rename(folder)
