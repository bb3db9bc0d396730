"""Matrices that the real tools stored (`made/make.py` names them), against the tools' own numbers; and damaged ones."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from coded_weights import are_equal, expanded
from safetensors import safe_open
from torch import Tensor

from offload.kernels.expansion import COMPILED, REFERENCE, Expansion

MADE = sorted((Path(__file__).parent / "made").glob("*.safetensors"))
# how far what is expanded lies from the matrix before, where the tool's own numbers are not known
ERRORS = {"gptqm-2": 0.65, "gptqm-3": 0.3, "auto-w2": 0.4, "auto-w3": 0.19, "auto-mxfp4": 0.125, "auto-mxfp8": 0.033,
          "auto-fp8": 0.03}  # fmt: skip


def stored(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the settings."""
    with safe_open(path, "pt") as file:
        assert any(letter.isdigit() for letter in file.metadata()["tool"]), "a tool and its version"
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["settings"])  # noqa: SIM118


@pytest.mark.parametrize("expansion", [REFERENCE, COMPILED], ids=["reference", "compiled"])
@pytest.mark.parametrize("path", MADE, ids=lambda path: path.stem)
def test_numbers_are_those_of_the_tool(path: Path, expansion: Expansion) -> None:
    tensors, settings = stored(path)
    wanted, original = tensors.pop("wanted", None), tensors.pop("original", None)
    shape = tuple((original if wanted is None else wanted).shape)
    got = expanded(tensors, settings, shape, expansion=expansion)
    if wanted is None:
        assert original is not None
        error = (got - original.float()).norm() / original.float().norm()
        assert 0.01 < error < ERRORS[path.stem]
    elif path.stem == "gptqm-fp8":  # GPTQModel divides, here it is a product with the reciprocal
        torch.testing.assert_close(got, wanted, rtol=2**-22, atol=0)
        assert float(wanted.abs().max()) < 1, "and not the inverse"
    else:
        assert are_equal(got.to(wanted.dtype), wanted)


@pytest.mark.parametrize("path", MADE, ids=lambda path: path.stem)
def test_thirty_damaged_ones_are_refused_in_one_line(path: Path) -> None:
    """A tensor is missing, of another shape or type, or has a number that is none."""
    tensors, settings = stored(path)
    whole = tensors.pop("wanted", None)
    original = tensors.pop("original", None)
    shape = tuple((original if whole is None else whole).shape)
    chance = random.Random(path.stem)
    for _ in range(30):
        suffix = chance.choice([name for name in tensors if not name.endswith("g_idx")])
        kind = chance.choice(("missing", "shape", "type", "number"))
        changed = dict(tensors)
        tensor = changed.pop(suffix)
        if kind == "shape":
            changed[suffix] = tensor[:-1].contiguous()
        elif kind == "type":
            changed[suffix] = torch.zeros(tensor.shape, dtype=torch.int64)
        elif kind == "number" and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16):
            changed[suffix] = tensor.clone()
            changed[suffix].view(-1)[chance.randrange(tensor.numel())] = chance.choice((float("nan"), float("inf")))
        with pytest.raises((ValueError, AssertionError)) as caught:
            expanded(changed, settings, shape)
        if isinstance(caught.value, ValueError):
            assert "\n" not in str(caught.value) and ": " in str(caught.value), caught.value
