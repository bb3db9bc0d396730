"""Tensors that contradict each other are refused in one line: missing, of wrong shapes, not finite, no index."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from coded_weights import expanded, recognise
from quantised import RECIPES, random_weight
from torch import Tensor

SHAPE = (96, 160)
_EXP = ".weight.quant_state.bitsandbytes__nf4"
Change = Callable[[Tensor], Tensor | None]


def missing(_: Tensor) -> None:
    return None


def shorter(tensor: Tensor) -> Tensor:
    return tensor[:-1]


def holding(number: float) -> Change:
    """The last of its numbers is another."""

    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous().clone()
        tensor.view(-1)[-1] = number
        return tensor

    return change


def bits(value: int) -> Change:
    """The last byte, whatever it stands for."""

    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous().clone()
        tensor.view(torch.uint8).view(-1)[-1] = value
        return tensor

    return change


def text(said: str) -> Change:
    return lambda _: torch.tensor(list(said.encode()), dtype=torch.uint8)


def nested(extra: str) -> Change:
    return text('{"shape": [96, 160], "blocksize": 64, ' + extra + "}")


BAD: list[tuple[str, str, Change, str]] = [
    ("fp8-block", ".weight_scale_inv", missing, "needs a .weight_scale_inv or .weight_scale"),
    ("fp8-channel", ".weight_scale", missing, "needs a .weight_scale_inv or .weight_scale"),
    ("fp8-block", ".weight_scale_inv", shorter, "must have the scales"),
    ("fp8-block", ".weight_scale_inv", lambda tensor: tensor.T, "must have the scales"),
    ("fp8-block", ".weight_scale_inv", lambda tensor: tensor.flatten(), "must have the scales"),
    ("fp8-block", ".weight_scale_inv", holding(float("nan")), "finite"),
    ("fp8-block", ".weight_scale_inv", lambda tensor: tensor.int(), "type"),
    ("fp8-channel", ".weight_scale", holding(float("inf")), "finite"),
    ("ct-w4", ".weight_scale", missing, "needs a .weight_scale"),
    ("ct-w4", ".weight_scale", shorter, "must have shape"),
    ("ct-w4", ".weight_scale", lambda tensor: tensor[:, :-1], "config_groups"),
    ("ct-w4", ".weight_scale", holding(float("nan")), "finite"),
    ("ct-w4", ".weight_scale", lambda tensor: tensor.int(), "type"),
    ("ct-w4", ".weight_shape", holding(161), "must be"),
    ("ct-w4", ".weight_packed", lambda tensor: tensor.flatten(), "two dimensions"),
    ("ct-w4-zeros", ".weight_zero_point", shorter, "must have shape"),
    ("ct-w4-order", ".weight_g_idx", holding(5), "0..4"),
    ("ct-w4-order", ".weight_g_idx", holding(-1), "0..4"),
    ("ct-w4-order", ".weight_g_idx", shorter, "160 numbers"),
    ("ct-int8", ".weight_scale", shorter, "must have shape"),
    ("ct-int8", ".weight_scale", holding(float("inf")), "finite"),
    ("awq", ".scales", missing, "needs a .scales"),
    ("awq", ".qzeros", missing, "needs a .qzeros"),
    ("awq", ".scales", shorter, "must have shape"),
    ("awq", ".scales", holding(float("nan")), "finite"),
    ("awq", ".qzeros", lambda tensor: tensor.flatten(), "two dimensions"),
    ("gptq", ".scales", missing, "needs a .scales"),
    ("gptq", ".scales", shorter, "must have shape"),
    ("gptq", ".scales", holding(float("nan")), "finite"),
    ("gptq", ".qzeros", lambda tensor: tensor[:, :9], "bits"),
    ("gptq", ".g_idx", holding(0), "in order where desc_act is false"),
    ("gptq", ".qzeros", lambda tensor: tensor.float(), "type I32"),
    ("gptq", ".qweight", lambda tensor: tensor.float(), "type I32"),
    ("gptq", ".g_idx", lambda tensor: tensor.float(), "type I32"),
    ("awq", ".qzeros", lambda tensor: tensor.float(), "type I32"),
    ("ct-w4-zeros", ".weight_zero_point", lambda tensor: tensor.float(), "type I32"),
    ("gptq", ".g_idx", shorter, "160 numbers"),
    ("gptq-order", ".g_idx", holding(5), "0..4"),
    ("gptq-order", ".g_idx", holding(-1), "0..4"),
    ("nf4", ".weight.absmax", missing, "needs a .weight.absmax"),
    ("nf4", ".weight.absmax", shorter, "for each block"),
    ("nf4", ".weight.absmax", holding(float("nan")), "finite"),
    ("nf4", ".weight.quant_map", missing, "needs a .weight.quant_map"),
    ("nf4", ".weight.quant_map", shorter, "16 numbers"),
    ("nf4", ".weight.quant_map", holding(float("inf")), "finite"),
    ("nf4", _EXP, text("{"), "JSON object"),
    ("nf4", _EXP, text("[" * 10_000), "JSON object"),
    ("nf4", _EXP, text("[1]"), "JSON object"),
    ("nf4", _EXP, text(" " * 70_000), "at most"),
    ("nf4", _EXP, text('{"shape": [96, 161], "blocksize": 64}'), "must tell of shape"),
    ("nf4", _EXP, text('{"shape": [96, 160], "blocksize": 128}'), "must tell of shape"),
    ("nf4-nested", _EXP, text('{"shape": [96, 160], "blocksize": 64}'), "nested"),
    ("nf4-nested", _EXP, nested('"nested_blocksize": 0, "nested_offset": 1.0'), "nested"),
    ("nf4-nested", _EXP, nested('"nested_blocksize": 256, "nested_offset": NaN'), "nested"),
    ("nf4-nested", _EXP, nested('"nested_blocksize": true, "nested_offset": 1.0'), "nested"),
    ("nf4-nested", _EXP, nested('"nested_blocksize": 9, "nested_offset": 1.0'), "27 numbers"),
    ("nf4", _EXP, lambda tensor: tensor.float(), "of type U8"),
    ("nf4-nested", ".weight.nested_absmax", missing, "needs a .weight.nested_absmax"),
    ("nf4-nested", ".weight.nested_absmax", holding(float("nan")), "finite"),
    ("nf4-nested", ".weight.nested_quant_map", shorter, "256 numbers"),
    ("nvfp4", ".weight_global_scale", missing, "needs a .weight_global_scale"),
    ("nvfp4", ".weight_global_scale", holding(0.0), "finite"),
    ("nvfp4", ".weight_global_scale", holding(float("nan")), "finite"),
    ("nvfp4", ".weight_scale", shorter, "must have shape"),
    ("nvfp4", ".weight_scale", bits(0x7F), "finite"),
    ("mxfp4", "_scales", missing, "needs a _scales"),
    ("mxfp4", "_scales", shorter, "must have shape"),
    ("mxfp4", "_scales", holding(255), "numbers"),
    ("mxfp4", "_blocks", lambda tensor: tensor[..., :8], "16 bytes"),
]  # fmt: skip


def test_scales_of_joined_matrices_name_the_way_out() -> None:
    """Those of q, k and v in one matrix: a new download would have three as well."""
    tensors = dict(RECIPES["fp8-channel"].store(random_weight(*SHAPE)).tensors)
    tensors[".weight_scale"] = torch.ones(3)
    with pytest.raises(ValueError, match="in which matrices with scales of their own are stored apart"):
        expanded(tensors, RECIPES["fp8-channel"].config, SHAPE)


@pytest.mark.parametrize(("name", "suffix", "change", "said"), BAD)
def test_contradictions_are_refused(name: str, suffix: str, change: Change, said: str) -> None:
    weight = random_weight(*SHAPE)
    tensors = dict(RECIPES[name].store(weight[None].mT if name == "mxfp4" else weight).tensors)
    changed = change(tensors.pop(suffix))
    tensors |= {} if changed is None else {suffix: changed}
    shape = (1, *SHAPE) if name == "mxfp4" else SHAPE
    with pytest.raises(ValueError) as caught:
        expanded(tensors, RECIPES[name].config, shape)
    line = str(caught.value)
    assert said in line and ": " in line and "\n" not in line, line
    assert line.count("again") <= 1, "the remedy once"


def test_a_nested_block_that_claims_to_be_huge_takes_no_memory() -> None:
    stored = RECIPES["nf4-nested"].store(random_weight(*SHAPE))
    said = json.loads(bytes(stored.tensors[_EXP].tolist())) | {"nested_blocksize": 10**400}
    result = expanded(stored.tensors | {_EXP: text(json.dumps(said))(stored.weight)}, {}, SHAPE)
    assert torch.equal(result, stored.weight), "240 scales are less than one block of 256"
    odd = RECIPES["nf4"].store(random_weight(5, 13))
    with pytest.raises(ValueError, match=r"even in number, two to a byte, have shape \[5, 13\]: take another"):
        expanded(odd.tensors, {}, (5, 13))


@pytest.mark.parametrize(("name", "settings", "said"), [
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format"),
    ("gptq", {"checkpoint_format": ["gptq"]}, "checkpoint_format"),
    ("ct-w4", {}, "config_groups"),
    ("ct-w4", {"config_groups": [1]}, "config_groups"),
    ("ct-w4", {"config_groups": {"a": 1, "b": {"weights": 2}}}, "config_groups"),
    ("ct-w4", {"config_groups": {"a": {"weights": {"num_bits": 9, "group_size": 32}}}}, "num_bits"),
    ("ct-w4", {"config_groups": {"a": {"weights": {"num_bits": [4], "group_size": 32}}}}, "num_bits"),
    ("ct-w4", {"config_groups": {"a": {"weights": {"num_bits": 4, "group_size": "32"}}}}, "config_groups"),
    ("fp8-block", {"weight_block_size": [0, 128]}, "weight_block_size"),
    ("fp8-block", {"weight_block_size": "128"}, "weight_block_size"),
])  # fmt: skip
def test_configs_that_do_not_fit_are_refused(name: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        expanded(RECIPES[name].store(random_weight(*SHAPE)).tensors, settings, SHAPE)


def test_what_the_config_leaves_open_the_tensors_tell() -> None:
    """Attention of 8 bits and experts of 4, say: words and scales tell which group fits, names are not needed."""
    both = {name: RECIPES[name].config["config_groups"]["group_0"] for name in ("ct-w4", "ct-w8")}
    for name in both:
        stored = RECIPES[name].store(random_weight(*SHAPE))
        assert torch.equal(expanded(stored.tensors, {"config_groups": both}, SHAPE), stored.weight)
    stored = RECIPES["ct-w4"].store(random_weight(*SHAPE))
    tensors = {**stored.tensors, ".weight_g_idx": torch.full((SHAPE[1],), -1, dtype=torch.int32)}
    result = expanded(tensors, RECIPES["ct-w4"].config, SHAPE)
    assert torch.equal(result, stored.weight), "an order that was never set is none"
    for name in ("gptq", "gptq-8", "awq"):  # shapes decide where the config says otherwise, as overrides of modules do
        stored = RECIPES[name].store(random_weight(*SHAPE))
        settings = {**RECIPES[name].config, "bits": 2, "group_size": 77, "quant_method": "auto-round"}
        assert torch.equal(expanded(stored.tensors, settings, SHAPE), stored.weight), name


@pytest.mark.parametrize("suffix", [".weight_scale_inv", ".scale", ".qscale_weight"])
@pytest.mark.parametrize("kind", [torch.float8_e8m0fnu, torch.uint8], ids=str)
def test_scales_that_are_exponents(suffix: str, kind: torch.dtype) -> None:
    exponent = torch.tensor([[120, 127], [130, 1], [0, 254]]).to(torch.uint8)
    code = torch.full(SHAPE, 1.5).to(torch.float8_e4m3fn)
    tensors = {".weight": code, suffix: exponent.view(kind)}
    got = expanded(tensors, {"weight_block_size": [32, 80]}, SHAPE)
    wanted = 1.5 * torch.ldexp(torch.ones(3, 2), exponent.int() - 127)
    assert torch.equal(got[::32, ::80], wanted)


def test_rows_may_have_scales_of_one_dimension_and_blocks_be_said_by_groups() -> None:
    code, scale = random_weight(*SHAPE).to(torch.float8_e4m3fn), torch.rand(96)
    assert torch.equal(expanded({".weight": code, ".weight_scale": scale}, {}, SHAPE), code.float() * scale[:, None])
    said = {"config_groups": {"group_0": {"weights": {"block_structure": [48, 32]}}}}
    block = torch.rand(2, 5)
    wanted = code.float() * block.repeat_interleave(48, 0).repeat_interleave(32, 1)
    assert torch.equal(expanded({".weight": code, ".weight_scale": block}, said, SHAPE), wanted)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_bytes_of_bitsandbytes_must_lie_row_by_row(shape: tuple[int, ...]) -> None:
    code, form = torch.full((24, 64), 127, dtype=torch.int8), torch.zeros(shape, dtype=torch.uint8)
    tensors = {".weight": code, ".SCB": torch.full((24,), 2.0), ".weight_format": form}
    assert bool((expanded(tensors, {}, (24, 64)) == 2).all())
    with pytest.raises(ValueError, match=r"\.weight_format must be 0"):
        expanded({**tensors, ".weight_format": form + 2}, {}, (24, 64))


@pytest.mark.parametrize(("grid", "name"), [
    ((1, 1), "fp8 with one scale"), ((96, 1), "fp8 with a scale for each row"), ((2, 1), "fp8 in blocks of 48 x all"),
])  # fmt: skip
def test_blocks_of_whole_rows_are_one_coding_of_all_shapes(grid: tuple[int, int], name: str) -> None:
    """So that one trial decides for them; compiled code, which counts in 32 bits, sees no larger blocks."""
    scale, settings, codings = torch.rand(grid) + 1, {"weight_block_size": [48, 1 << 32]}, set()
    for width in (160, 77):
        tensors = {".weight": torch.ones(96, width).to(torch.float8_e4m3fn), ".weight_scale": scale}
        codings.add(recognise(tensors, settings).coding)
        wanted = scale.repeat_interleave(96 // len(scale), 0).expand(96, width)
        assert torch.equal(expanded(tensors, settings, (96, width)), wanted)
    assert [coding.name for coding in codings] == [name]
