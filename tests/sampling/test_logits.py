"""Logits in chunks: the same numbers and the same tokens as all at once, and never more in memory than was planned."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import model_shape
from rounding import sums
from tables import Verify
from test_families import config_of, tiny_model
from test_tiny import prompts
from tiny import FAMILIES, VOCAB_SIZE, save, save_pair
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, PreTrainedModel

import offload
from offload.calibration.kernels import KernelChoice
from offload.checkpoint.open import open_checkpoint
from offload.engine import opening as loading
from offload.engine.build import resident_model
from offload.kernels.match_rows import match_rows_reference
from offload.kernels.registry import REFERENCES
from offload.memory import planner
from offload.memory.plan import MemoryPlan
from offload.memory.sizes import MAX_LOGITS_ROWS
from offload.model.kv_cache import KVCache
from offload.model.parts import BatchPart
from offload.model.tree_model import TreeModel
from offload.sampling.logits import Logits, chunk_with
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.trees.token_tree import Draw, Offer, TokenTree, ancestors
from offload.trees.topology import best_first, chain
from offload.trees.verification import Acceptance, Trial, match, walk

NUM_NODES, MAX_ROWS = 45, 7
TREE = best_first((0.5, 0.3, 0.1), NUM_NODES, 6)


def numbered(num_rows: int, max_rows: int) -> tuple[Logits, list[tuple[int, int]]]:
    """Row n holds n; and the chunks that were asked for."""
    asked: list[tuple[int, int]] = []

    def score(lo: int, hi: int) -> Tensor:
        asked.append((lo, hi))
        return torch.arange(lo, hi)[:, None].expand(-1, 3)

    logits = Logits(num_rows, max_rows, score(0, min(num_rows, max_rows)), score)
    asked.clear()
    return logits, asked


@pytest.mark.parametrize(("num_rows", "max_rows"), [(1, 4), (4, 4), (5, 4), (11, 4), (3, 1)])
def test_every_row_is_where_it_is_looked_for(num_rows: int, max_rows: int) -> None:
    logits, asked = numbered(num_rows, max_rows)
    assert [int(row_V[0]) for row_V in logits] == list(range(num_rows)) == logits.whole()[:, 0].tolist()
    first_rows = list(range(max_rows, num_rows, max_rows))
    wanted = [(lo, min(lo + max_rows, num_rows)) for lo in first_rows]
    again = [(0, max_rows)] if first_rows else []
    assert asked == wanted + again + wanted, "a chunk is computed once in a walk"
    lo, chunk_CV = chunk_with(logits, num_rows - 1)
    assert int(chunk_CV[-1, 0]) == num_rows - 1 == lo + len(chunk_CV) - 1
    with pytest.raises(AssertionError, match="node"):
        logits[num_rows]


def count_scored_rows(model: TreeModel) -> list[int]:
    """How many rows the head gets at each call, from now on."""
    scored: list[int] = []
    head = model.meta_model.get_output_embeddings()
    model._hooks.append(head.register_forward_pre_hook(lambda _, args: scored.append(args[0].shape[-2])))
    return scored


def passes(model: TreeModel) -> tuple[Tensor, Logits, list[int]]:
    """A tree behind a prompt, taken in by the same pass: all logits at once, then in chunks; rows that heads scored."""
    token_T = torch.randint(3, VOCAB_SIZE, (20 + NUM_NODES,), generator=torch.Generator().manual_seed(3))
    position_T = torch.cat([torch.arange(20), torch.from_numpy(TREE.depth_N.copy()) + 20])
    sees_TT = torch.ones(len(token_T), len(token_T), dtype=torch.bool).tril()
    sees_TT[20:, 20:] = ancestors(TREE)
    scored, rows = count_scored_rows(model), (token_T, position_T, sees_TT)
    whole = model.forward(*rows, KVCache(model.num_layers, 80), num_logits=NUM_NODES)
    scored.clear()
    part = BatchPart(*rows, KVCache(model.num_layers, 80))
    logits = model.score([part], num_logits=NUM_NODES, max_rows=MAX_ROWS)
    return whole, logits, scored


# Plain, with experts, and with scores that are scaled, soft-capped, or made by layers that saw the scored rows alone.
KINDS = ("llama", "llama-tied", "gemma2", "gemma3", "mixtral", "granite", "cohere", "gemma4_text", "gemma3n_text")


@pytest.mark.parametrize("family", KINDS)
def test_chunks_hold_what_one_pass_computes(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]() if family in FAMILIES else config_of(family)
    if family == "gemma2":
        config.final_logit_softcapping = 3.0
    model = resident_model(open_checkpoint(save(tiny_model(config), tmp_path)), "float32")
    whole, logits, scored = passes(model)
    num_terms = 2 * model.meta_model.config.hidden_size  # of the head, and of the layers that saw the scored rows alone
    torch.testing.assert_close(logits.whole(), whole, **sums(whole, num_terms))
    assert scored == [7, 7, 7, 7, 7, 7, 3], "no more rows at once, and none twice"
    assert isinstance(model.meta_model.get_decoder(), PreTrainedModel), "the decoder is itself again"
    model.close()


def rows_at_a_time(monkeypatch: pytest.MonkeyPatch, num_rows: int | None) -> None:
    plan_once = planner._plan_once

    def planned(*args: Any, **settings: Any) -> MemoryPlan:
        plan = plan_once(*args, **settings)
        return plan if num_rows is None else replace(plan, num_logits_rows=num_rows)

    monkeypatch.setattr(planner, "_plan_once", planned)


SAMPLINGS = ({}, {"temperature": 0.7, "top_p": 0.9, "seed": 5}, {"temperature": 1.2, "seed": 6})


@pytest.mark.parametrize("rule", ["match", "sequoia"])
def test_chunks_do_not_change_what_is_written(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = save_pair(FAMILIES["llama"](), tmp_path)
    texts, at_once = [], REFERENCES._replace(match_rows=match_rows_reference)
    options = {"ram": "1GiB", "context": 128, "tree": "24x6", "threads": 1, "rule": rule}
    for num_rows, kernels in ((None, REFERENCES), (5, REFERENCES), (5, at_once)):
        with monkeypatch.context() as patch:
            rows_at_a_time(patch, num_rows)
            patch.setattr(loading, "pick_kernels", lambda *_, kernels=kernels: KernelChoice(kernels, ()))
            with offload.load(target, draft, **options) as decoder:
                scored = count_scored_rows(decoder.target._model)
                runs = [decoder.generate(prompts()[1], max_new_tokens=16, **sampling) for sampling in SAMPLINGS]
        texts.append([run.token_ids for run in runs])
        assert max(scored) == (24 if num_rows is None else num_rows), "the plan says how many rows are scored at once"
    assert texts[0] == texts[1] == texts[2]


class Peak(TorchDispatchMode):
    """The most bytes of tensors as wide as the vocabulary that were alive at once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width, self._alive, self.num_bytes = width, dict[int, int](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and tensor.ndim and tensor.shape[-1] == self._width:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        address = storage.data_ptr()
        if address not in self._alive:
            self._alive[address] = storage.nbytes()
            weakref.finalize(storage, self._alive.pop, address, None)
        self.num_bytes = max(self.num_bytes, sum(self._alive.values()))


WIDE = LlamaConfig(vocab_size=5003, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                   num_key_value_heads=1, max_position_embeddings=4096)  # fmt: skip


class Agreeing(TokenTree):
    """A path on which every guess is right, so that every chunk is looked at."""

    def child(self, node: int, token: int) -> int | None:
        return node + 1 if node + 1 < self.num_nodes else None

    def offers(self, node: int) -> Any:
        children = range(node + 1, min(node + 2, self.num_nodes))
        return (Offer(child, self.tokens[child], Draw.POINT_MASS, None) for child in children)


def by_ratio(tree: TokenTree, logits: Logits, sampler: Sampler, root_position: int) -> Acceptance:
    """What the ratio rules do, with children that always win."""
    return walk(tree, logits, sampler, lambda target_V, offers: (Trial(offer.child, 1.0, target_V) for offer in offers))


# `match` draws filtered rows one by one and keeps the noise of each depth, of which a real tree has a few dozen.
PEAKS: list[tuple[Verify, dict[str, Any]]] = [
    (match, {}),
    (match, {"temperature": 1.0}),
    (by_ratio, {}),
    (by_ratio, {"temperature": 1.0}),
    (by_ratio, {"temperature": 1.0, "top_p": 0.9, "top_k": 900}),
]


@pytest.mark.parametrize(("verify", "settings"), PEAKS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_is_the_one_that_was_planned(
    verify: Verify, dtype: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(save(tiny_model(WIDE), tmp_path))
    model, shape = resident_model(checkpoint, dtype), model_shape(checkpoint, dtype)
    tree, causal_TT = Agreeing(chain(767), torch.zeros(768).long()), torch.ones(768, 768, dtype=torch.bool).tril()
    at_once = REFERENCES._replace(match_rows=match_rows_reference)
    sampler = Sampler(Sampling(**settings), WIDE.vocab_size, kernels=at_once)
    with Peak(WIDE.vocab_size) as peak:
        rows = (tree.token_N, torch.arange(768), causal_TT, KVCache(model.num_layers, 768))
        logits = model.score([BatchPart(*rows)], num_logits=768, max_rows=MAX_LOGITS_ROWS)
        assert len(verify(tree, logits, sampler, 0).nodes) == 768
    planned_bytes = shape.logits_row_bytes * MAX_LOGITS_ROWS
    assert 0.3 * planned_bytes < peak.num_bytes <= planned_bytes, f"{peak.num_bytes / planned_bytes:.2f} of the plan"
