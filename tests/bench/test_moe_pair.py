"""The mixture of experts for benches: it begins as the dense model, learns, goes on where it was cut, is kept whole.

Why: figures of experts on demand rest on how this pair routes and agrees. Models are tiny and texts are patterns.
"""

from pathlib import Path

import pytest
import torch
from small_llama import SIZES, save_small
from torch import Tensor
from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM

from offload.bench.pairs import moe_pair as making
from offload.bench.pairs import training
from offload.bench.pairs.moe_pair import ExpertSizes, target_loss, upcycled
from offload.bench.pairs.training import Course, train, windows

TINY = ExpertSizes(8, 2, 48)
IDS = torch.arange(6000) % 7 + torch.arange(6000) // 500  # what comes next is easy; which numbers occur is the text's


@pytest.fixture
def dense(tmp_path: Path) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM.from_pretrained(save_small(tmp_path / "dense"), dtype=torch.float32)


def tokens() -> Tensor:
    return windows(IDS, 512, 128, 0)


def without_noise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(making, "_WEIGHT_NOISE", 0.0)
    patch.setattr(making, "_ROUTER_NOISE", 0.0)


@torch.no_grad()
def layer_errors(dense: LlamaForCausalLM, mixture: Qwen3MoeForCausalLM) -> list[float]:
    """How far each feed-forward part of the mixture is from the dense one, on the same rows."""
    hidden = torch.randn(1, 64, SIZES["hidden_size"], generator=torch.Generator().manual_seed(3))
    pairs = zip(dense.model.layers, mixture.model.layers, strict=True)
    outs = [(ours.mlp(hidden), other.mlp(hidden)) for ours, other in pairs]
    return [((got - wanted).norm() / wanted.norm()).item() for wanted, got in outs]


def test_mixture_begins_as_the_dense_model(dense: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    noisy = layer_errors(dense, upcycled(dense, TINY, tokens(), 0))
    without_noise(monkeypatch)
    assert max(layer_errors(dense, upcycled(dense, TINY, tokens(), 0))) < 1e-5 < min(noisy)
    monkeypatch.setattr(making, "_ROUTER_NOISE", 1.0)  # the control: slices of several copies are not the whole
    assert min(layer_errors(dense, upcycled(dense, TINY, tokens(), 0))) > 0.1


def learn(model: Qwen3MoeForCausalLM, state: Path, num_steps: int, stop_at: int | None = None) -> list[float]:
    """Train for `num_steps`; cut after step `stop_at`."""
    seen = list[float]()

    def loss_of(step: int) -> Tensor:
        loss = target_loss(model, windows(IDS, 512, 128, step))
        seen.append(loss.item())
        return loss

    def progress(num_done: int, num_all: int) -> None:
        assert num_all == num_steps
        if num_done == stop_at:
            raise KeyboardInterrupt

    train(model, loss_of, Course(num_steps, 1e-2), state, progress)
    return seen


@pytest.mark.full
@pytest.mark.parametrize("stop_at", [5, 7], ids=["as it is saved", "between"])
def test_a_cut_run_ends_with_the_weights_of_an_uncut_one(
    dense: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    monkeypatch.setattr(training, "_SAVE_EVERY", 5)
    uncut, cut, again = (upcycled(dense, TINY, tokens(), 0) for _ in range(3))
    learn(uncut, tmp_path / "uncut", 12)
    with pytest.raises(KeyboardInterrupt):
        learn(cut, tmp_path / "cut", 12, stop_at)
    assert len(learn(again, tmp_path / "cut", 12)) == 12 - 5
    assert all(torch.equal(left, other) for left, other in zip(uncut.parameters(), again.parameters(), strict=True))
    assert {path.name for path in tmp_path.iterdir()} == {"dense", "uncut", "cut"}
    assert not torch.equal(cut.lm_head.weight, uncut.lm_head.weight)
