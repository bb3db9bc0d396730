"""Who has which rows: all of them once, in whole heads where that can be, and as near to the shares as that allows."""

from dataclasses import replace

import numpy as np
import pytest
from matrix import matrix
from tiny import FAMILIES, build, save

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.cuts import MatrixRows
from offload.checkpoint.open import open_checkpoint
from offload.checkpoint.tensors import Coded
from offload.distributed.sharding import Sharding, ShardRole, share_layers, split_rows
from offload.encoding.gguf import GgufBlocks
from offload.errors import UserError

EVEN_3 = (1 / 3, 1 / 3, 1 / 3)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("families")
    return {name: open_checkpoint(save(build(make()), folder / name)) for name, make in FAMILIES.items()}


def _roles(sharding: Sharding) -> set[ShardRole]:
    return {matrix.role for matrix in sharding.matrices.values()}


@matrix("seed", range(30), always=[0, 1, 2], daily=3)
def test_rows_are_split_exactly(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_ranks, step = int(rng.integers(1, 6)), int(rng.choice([1, 4, 16]))
    num_rows, fractions = int(rng.integers(num_ranks * step, 4000)), rng.dirichlet(np.ones(num_ranks))
    parts = split_rows(num_rows, fractions.tolist(), step)
    assert [row for rows in parts for row in range(*rows)] == list(range(num_rows))
    assert all(rows.num for rows in parts)
    assert num_rows < 4 * step * num_ranks or all(rows.lo % step == 0 for rows in parts)
    wanted = np.cumsum(fractions)[:-1] * num_rows
    assert all(abs(rows.hi - hi) <= step * num_ranks for rows, hi in zip(parts, wanted, strict=False))


def test_what_cannot_be_cut_is_refused(checkpoints: dict[str, Checkpoint]) -> None:
    """A line on GGUF names the coding of blocks, not that of norms, which are plain numbers with 1 added."""
    assert [rows.num for rows in split_rows(32, EVEN_3)] == [11, 10, 11]
    with pytest.raises(UserError, match="a matrix of 2 rows cannot be shared by 3 ranks"):
        split_rows(2, EVEN_3)
    for family in ("mixtral", "qwen3-moe"):
        with pytest.raises(UserError, match=r"layers cannot be shared, .* cannot be cut by rows: run it on one rank"):
            share_layers(checkpoints[family], (0.5, 0.5))
    made, tensors = checkpoints["gemma3"], {}
    for name in sorted(made.tensors, key=lambda name: "norm" not in name):  # norms first
        kind = "F32" if "norm" in name else "Q4_K"
        tensors[name] = made.tensors[name]._replace(coded=Coded(GgufBlocks(kind)))
    with pytest.raises(UserError, match="weights are stored as Q4_K: run it as stages"):
        share_layers(replace(made, tensors=tensors), EVEN_3)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral-sliding"])
def test_llama_like_layers_are_cut_by_heads(checkpoints: dict[str, Checkpoint], family: str) -> None:
    sharding = share_layers(checkpoints[family], (0.5, 0.5))
    assert _roles(sharding) == {ShardRole.OWN, ShardRole.JOINED}
    assert sharding.matrices["self_attn.q_proj"].rows_R == (MatrixRows(0, 32), MatrixRows(32, 64))
    assert sharding.matrices["self_attn.k_proj"].rows_R == (MatrixRows(0, 16), MatrixRows(16, 32))
    assert sharding.input_widths("self_attn.o_proj") == [32, 32]
    assert sharding.input_widths("mlp.down_proj") == sharding.widths("mlp.gate_proj") == sharding.widths("mlp.up_proj")


def test_more_ranks_than_heads_and_fused_matrices_are_cut_by_rows_alone(checkpoints: dict[str, Checkpoint]) -> None:
    assert _roles(share_layers(checkpoints["llama"], EVEN_3)) == {ShardRole.GATHERED}
    assert _roles(share_layers(checkpoints["phi3"], (0.5, 0.5))) == {ShardRole.GATHERED}


@pytest.mark.parametrize("fractions", [(0.5, 0.5), (0.3, 0.7), EVEN_3])
def test_ranks_read_every_byte_of_the_layers_once(
    checkpoints: dict[str, Checkpoint], fractions: tuple[float, ...]
) -> None:
    for family in ("llama", "qwen2", "phi3", "gemma3"):
        whole = checkpoints[family]
        sharding = share_layers(whole, fractions)
        parts = [sharding.checkpoint_of(rank, whole) for rank in range(len(fractions))]
        for name, entry in whole.tensors.items():
            cuts = [part.tensors[name] for part in parts]
            if cuts[0] == entry:  # norms, and what lies around the layers
                is_whole = "k_proj" in name or "v_proj" in name  # where all ranks compute attention
                assert len(entry.shape) == 1 or "layers" not in name or is_whole > sharding.has_own_heads
                continue
            assert [cut.lo for cut in cuts] == [entry.lo, *(cut.hi for cut in cuts[:-1])]
            assert cuts[-1].hi == entry.hi
            assert sum(cut.shape[0] for cut in cuts) == entry.shape[0]
