"""The trained MTP layer: what it learns is what it guesses with, also once it is made large."""

from pathlib import Path

import pytest
import torch
from plans import specified_files
from transformers import LlamaForCausalLM

from offload import load
from offload.bench.pairs.mtp_pair import MtpLayer, depth_losses, depth_outputs, write_carrying
from offload.bench.pairs.training import packaged
from offload.checkpoint.open import open_checkpoint
from offload.checkpoint.packaged import inflate
from offload.drafting.base import DraftText
from offload.memory.plan import MemoryBudget, MemoryPlan
from offload.memory.planner import least_budget, plan_memory
from offload.model.headers import specified
from offload.planning.draft_kinds import files_of
from offload.sampling_options import Sampling
from offload.trees.topology import DynamicShape

PROMPT = [5, 90, 17, 300, 42, 7, 90, 17, 55, 2, 801]


@pytest.fixture(scope="module")
def carrying(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM, MtpLayer]:
    """A layer as it begins, with some noise, so that no two of its parts are alike."""
    torch.manual_seed(0)
    target = packaged("target").requires_grad_(False)
    layer = MtpLayer(target)
    with torch.no_grad():
        for weight in layer.parameters():
            weight += 0.02 * torch.randn_like(weight)
        # sharp enough for deep trees
        width = len(layer.eh_proj.weight)
        layer.eh_proj.weight[:, width:] += torch.eye(width)
        for weight in layer.parameters():
            weight.copy_(weight.bfloat16().float())
    folder = tmp_path_factory.mktemp("carrying") / "target"
    write_carrying(layer.stored(), folder)
    return folder, target, layer


@pytest.mark.parametrize("is_large", [False, True])
def test_trees_have_the_scores_that_were_learnt(
    carrying: tuple[Path, LlamaForCausalLM, MtpLayer], is_large: bool, tmp_path: Path
) -> None:
    folder, target, layer = carrying
    if is_large:
        folder = inflate(folder, tmp_path / "large", 30_000_000, progress=lambda done, total: None)
    with load(folder, "mtp", dtype="float32", tree="dynamic:24x4", lookup=False, context=256) as decoder:
        text = decoder.begin(PROMPT, Sampling(), shape=DynamicShape(12, 3))
        decoder.step(text)
        text.recover()
        shape = DynamicShape(24, 4)
        (tree,) = decoder.drafter.propose([DraftText(shape, text.tokens, text.sampler, text.caches.draft)])
        assert any(tree.path(node) for node in tree.score_of_node)
        for node, score_V in tree.score_of_node.items():
            token_1S = torch.tensor([[*text.tokens, *tree.path(node)]])
            with torch.no_grad():
                hidden_1SD = target.model(input_ids=token_1S).last_hidden_state
                *_, out_1SD = depth_outputs(layer, token_1S, hidden_1SD, 1 + len(tree.path(node)))
                wanted_V = target.lm_head(out_1SD[0, -1])
            assert float((score_V - wanted_V).abs().max()) < 2e-3
        text.caches.draft.commit([])


def test_streamed_text_with_large_trees_is_that_of_no_draft(carrying: tuple[Path, LlamaForCausalLM, MtpLayer]) -> None:
    files = specified_files(*files_of([specified(open_checkpoint(carrying[0]))], "mtp", None))

    def plan(ram: int) -> MemoryPlan:
        return plan_memory(files, MemoryBudget(ram_bytes=ram, dtype="float32", context=256), 256)

    texts = []
    for draft, tree, ram in ((None, "none", None), ("mtp", "dynamic:256x6", least_budget(plan))):
        with load(carrying[0], draft, ram, tree, dtype="float32", lookup=False, context=256) as decoder:
            assert decoder.plan.is_streamed == (draft is not None)
            options = {"max_new_tokens": 24, "seed": 7}
            texts.append([decoder.generate(PROMPT, temperature=heat, **options).token_ids for heat in (0.0, 0.7)])
    assert texts[0] == texts[1]


def test_every_part_learns_from_every_depth(carrying: tuple[Path, LlamaForCausalLM, MtpLayer]) -> None:
    _, target, layer = carrying
    losses = depth_losses(target, layer, torch.tensor([PROMPT, PROMPT[::-1]]), 3)
    assert len(losses) == 3
    for loss in losses:
        slopes = torch.autograd.grad(loss, [*layer.parameters()], retain_graph=True)
        assert all(float(slope.abs().max()) > 0 for slope in slopes)
