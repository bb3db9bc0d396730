"""Feed-forwards take rows in parts of as many as a plan counts, with the bits of all rows at once; others are left."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from transformers import LlamaConfig, MixtralConfig, Phi3Config

from offload.checkpoint.safetensors import open_checkpoint
from offload.checkpoint.sizes import model_shape
from offload.memory.plan import INNER_ROWS
from offload.model.invariant import InvariantRows
from offload.model.parts import take_rows_in_parts

_SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
                          "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}  # fmt: skip
DENSE = [LlamaConfig, Phi3Config]


def rows_seen(inner: nn.Module) -> list[int]:
    """How many rows come to its last matrix at a time, from now on."""
    seen = list[int]()
    inner.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[-2]))
    return seen


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_rows_in_parts_have_the_bits_of_all_rows_at_once(kind: Any, dtype: torch.dtype) -> None:
    model = tiny.build(kind(**_SIZES)).to(dtype)
    inner = model.model.layers[0].mlp
    rows_1TD = torch.randn(1, 3 * INNER_ROWS + 17, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    with InvariantRows([torch.get_num_threads()]):
        wanted = inner(rows_1TD)
        take_rows_in_parts(model.model.layers)
        seen = rows_seen(inner)
        assert torch.equal(inner(rows_1TD), wanted)
        assert max(seen) <= INNER_ROWS < sum(seen) == rows_1TD.shape[1]
        seen.clear()
        assert torch.equal(inner(rows_1TD[:, :9]), wanted[:, :9]) and seen == [9], "few rows are one part"


@pytest.mark.parametrize("kind", [*DENSE, MixtralConfig])
def test_a_plan_counts_on_parts_only_where_there_are_some(kind: Any, tmp_path: Path) -> None:
    config = kind(**_SIZES)
    model = tiny.build(config)
    shape = model_shape(open_checkpoint(tiny.save(model, tmp_path)))
    take_rows_in_parts(model.model.layers)
    is_in_parts = all("forward" in vars(layer.mlp) for layer in model.model.layers)
    assert bool(shape.inner_row_bytes) == is_in_parts == (kind in DENSE)
    assert 0 <= shape.inner_row_bytes < shape.row_bytes


def test_a_feed_forward_that_is_given_more_than_rows_is_left_alone() -> None:
    class Guided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, rows: torch.Tensor, guide: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.gate_proj(rows) * guide)

    layer = nn.Module()
    layer.mlp = Guided()
    take_rows_in_parts([layer])
    assert "forward" not in vars(layer.mlp)
