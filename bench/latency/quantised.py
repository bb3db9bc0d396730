"""Seconds of a pass and of a token in bf16, fp8, int4, AWQ, MLX and packed.

Every layer is streamed. Formats take turns, round after round, because disks drift. A quantised
target is a model of its own: its tokens are proved by those of a run without a tree, and no draft
was trained for it. It is rounded to nearest, for speed alone.
"""

import json
import shutil
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from offload.bench.harness.command import Bench, Effort, Findings, command, flag
from offload.bench.harness.metrics import per_pass
from offload.bench.harness.prompts import Prompt, encoded
from offload.bench.harness.setting import PROMPT_TOKENS, Setting
from offload.bench.harness.tables import Column, Guard, Row, medians, values
from offload.checkpoint.files import publish_atomically
from offload.checkpoint.open import open_checkpoint
from offload.engine.state_tensors import write_tensors
from offload.errors import UserError, require
from offload.packing.pack import pack
from offload.units import parse_rate

_GROUP = 128
_BLOCK = 128
_FP8_MAX = 448.0
PACKED = "packed"  # without loss
BESIDE = "beside"  # ... a copy in 4 bits
_PLAIN = ("embed_tokens", "lm_head", "norm")

PLAIN = "bf16"
CONTEXT = 512
TREES = ("none", "16x8", "32x12", "64x16", "128x20")


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
    """Return words as DeepSeek stores them, in blocks of 128 x 128 or fewer rows."""
    rows = weight_NK.float().unflatten(0, (-1, min(_BLOCK, len(weight_NK))))
    blocks = rows.unflatten(2, (-1, _BLOCK))
    scale = (blocks.abs().amax((1, 3)) / _FP8_MAX).clamp(min=1e-12)
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return {"weight": codes.flatten(2).flatten(0, 1), "weight_scale_inv": scale}


def _in_groups(weight_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (N, K) of 0 to 15, and for each group of 128 along K the step and the least."""
    groups_NGg = weight_NK.float().unflatten(1, (-1, _GROUP))
    least_NG = groups_NGg.amin(-1)
    step_NG = ((groups_NGg.amax(-1) - least_NG) / 15).clamp(min=1e-8)
    codes = ((groups_NGg - least_NG[..., None]) / step_NG[..., None]).round().clamp(0, 15)
    return codes.flatten(1).int(), step_NG, least_NG


def _words(code_KN: Tensor, order: Sequence[int]) -> Tensor:
    """Return int32 words of eight codes along the last dimension, the first one of `order` lowest."""
    shift_8 = torch.arange(0, 32, 4, dtype=torch.int32)
    return (code_KN.unflatten(-1, (-1, 8))[..., list(order)] << shift_8).sum(-1, dtype=torch.int32)


def awq(weight_NK: Tensor) -> dict[str, Tensor]:
    """Return words as AWQ has them (gemm): eight rows to a word, turned, with zero points."""
    code_NK, step_NG, least_NG = _in_groups(weight_NK)
    zero_NG = (-least_NG / step_NG).round().clamp(0, 15).int()
    return {
        "qweight": _words(code_NK.t(), _AWQ_ORDER),
        "qzeros": _words(zero_NG.t(), _AWQ_ORDER),
        "scales": step_NG.t().contiguous().half(),
    }


def mlx(weight_NK: Tensor) -> dict[str, Tensor]:
    """Return words as MLX has them (affine), with a bias for each group."""
    code_NK, step_NG, least_NG = _in_groups(weight_NK)
    return {
        "weight": _words(code_NK, range(8)).view(torch.uint32),
        "scales": step_NG.bfloat16(),
        "biases": least_NG.bfloat16(),
    }


_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
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
_AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": _GROUP,
    "zero_point": True,
    "version": "gemm",
}
_MLX: dict[str, Any] = {"group_size": _GROUP, "bits": 4, "mode": "affine"}
FORMATS = {"int4": (int4, _INT4), "fp8": (fp8, _FP8), "awq": (awq, _AWQ), "mlx": (mlx, _MLX)}


def quantised(source: Path, name: str) -> Path:
    """Return `source` in one of `FORMATS`, packed or plain, made once. Raises `UserError`."""
    folder = source.with_name(f"{source.name}-{name}")
    if name == PLAIN:
        return source
    if folder.is_dir():
        return folder
    if name in (PACKED, BESIDE):
        beside = "int4" if name == BESIDE else None
        pack(source, folder, beside=beside, progress=lambda done, total: None)
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
    held = dict[str, Tensor]()
    for tensor, weight in chain.from_iterable(
        load_file(shard).items() for shard in checkpoint.shards
    ):
        if weight.ndim < 2 or any(part in tensor for part in _PLAIN):
            held[tensor] = weight
        else:
            stem = tensor.removesuffix("weight")
            held |= {f"{stem}{key}": tensor_part for key, tensor_part in quantise(weight).items()}
    # as the format's own writer has them: by type, then by name
    ordered = sorted(held.items(), key=lambda item: (-item[1].element_size(), item[0]))
    with publish_atomically(folder, folder.with_name(f"{folder.name}.part")) as scratch:
        for path in source.iterdir():
            if path.is_file() and "safetensors" not in path.name:
                shutil.copyfile(path, scratch / path.name)
        write_tensors(scratch / "model.safetensors", {}, dict(ordered))
        config = json.loads((source / "config.json").read_text())
        config["quantization" if name == "mlx" else "quantization_config"] = settings
        (scratch / "config.json").write_text(json.dumps(config))
    return folder


FULL = Effort(rounds=5, num_plain=12, num_tokens=96, trees=TREES)
QUICK = Effort(rounds=2, num_plain=6, num_tokens=48, trees=("none", "32x12", "128x20"))


def run_format(setting: Setting, prompt: Prompt, effort: Effort, limit: int | None) -> list[Row]:
    """Return one row for each tree. Raises `UserError` where a tree changes a text."""
    rows = list[Row]()
    plain_ids = list[int]()
    with setting.open_streamed(effort.trees[-1], context=CONTEXT, link_limit=limit) as decoder:
        ids = encoded(decoder, prompt, PROMPT_TOKENS)
        for tree in effort.trees:
            got = decoder.generate(ids, max_new_tokens=effort.length(tree), tree=tree)
            plain_ids = plain_ids or got.token_ids
            if any(token != other for token, other in zip(got.token_ids, plain_ids, strict=False)):
                complaint = f"with {tree} the text is another than without"
                raise UserError(f"{complaint}: no speed is printed")
            rows.append({"tree": tree, **per_pass(got.stats)})
    return rows


COLUMNS = (
    Column("format", "format"),
    Column("tree", "tree"),
    Column("s a pass", "pass_s", ".3f"),
    Column("waiting s", "stall_s", ".3f"),
    Column("of bf16's", "ratio_of_pass", ".2f"),
    Column("s a token", "token_s", ".3f"),
    Column("of bf16's best", "ratio_of_best", ".2f"),
    Column("tokens", "tokens_per_pass", ".1f"),
    Column("GB read", "pass_bytes", ".2f", 1e9),
)


@command(
    "quantised", "size source quick", examples=["offload bench quantised --quick --size 600MB"]
)
def main(
    bench: Bench,
    link_limit: Annotated[
        str | None, flag("SPEED", "slow the link down to this, such as 1GB")
    ] = None,
) -> Findings:
    """Seconds of a pass and of a token with the same weights in fewer bytes."""
    limit = parse_rate(link_limit, "--link-limit")
    effort = bench.effort(FULL, QUICK)
    prompt = bench.prompts(1)[0]
    plain = bench.setting()
    formats = (PLAIN, *FORMATS, PACKED)
    settings = {name: plain._replace(target=quantised(plain.target, name)) for name in formats}
    bench.begin(plain)
    every = list[Row]()
    for _, name in bench.turns(range(effort.rounds), formats, "decoding"):
        runs = run_format(settings[name], prompt, effort, limit)
        every += [{"format": name, **row} for row in runs]
    rows = medians(every, "format", "tree")
    best_s = min(values(rows, "token_s", format=PLAIN))
    for row in rows:
        (pass_s,) = values(rows, "pass_s", format=PLAIN, tree=row["tree"])
        row["ratio_of_pass"] = row["pass_s"] / pass_s
        row["ratio_of_best"] = row["token_s"] / best_s
    guards = dict[str, Guard]()
    for name in formats[1:]:
        plain_pass = values(rows, "ratio_of_pass", format=name, tree="none")
        guards[f"pass, {name} / bf16"] = Guard(plain_pass, "lower")
        best = min(values(rows, "ratio_of_best", format=name))
        guards[f"best token, {name} / bf16"] = Guard([best], "lower")
    return Findings(rows=rows, tables=[(COLUMNS, rows)], guards=guards)
