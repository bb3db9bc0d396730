"""The trained block: what it learns is what it guesses with, and its rows see what they may."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from offload import load
from offload.bench.pairs.block_pair import BLOCK, LAYERS, MASK, Block, block_losses, write_block
from offload.bench.pairs.training import packaged
from offload.checkpoint.packaged import PAIR
from offload.drafting.base import DraftText
from offload.sampling_options import Sampling
from offload.trees.topology import DynamicShape

PROMPT = [5, 90, 17, 300, 42, 7, 90, 17, 55, 2, 801]


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM, Block]:
    """A block as it begins, with some noise, so that no two of its parts are alike."""
    torch.manual_seed(0)
    target = packaged("target").requires_grad_(False)
    block = Block(target)
    with torch.no_grad():
        for weight in block.parameters():
            weight += 0.02 * torch.randn_like(weight)
            weight.copy_(weight.bfloat16().float())
    folder = tmp_path_factory.mktemp("block")
    write_block(block, folder)
    return folder, target, block


def test_trees_have_the_scores_that_were_learnt(learning: tuple[Path, LlamaForCausalLM, Block]) -> None:
    folder, target, block = learning
    shape = DynamicShape(24, 4)
    with load(PAIR / "target", folder, dtype="float32", tree="dynamic:24x4", lookup=False, context=256) as decoder:
        text = decoder.begin(PROMPT, Sampling(), shape=shape)
        for _ in range(2):
            decoder.step(text)
        text.recover()
        (tree,) = decoder.drafter.propose([DraftText(shape, text.tokens, text.sampler, text.caches.draft)])
        assert any(tree.path(node) for node in tree.score_of_node)
        # a longer text: the block begins in its midst, and what lies behind is not seen
        token_1S = torch.tensor([[*text.tokens, *[3] * BLOCK]])
        with torch.no_grad():
            hidden = target.model(input_ids=token_1S, output_hidden_states=True).hidden_states
            tapped_1SW = torch.cat([hidden[layer + 1] for layer in LAYERS], dim=-1)
            first_1A = torch.tensor([[4, len(text.tokens) - 1, 2]])
            wanted_KV = target.lm_head(block(token_1S, tapped_1SW, first_1A)[0, 1])
        for node, score_V in tree.score_of_node.items():
            assert float((score_V - wanted_KV[len(tree.path(node)) + 1]).abs().max()) < 2e-3


def test_a_position_learns_from_what_the_target_gives_there(learning: tuple[Path, LlamaForCausalLM, Block]) -> None:
    """Where the block gives the target's own distribution, nothing is to be learnt but its best as a label."""
    _, target, block = learning
    token_1S = torch.tensor([[*PROMPT, *PROMPT]])
    first_1A = torch.tensor([[3, 9]])
    with torch.no_grad():
        state_SD = target.model(input_ids=token_1S).last_hidden_state[0]
        place_AK = first_1A[0][:, None] + torch.arange(BLOCK) - 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Block, "forward", lambda *_: state_SD[place_AK][None])
            losses = block_losses(target, block, token_1S, first_1A)
        law_SV = target.lm_head(state_SD).log_softmax(-1)
        label_AK = -law_SV[place_AK[:, 1:]].amax(-1)
    torch.testing.assert_close(losses, 0.5 * label_AK.mean(0), atol=1e-4, rtol=1e-4)


def test_every_part_learns_from_every_position(learning: tuple[Path, LlamaForCausalLM, Block]) -> None:
    _, target, block = learning
    assert target.config.vocab_size > MASK
    losses = block_losses(target, block, torch.tensor([[*PROMPT, *PROMPT]]), torch.tensor([[3, 9]]))
    assert losses.shape == (BLOCK - 1,)
    for loss in losses:
        slopes = torch.autograd.grad(loss, [*block.parameters()], retain_graph=True)
        assert all(float(slope.abs().max()) > 0 for slope in slopes)
