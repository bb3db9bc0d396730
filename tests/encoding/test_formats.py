"""Every format x shape x type x form of expansion: the weights that were stored, to the bit; mistakes would be seen.

And weights against what each format's own library makes of the same tensors, to the bit, in the type it expands into.
AutoAWQ and AutoGPTQ cannot be installed beside the other libraries: their own arithmetic is written out here.
"""

from itertools import product

import pytest
import torch
from coded_weights import DTYPES, EXPANSIONS, are_equal, can_round, expanded, forbid_operators, recognise
from quantised import AWQ_ORDER, RECIPES, Stored, random_weight
from torch import Tensor

from offload.kernels.expansion import COMPILED, Expansion

# Rows and columns: of whole groups and chunks, and as ragged as each format allows.
_SHAPES = {
    "fp8": [(66, 160), (13, 77), (1, 1)],
    "ct": [(66, 160), (13, 77), (2, 33)],
    "awq": [(136, 80), (24, 77), (8, 32)],
    "gptq": [(72, 160), (24, 88), (8, 32)],
    "gptq-2": [(64, 160), (48, 80)],
    "gptq-3": [(64, 160), (32, 96)],
    "gptq-3-order": [(64, 160), (32, 96)],
    "old": [(66, 160), (13, 96)],
    "mx": [(66, 160), (13, 96), (2, 32)],
    "mlx": [(66, 160), (13, 96), (1, 32)],
    "torchao": [(66, 160), (13, 77), (1, 1)],
    "nf4": [(66, 128), (13, 50), (5, 64), (1, 2)],
    "nvfp4": [(66, 160), (13, 48), (1, 16)],
    "mxfp4": [(3, 96, 25), (1, 32, 7)],  # as the model has them: experts, in, out
}


def weight_of(shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 2:
        return random_weight(*shape)
    return torch.stack([random_weight(*shape[1:], seed=seed) for seed in range(shape[0])])


def as_stored(name: str, stored: Stored) -> Tensor:
    """What is expanded: MXFP4 has the model's matrices the other way round."""
    return stored.weight.mT.contiguous() if name == "mxfp4" else stored.weight


def shapes_of(name: str) -> list[tuple[int, ...]]:
    return list(_SHAPES.get(name) or _SHAPES[name.partition("-")[0]])


@pytest.mark.parametrize("expansion", EXPANSIONS)
@pytest.mark.parametrize("name", RECIPES)
def test_weights_are_those_that_were_stored(name: str, expansion: Expansion) -> None:
    for shape in shapes_of(name):
        stored = RECIPES[name].store(weight_of(shape))
        wanted = as_stored(name, stored)
        for dtype in DTYPES:
            if can_round(expansion, dtype):
                got = expanded(stored.tensors, RECIPES[name].config, tuple(wanted.shape), dtype, expansion)
                assert are_equal(got, wanted.to(dtype)), (shape, dtype)


@pytest.mark.parametrize("name", RECIPES)
def test_headers_tell_the_shape(name: str) -> None:
    """Except for columns that pad the last word, and for matrices that are stored flattened."""
    stored = RECIPES[name].store(weight_of(shapes_of(name)[0]))
    wanted, tensor = as_stored(name, stored), recognise(stored.tensors, RECIPES[name].config)
    assert tensor.shape in (tuple(wanted.shape), (wanted.numel(),))
    assert hash(tensor.coding) == hash(recognise(stored.tensors, RECIPES[name].config).coding)
    assert tensor.coding.is_transposed == (name == "mxfp4")


@pytest.mark.parametrize("name", RECIPES)
def test_threads_share_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_operators(monkeypatch)
    torch.set_num_threads(2)
    stored = RECIPES[name].store(weight_of((2, 64, 40) if name == "mxfp4" else (160, 64)))
    wanted = as_stored(name, stored)
    got = expanded(stored.tensors, RECIPES[name].config, tuple(wanted.shape), torch.bfloat16, COMPILED)
    assert are_equal(got, wanted.bfloat16())


SHAPES = [(96, 160), (24, 64)]


LIBRARY = [  # of the first three it has whole groups only
    *product(("ct-w4", "ct-w4-zeros", "ct-w3", "ct-w6-zeros", "mx-fp4", "mx-fp8", "nvfp4"), SHAPES),
    *product(("ct-w8", "ct-int8", "fp8-channel"), [*SHAPES, (13, 77)]),
]


@pytest.mark.parametrize(("name", "shape"), LIBRARY, ids=str)
def test_compressed_tensors(name: str, shape: tuple[int, int]) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    tensors, config = RECIPES[name].store(random_weight(*shape)).tensors, RECIPES[name].config
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    named = {suffix.removeprefix("."): tensor for suffix, tensor in tensors.items()}
    wanted = BaseCompressor.get_value_from_registry(config["format"]).decompress(named, scheme=scheme)["weight"]
    assert are_equal(expanded(tensors, config, shape, wanted.dtype), wanted)


@pytest.mark.parametrize("num_experts", [1, 3])
def test_mxfp4_of_transformers(num_experts: int) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stack = torch.stack([random_weight(96, 40, seed) for seed in range(num_experts)])
    tensors = RECIPES["mxfp4"].store(stack).tensors
    tensors["_scales"].view(-1)[:3] = torch.tensor([0, 1, 254]).to(torch.uint8)  # the least and the largest there are
    wanted = convert_moe_packed_tensors(tensors["_blocks"], tensors["_scales"]).mT.contiguous()
    assert are_equal(expanded(tensors, {}, tuple(wanted.shape), torch.bfloat16), wanted)


@pytest.mark.parametrize("shape", [(96, 128), (24, 64), (13, 50)], ids=str)
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize(("kind", "storage"), [
    ("nf4", torch.uint8), ("nf4", torch.bfloat16), ("fp4", torch.uint8), ("fp4", torch.float32)])  # fmt: skip
def test_bitsandbytes(kind: str, storage: torch.dtype, is_nested: bool, shape: tuple[int, int]) -> None:
    """Rows of 160 are not asked of the library: from the second on its CPU code takes scales of other blocks."""
    from bitsandbytes import functional

    weight = random_weight(*shape).bfloat16()
    words, state = functional.quantize_4bit(weight, compress_statistics=is_nested, quant_type=kind)
    tensors = {".weight": words} | {f".weight.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}
    wanted = functional.dequantize_4bit(words, state)
    # with `quant_storage` the same bytes are kept as numbers of another type
    if words.numel() % storage.itemsize == 0:
        words = words.flatten().view(storage)[:, None]
    got = expanded(tensors | {".weight": words}, {}, shape, torch.bfloat16)
    assert torch.equal(got, wanted)  # the library's own code for FP4 on a CPU loses signs of zeros


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_of_bitsandbytes(dtype: torch.dtype) -> None:
    """To the bit: the library multiplies twice, and its constant is not the nearest number to 1 / 127."""
    from bitsandbytes import functional

    code = torch.randint(-127, 128, (200, 64), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    largest = random_weight(200, 1).abs().flatten()
    wanted = functional.int8_vectorwise_dequant(code, largest)
    assert not torch.equal(wanted, code * (largest[:, None] / 127)), "or a division would do"
    assert are_equal(expanded({".weight": code, ".SCB": largest}, {}, (200, 64), dtype), wanted.to(dtype))


def autoawq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
    """AutoAWQ's `dequantize_gemm` (awq/utils/packing_utils.py), as (in, out)."""
    shift = torch.arange(0, 32, 4)
    code, zero = ((words[:, :, None] >> shift[None, None, :]).to(torch.int8).flatten(1) for words in (qweight, qzeros))
    order = torch.arange(code.shape[1]).view(-1, 8)[:, list(AWQ_ORDER)].flatten()
    size = len(code) // len(scales)
    code, zero = code[:, order] & 15, (zero[:, order] & 15).repeat_interleave(size, 0)
    return (code - zero) * scales.repeat_interleave(size, 0)


def autogptq(tensors: dict[str, Tensor], bits: int, added: int) -> Tensor:
    """AutoGPTQ's `qlinear_cuda` where it computes with torch, as (in, out)."""
    shift, mask = torch.arange(0, 32, bits, dtype=torch.int32)[None], (1 << bits) - 1
    zero = torch.bitwise_and(torch.bitwise_right_shift(tensors[".qzeros"][:, :, None], shift[None]), mask) + added
    zero = zero.reshape(tensors[".scales"].shape)
    code = torch.bitwise_and(torch.bitwise_right_shift(tensors[".qweight"][:, None], shift[..., None]), mask)
    code = code.reshape(-1, code.shape[2])
    group_K = tensors[".g_idx"].long()
    return tensors[".scales"][group_K] * (code - zero[group_K])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_autoawq(shape: tuple[int, int]) -> None:
    tensors = RECIPES["awq"].store(random_weight(*shape)).tensors
    wanted = autoawq(tensors[".qweight"], tensors[".qzeros"], tensors[".scales"])
    assert are_equal(expanded(tensors, RECIPES["awq"].config, shape, torch.float16), wanted.t())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "bits", "added"), [
    ("gptq", 4, 1), ("gptq-order", 4, 1), ("gptq-v2", 4, 0), ("gptq-8", 8, 1)])  # fmt: skip
def test_autogptq(name: str, bits: int, added: int, shape: tuple[int, int]) -> None:
    tensors = RECIPES[name].store(random_weight(*shape)).tensors
    wanted = autogptq(tensors, bits, added)
    assert are_equal(expanded(tensors, RECIPES[name].config, shape, torch.float16), wanted.t())


@pytest.mark.parametrize(("name", "bits"), [("gptq", 4), ("gptq-8", 8)])
def test_zero_points_of_all_ones_are_one_more_in_the_first_version(name: str, bits: int) -> None:
    """16 of 4 bits, 256 of 8, as AutoGPTQ reads them; neither 0 nor a carry into the neighbour."""
    tensors = RECIPES[name].store(random_weight(24, 64)).tensors
    tensors[".qzeros"] = torch.full_like(tensors[".qzeros"], -1)
    wanted = autogptq(tensors, bits, 1)
    got = expanded(tensors, RECIPES[name].config, (24, 64), torch.float16)
    assert bool((wanted.abs() > 0).any()) and are_equal(got, wanted.t())
