"""One pass over several texts: each row gets what it gets alone, and no text sees another."""

from pathlib import Path

import pytest
import torch
from test_path_rows import checkpoint_of
from torch import Tensor

import offload
from offload.checkpoint.safetensors import open_checkpoint
from offload.engine.build import resident_model
from offload.model.invariant import InvariantRows
from offload.model.kv_cache import KVCache
from offload.model.parts import BatchPart
from offload.model.streamed import StreamedModel
from offload.trees.token_tree import ancestors
from offload.trees.topology import Topology

TREE = Topology.from_parents([-1, 0, 0, 1, 1, 3])
TEXTS = [list(range(5, 5 + length)) for length in (41, 3, 70)]
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def model_of(family: str, base: Path) -> StreamedModel:
    return resident_model(open_checkpoint(checkpoint_of(family, base)), "float32")


def causal(num_rows: int) -> Tensor:
    return torch.ones(num_rows, num_rows, dtype=torch.bool).tril()


def prompt_of(text: list[int], cache: KVCache) -> BatchPart:
    return BatchPart(torch.tensor(text), torch.arange(len(text)), causal(len(text)), cache)


def tree_of(text: list[int], num_pending: int, cache: KVCache) -> BatchPart:
    """A tree behind a text of which so many rows come in the same pass."""
    depth_N = torch.from_numpy(TREE.depth_N.copy()) + len(text)
    position_U = torch.cat([torch.arange(len(text) - num_pending, len(text)), depth_N])
    sees_NU = torch.cat([torch.ones(6, num_pending, dtype=torch.bool), ancestors(TREE)], dim=1)
    return BatchPart(torch.arange(20, 26) + len(text), position_U, sees_NU, cache)


def alone(model: StreamedModel, text: list[int]) -> Tensor:
    """Logits after every node of a tree behind a text, which comes in a pass of its own."""
    own = model.new_cache(100)
    model.forward(*prompt_of(text, own))
    own.commit(range(len(text)))
    return model.forward(*tree_of(text, 0, own))


def together(model: StreamedModel, lent: list[KVCache]) -> list[Tensor]:
    """Compute all texts in one pass; the first and the last bring their prompts along."""
    KVCache.side_by_side(lent)
    model.forward(*prompt_of(TEXTS[1], lent[1]))
    lent[1].commit(range(len(TEXTS[1])))
    prompts = [prompt_of(TEXTS[index], lent[index]) for index in (0, 2)]
    trees = [tree_of(text, 0 if index == 1 else len(text), lent[index]) for index, text in enumerate(TEXTS)]
    return list(model.forward_parts([*prompts, *trees], num_logits=18).split(6))


FAMILIES = ("llama", "qwen3-sliding", "gemma2", "gemma3", "phi3", "mixtral", "deepseek_v3", "gemma3n_text",
            "gemma4_text", "gpt_oss")  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_several_texts_get_what_they_get_alone(family: str, base: Path) -> None:
    model = model_of(family, base)
    wanted = [alone(model, text) for text in TEXTS]
    model.share_passes()
    for got_NV, wanted_NV in zip(together(model, [model.new_cache(100) for _ in TEXTS]), wanted, strict=True):
        torch.testing.assert_close(got_NV, wanted_NV, **CLOSE)


def test_bits_stay_where_rows_are_invariant(base: Path) -> None:
    model = model_of("llama", base)
    model.be_invariant(InvariantRows((1,)))
    wanted = [alone(model, text) for text in TEXTS]
    got = together(model, [model.new_cache(100) for _ in TEXTS])
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


def test_masks_that_are_calculated_with_are_refused(base: Path) -> None:
    with pytest.raises(offload.UserError, match="`parallel` must be 1 for doge"):
        model_of("doge", base).share_passes()


def test_a_text_is_copied_to_another_place(base: Path) -> None:
    model, lent = model_of("llama", base), []
    lent.extend(model.new_cache(100) for _ in range(3))
    KVCache.side_by_side(lent)
    model.forward(*prompt_of(TEXTS[0], lent[2]))
    lent[2].commit(range(41))
    lent[0].copy_from(lent[2], 41)
    got = [model.forward(*tree_of(TEXTS[0], 0, one)) for one in (lent[0], lent[2])]
    assert torch.equal(*got) and lent[0].length == 41
