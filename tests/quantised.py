"""Tiny checkpoints in every quantised format, with the weights that they stand for.

Each format is written out here by the plainest reading of its layout, beside the product that its weights are: nothing
is taken from `offload`, so that the two can be compared.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import Tensor

_NF4_STATE = ".weight.quant_state.bitsandbytes__nf4"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_NF4_LOW = [-1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0]
_NF4_HIGH = [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1]
NF4 = torch.tensor([*_NF4_LOW, *_NF4_HIGH])
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # column c of eight lies in nibble AWQ_ORDER[c] of their word
BLOCK = (48, 48)  # divides no size of the tiny models, so that last blocks are cut
GROUP = 32
NEVER = ("embed_tokens", "embeddings", "lm_head", "mlp.gate.", "block_sparse_moe.gate.", "norm", "router")  # held plain


class Stored(NamedTuple):
    """One weight, written in a format."""

    tensors: dict[str, Tensor]  # by suffix behind the weight's name without its `.weight`
    weight: Tensor  # float32, what they stand for


class Quantised(NamedTuple):
    """A model's folder, and what it holds."""

    directory: Path
    weights: dict[str, Tensor]  # all, float32, by the names that the model's plain checkpoint has


class Recipe(NamedTuple):
    """How one format is written."""

    config: dict[str, Any]  # `quantization_config`
    store: Callable[[Tensor], Stored]


def save_quantised(plain: Path, name: str, directory: Path, *, max_shard_size: str = "150KB") -> Quantised:
    """The checkpoint of folder `plain` once more in the format `RECIPES[name]`: all products but head and routers."""
    recipe, tensors, weights = RECIPES[name], dict[str, Tensor](), dict[str, Tensor]()
    for key, tensor in _load(plain).items():
        stored = _store(key, tensor, recipe)
        base = key.removesuffix(".weight")
        tensors |= {key: tensor} if stored is None else {base + end: value for end, value in stored.tensors.items()}
        weights[key] = tensor.float() if stored is None else stored.weight
    directory.mkdir(parents=True, exist_ok=True)
    for small in plain.glob("*"):
        if small.is_file() and "safetensors" not in small.name:
            shutil.copy(small, directory)
    tensors = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
    save_torch_state_dict(tensors, directory, max_shard_size=max_shard_size)
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": recipe.config}
    (directory / "config.json").write_text(json.dumps(config))
    return Quantised(directory, weights)


def _load(directory: Path) -> dict[str, Tensor]:
    return {key: value for shard in sorted(directory.glob("*.safetensors")) for key, value in load_file(shard).items()}


def _store(key: str, tensor: Tensor, recipe: Recipe) -> Stored | None:
    is_stack = key.endswith("experts.gate_up_proj") or key.endswith("experts.down_proj")
    if recipe.store is mxfp4:
        return recipe.store(tensor) if is_stack else None
    is_product = key.endswith(".weight") and tensor.ndim == 2 and not any(part in key for part in NEVER)
    return recipe.store(tensor.float()) if is_product else None


def pack(codes: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes, at least 0, as I32 words along a dimension; the first in the lowest bits, or where `order` puts it."""
    each = 32 // bits
    codes = codes.movedim(dim, -1).long()
    if 32 % bits and order is None:
        return _stream(codes, bits).movedim(-1, dim).contiguous()
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % each)).unflatten(-1, (-1, each))
    shifts = bits * torch.tensor(order or range(each))
    words = (codes << shifts).sum(-1)
    return (words - ((words >> 31) << 32)).int().movedim(-1, dim).contiguous()


def _stream(codes: Tensor, bits: int) -> Tensor:
    """Codes one behind the other, bit by bit, wherever words end."""
    bit = (codes[..., None] >> torch.arange(bits) & 1).flatten(-2)
    bit = torch.nn.functional.pad(bit, (0, -bit.shape[-1] % 32)).unflatten(-1, (-1, 32))
    words = (bit << torch.arange(32)).sum(-1)
    return (words - ((words >> 31) << 32)).int()


def group_of(num_columns: int, group: int) -> Tensor:
    """Which group each column is in."""
    return torch.arange(num_columns) // group


def _grouped(
    weight: Tensor, bits: int, group: int | None, *, dtype: torch.dtype, symmetric: bool = True, ordered: bool = False
) -> tuple[Tensor, ...]:
    """Codes (N, K), scales (N, G) and zero points (N, G), round to nearest; each column's group, and the numbers."""
    size = group or weight.shape[1]
    group_K = _order(weight.shape[1], size) if ordered else group_of(weight.shape[1], size).int()
    num_groups, top = int(group_K.max()) + 1, (1 << bits) - 1
    columns = [weight[:, group_K == group] for group in range(num_groups)]
    lo = torch.stack([tensor.amin(1) for tensor in columns], 1).clamp(max=0)
    hi = torch.stack([tensor.amax(1) for tensor in columns], 1).clamp(min=0)
    if symmetric:
        scale, zero = torch.maximum(-lo, hi) / (top / 2), torch.full_like(lo, (top + 1) // 2)
    else:
        scale = (hi - lo) / top
        zero = (-lo / scale).round().clamp(1, top)
    scale = scale.to(dtype)
    each = scale.float()[:, group_K]
    codes = (weight / each + zero[:, group_K]).round().clamp(0, top)
    return codes.int(), scale, zero.int(), group_K, (codes - zero[:, group_K]) * each


def _order(num_columns: int, group: int) -> Tensor:
    """Groups as act-order leaves them: any column in any group."""
    order = torch.randperm(num_columns, generator=torch.Generator().manual_seed(num_columns))
    return group_of(num_columns, group)[order].int()


def float8(block: tuple[int, int] | None) -> Callable[[Tensor], Stored]:
    """DeepSeek's blocks, or compressed-tensors' rows (None)."""

    def store(weight: Tensor) -> Stored:
        rows, columns = block or (1, weight.shape[1])
        grid = [-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)]
        row_A, column_B = torch.arange(weight.shape[0]) // rows, torch.arange(weight.shape[1]) // columns
        scale = torch.zeros(grid)
        for a in range(grid[0]):
            for b in range(grid[1]):
                scale[a, b] = weight[row_A == a][:, column_B == b].abs().max() / 448
        scale = scale if block else scale.bfloat16()
        each = scale.float()[row_A][:, column_B]
        stored = (weight / each).to(torch.float8_e4m3fn)
        suffix = ".weight_scale_inv" if block else ".weight_scale"
        return Stored({".weight": stored, suffix: scale}, stored.float() * each)

    return store


def inverse(weight: Tensor) -> Stored:
    """GPTQModel's FP8 by rows, whose `weight_scale_inv` divides."""
    inverted = 448 / weight.abs().amax(1)
    codes = (weight * inverted[:, None]).to(torch.float8_e4m3fn)
    tensors = {".weight": codes, ".weight_scale_inv": inverted}
    return Stored(tensors, codes.float() * inverted.reciprocal()[:, None])


def _exponents(weight: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """A power of two for each 32 columns, as its exponent plus 127, and spread over the columns."""
    most = weight.unflatten(-1, (-1, 32)).abs().amax(-1)
    exponent = (most / largest).clamp(min=1e-30).log2().ceil().int()
    return (exponent + 127).to(torch.uint8), exponent.float().exp2().repeat_interleave(32, -1)


def mxfp8(weight: Tensor) -> Stored:
    """compressed-tensors' `mxfp8-quantized`."""
    scale, each = _exponents(weight, 448)
    codes = (weight / each).to(torch.float8_e4m3fn)
    return Stored({".weight": codes, ".weight_scale": scale}, codes.float() * each)


def mxfp4_matrix(weight: Tensor) -> Stored:
    """compressed-tensors' `mxfp4-pack-quantized`."""
    scale, each = _exponents(weight, 6)
    codes = _nearest_e2m1(weight / each)
    values = E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(-2)] * each
    return Stored({".weight_packed": codes.to(torch.uint8), ".weight_scale": scale}, values)


def mlx(bits: int) -> Callable[[Tensor], Stored]:
    """MLX's `affine`, whose scales may be below 0."""

    def store(weight: Tensor) -> Stored:
        groups = weight.unflatten(-1, (-1, GROUP))
        lo, hi = groups.amin(-1), groups.amax(-1)
        sign = 1 - 2 * (torch.arange(lo.numel()).view(lo.shape) % 2)
        scale = ((hi - lo) / ((1 << bits) - 1) * sign).bfloat16()
        bias = torch.where(sign > 0, lo, hi).bfloat16()
        each, added = (tensor.float()[..., None] for tensor in (scale, bias))
        codes = ((groups - added) / each).round().clamp(0, (1 << bits) - 1)
        words = pack(codes.flatten(-2), bits, -1).view(torch.uint32)
        return Stored({".weight": words, ".scales": scale, ".biases": bias}, (codes * each + added).flatten(-2))

    return store


def mlx_floats(store: Callable[[Tensor], Stored], words: str) -> Callable[[Tensor], Stored]:
    """MLX's `mxfp4` and `mxfp8`: the same bytes in words."""

    def renamed(weight: Tensor) -> Stored:
        tensors, values = store(weight)
        packed = tensors[words].view(torch.uint8).view(torch.uint32)
        return Stored({".weight": packed, ".scales": tensors[".weight_scale"]}, values)

    return renamed


def mlx_nvfp4(weight: Tensor) -> Stored:
    """MLX's `nvfp4`, without a scale per tensor."""
    groups = weight.unflatten(-1, (-1, 16))
    scale = (groups.abs().amax(-1) / 6).to(torch.float8_e4m3fn)
    each = scale.float()[..., None]
    codes = _nearest_e2m1((groups / each.clamp(min=1e-30)).flatten(-2))
    values = E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(-2)].unflatten(-1, (-1, 16)) * each
    words = codes.to(torch.uint8).contiguous().view(torch.uint32)
    return Stored({".weight": words, ".scales": scale.view(torch.uint8)}, values.flatten(-2))


def torchao(weight: Tensor) -> Stored:
    """torchao's Int8Tensor."""
    codes, scale, _, _, values = _grouped(weight, 8, None, dtype=torch.float32)
    zero = torch.zeros_like(scale, dtype=torch.int8)
    words = {"._weight_qdata": (codes - 128).to(torch.int8), "._weight_zero_point": zero}
    return Stored({**words, "._weight_scale": scale}, values)


def torchao_float8(weight: Tensor) -> Stored:
    """torchao's Float8Tensor."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return Stored({"._weight_qdata": codes, "._weight_scale": scale}, codes.float() * scale)


def compressed(
    bits: int, group: int | None, *, symmetric: bool = True, ordered: bool = False, is_old: bool = False
) -> Callable[[Tensor], Stored]:
    """compressed-tensors' `pack-quantized`; `is_old`: as before 0.20, where no code ends in another word."""
    order = tuple(range(32 // bits)) if is_old else None

    def store(weight: Tensor) -> Stored:
        options = {"symmetric": symmetric, "ordered": ordered}
        codes, scale, zero, group_K, values = _grouped(weight, bits, group, dtype=torch.bfloat16, **options)
        shape = torch.tensor(weight.shape)
        tensors = {".weight_packed": pack(codes, bits, 1, order), ".weight_scale": scale, ".weight_shape": shape}
        tensors |= {} if symmetric else {".weight_zero_point": pack(zero, bits, 0, order)}
        tensors |= {".weight_g_idx": group_K} if ordered else {}
        return Stored(tensors, values)

    return store


def int8(weight: Tensor) -> Stored:
    """compressed-tensors' `int-quantized`, one scale for each row."""
    codes, scale, _, _, values = _grouped(weight, 8, None, dtype=torch.bfloat16)
    return Stored({".weight": (codes - 128).to(torch.int8), ".weight_scale": scale}, values)


def awq(weight: Tensor) -> Stored:
    """AutoAWQ's `gemm`."""
    codes, scale, zero, _, values = _grouped(weight, 4, GROUP, symmetric=False, dtype=torch.float16)
    words = {".qweight": pack(codes.t(), 4, 1, AWQ_ORDER), ".qzeros": pack(zero.t(), 4, 1, AWQ_ORDER)}
    return Stored({**words, ".scales": scale.t()}, values)


def gptq(
    bits: int, group: int | None, *, version: int = 1, symmetric: bool = True, ordered: bool = False
) -> Callable[[Tensor], Stored]:
    """AutoGPTQ's, whose first version stores zero points less one."""

    def store(weight: Tensor) -> Stored:
        options = {"symmetric": symmetric, "ordered": ordered}
        codes, scale, zero, group_K, values = _grouped(weight, bits, group, dtype=torch.float16, **options)
        words = {".qweight": pack(codes.t(), bits, 0), ".qzeros": pack(zero.t() - (2 - version), bits, 1)}
        return Stored({**words, ".scales": scale.t(), ".g_idx": group_K}, values)

    return store


def nf4(nested: bool) -> Callable[[Tensor], Stored]:
    """bitsandbytes' 4 bits, absmax of blocks quantised once more or not."""

    def store(weight: Tensor) -> Stored:
        flat = weight.flatten()
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
        absmax = padded.abs().amax(1)
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        tensors = {".weight.quant_map": NF4}
        if nested:
            levels, offset = torch.linspace(-1, 1, 256), float(absmax.mean())
            blocks = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
            outer = blocks.abs().amax(1)
            codes = ((blocks / outer[:, None] + 1) * 127.5).round().to(torch.uint8).flatten()[: len(absmax)]
            absmax = levels[codes.long()] * outer.repeat_interleave(256)[: len(absmax)] + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            tensors |= {".weight.nested_absmax": outer, ".weight.nested_quant_map": levels, ".weight.absmax": codes}
        else:
            tensors[".weight.absmax"] = absmax
        codes = ((padded / absmax[:, None])[..., None] - NF4).abs().argmin(-1).flatten()[: len(flat)]
        pairs = torch.nn.functional.pad(codes, (0, len(codes) % 2)).view(-1, 2)
        tensors[".weight"] = (pairs[:, 0] << 4 | pairs[:, 1]).to(torch.uint8)[:, None]
        tensors[_NF4_STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        values = NF4[codes] * absmax.repeat_interleave(64)[: len(flat)]
        return Stored(tensors, values.view(weight.shape))

    return store


def _nearest_e2m1(scaled: Tensor) -> Tensor:
    """Codes of the nearest numbers, two to a byte, the first in the low nibble."""
    codes = (scaled[..., None] - E2M1).abs().argmin(-1).unflatten(-1, (-1, 2))
    return codes[..., 0] | codes[..., 1] << 4


def nvfp4(weight: Tensor) -> Stored:
    """compressed-tensors' `nvfp4-pack-quantized`, which divides scales by one more."""
    groups = weight.unflatten(-1, (-1, 16))
    whole = 448 * 6 / weight.abs().max().reshape(1)
    scale = (groups.abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
    each = (scale.float() / whole)[..., None]
    codes = _nearest_e2m1((groups / each.clamp(min=1e-30)).flatten(-2))
    values = E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(-2)].unflatten(-1, (-1, 16)) * each
    tensors = {".weight_packed": codes.to(torch.uint8), ".weight_scale": scale, ".weight_global_scale": whole}
    return Stored(tensors, values.flatten(-2))


def mxfp4(stack: Tensor) -> Stored:
    """gpt-oss' experts, (E, in, out) in the model and (E, out, in) in the file."""
    groups = stack.float().mT.unflatten(-1, (-1, 32))
    exponent = (groups.abs().amax(-1) / 6).clamp(min=1e-30).log2().ceil().int()
    each = exponent[..., None].float().exp2()
    codes = _nearest_e2m1((groups / each).flatten(-2))
    values = E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(-2)].unflatten(-1, (-1, 32)) * each
    tensors = {"_blocks": codes.unflatten(-1, (-1, 16)).to(torch.uint8), "_scales": (exponent + 127).to(torch.uint8)}
    return Stored(tensors, values.flatten(-2).mT)


def _compressed_config(format_: str, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": format_, "config_groups": groups, "ignore": ["lm_head"]}


def _packed_config(bits: int = 4, **weights: Any) -> dict[str, Any]:
    return _compressed_config("pack-quantized", num_bits=bits, **weights)


def _gptq_config(bits: int = 4, group: int = GROUP, **options: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True} | options


def _mlx_config(bits: int, **options: Any) -> dict[str, Any]:
    return {"group_size": GROUP, "bits": bits, "mode": "affine"} | options


_IN_GROUPS: Mapping[str, Any] = {"strategy": "group", "group_size": GROUP}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_INVERSE = {"quant_method": "fp8", "format": "float8_e4m3fn", "weight_scale_method": "row",
            "weight_scale_semantics": "inverse"}  # fmt: skip
_TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}
_MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}

RECIPES: Mapping[str, Recipe] = {
    "fp8-block": Recipe(_FP8, float8(BLOCK)),
    "fp8-channel": Recipe(_compressed_config("float-quantized", num_bits=8, type="float"), float8(None)),
    "ct-w4": Recipe(_packed_config(**_IN_GROUPS), compressed(4, GROUP)),
    "ct-w4-zeros": Recipe(_packed_config(**_IN_GROUPS, symmetric=False), compressed(4, GROUP, symmetric=False)),
    "ct-w4-order": Recipe(_packed_config(**_IN_GROUPS, actorder="group"), compressed(4, GROUP, ordered=True)),
    "ct-w3": Recipe(_packed_config(3, **_IN_GROUPS), compressed(3, GROUP)),
    "ct-w6-zeros": Recipe(_packed_config(6, **_IN_GROUPS, symmetric=False), compressed(6, GROUP, symmetric=False)),
    "old-w3-zeros": Recipe(
        _packed_config(3, **_IN_GROUPS, symmetric=False), compressed(3, GROUP, symmetric=False, is_old=True)
    ),
    "ct-w8": Recipe(_packed_config(8), compressed(8, None)),
    "ct-int8": Recipe(_compressed_config("int-quantized", num_bits=8), int8),
    "awq": Recipe(_AWQ, awq),
    "gptq": Recipe(_gptq_config(), gptq(4, GROUP)),
    "gptq-order": Recipe(_gptq_config(desc_act=True), gptq(4, GROUP, ordered=True)),
    "gptq-v2": Recipe(_gptq_config(checkpoint_format="gptq_v2", sym=False), gptq(4, GROUP, version=2, symmetric=False)),
    "gptq-8": Recipe(_gptq_config(8, -1), gptq(8, None)),
    "gptq-2": Recipe(_gptq_config(2, format="gptq"), gptq(2, GROUP, symmetric=False)),
    "gptq-3": Recipe(_gptq_config(3), gptq(3, GROUP, symmetric=False)),
    "gptq-3-order": Recipe(_gptq_config(3, desc_act=True, format="gptq_v2"), gptq(3, GROUP, version=2, ordered=True)),
    "fp8-inverse": Recipe(_INVERSE, inverse),
    "mx-fp4": Recipe(_compressed_config("mxfp4-pack-quantized", type="float", **_IN_GROUPS), mxfp4_matrix),
    "mx-fp8": Recipe(_compressed_config("mxfp8-quantized", num_bits=8, type="float", **_IN_GROUPS), mxfp8),
    **{f"mlx-{bits}": Recipe(_mlx_config(bits), mlx(bits)) for bits in (2, 3, 4, 5, 6, 8)},
    "mlx-mxfp4": Recipe(_mlx_config(4, mode="mxfp4"), mlx_floats(mxfp4_matrix, ".weight_packed")),
    "mlx-mxfp8": Recipe(_mlx_config(8, mode="mxfp8"), mlx_floats(mxfp8, ".weight")),
    "mlx-nvfp4": Recipe(_mlx_config(4, group_size=16, mode="nvfp4"), mlx_nvfp4),
    "torchao": Recipe(_TORCHAO, torchao),
    "torchao-fp8": Recipe(_TORCHAO, torchao_float8),
    "nf4": Recipe(_NF4, nf4(nested=False)),
    "nf4-nested": Recipe(_NF4 | {"bnb_4bit_use_double_quant": True}, nf4(nested=True)),
    "nvfp4": Recipe(
        _compressed_config("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16), nvfp4
    ),
    "mxfp4": Recipe(_MXFP4, mxfp4),
}


def random_weight(num_rows: int, num_columns: int, seed: int = 0) -> Tensor:
    """As large as weights are."""
    made = torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed))
    return made / math.sqrt(num_columns)
