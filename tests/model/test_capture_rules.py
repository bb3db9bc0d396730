"""Recording by the rules of CUDA and of torch's allocator, on paper: what a recording refuses breaks nothing else.

What those rules are, `paper_cuda` says.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paper_cuda import Capturing, Paper, draft_on_card
from strict_place import OnCard, place
from test_families import CHANGING, tiny_model
from tiny import FAMILIES, build, save

from offload.checkpoint.safetensors import Checkpoint, open_checkpoint
from offload.engine.build import resident_model
from offload.model.cuda_graphs import CudaRecorder, use_graphs
from offload.model.streamed import StreamedModel

TORCHES = {"torch 2.11": False, "torch 2.13": True}


@pytest.fixture(params=TORCHES)
def paper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Paper:
    return Paper(closes_first=TORCHES[request.param]).install(monkeypatch)


def looking(*_: Any) -> None:
    """A pass that asks for a number of the card."""
    float(torch.ones(2, device=place()).sum())


def failing(*_: Any) -> None:
    raise ValueError("this family goes by the length of a text")


def first_rows(model: StreamedModel) -> torch.Tensor:
    rows = torch.arange(3)
    causal = torch.ones(3, 3, dtype=torch.bool).tril()
    logits = model.forward(rows + 5, rows, causal, model.new_cache(8))
    return logits.held if isinstance(logits, OnCard) else logits


def checkpoint_of(family: str, directory: Path) -> Checkpoint:
    model = tiny_model(CHANGING["dynamic"]()) if family in CHANGING else build(FAMILIES[family]())
    return open_checkpoint(save(model, directory))


@pytest.mark.parametrize(
    ("family", "hook", "line"),
    [
        ("dynamic", None, "not permitted when stream is capturing"),
        ("llama", looking, "not permitted when stream is capturing"),
        ("llama", failing, "goes by the length of a text"),
    ],
    ids=["dynamic rope", "looks", "fails"],
)
def test_a_draft_that_cannot_be_recorded_runs_on_without(
    family: str, hook: Callable[..., None] | None, line: str, paper: Paper, tmp_path: Path
) -> None:
    """Logits are equal, one line that says so, and an allocator that gives memory back to the layers that come next."""
    checkpoint = checkpoint_of(family, tmp_path)
    wanted = first_rows(resident_model(checkpoint, "float32"))
    with Capturing(paper):
        model = draft_on_card(checkpoint)
        if hook is not None:
            last = model.meta_model.get_decoder().layers[-1]
            last.register_forward_pre_hook(lambda *_: hook() if paper.capturing is not None else None)
        told = use_graphs(model)
        torch.cuda.empty_cache()
        got = first_rows(model)
    assert told is not None and told.startswith("the draft runs without CUDA graphs") and line in told
    assert "\n" not in told and not paper.underway and paper.num_replays == 0 and paper.now is paper.default
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


def test_a_draft_that_can_be_is_recorded(paper: Paper, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("llama", tmp_path)
    with Capturing(paper):
        model = draft_on_card(checkpoint)
        assert use_graphs(model) is None
        torch.cuda.empty_cache()
        first_rows(model)
    assert paper.num_replays == 2, "one to see whether it goes, and the pass"


def test_recordings_go_on_behind_one_that_failed(paper: Paper) -> None:
    """They share its pool."""
    record = CudaRecorder(torch.cuda.Stream(place()))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not permitted"):
            record(lambda: torch.cuda.empty_cache() if paper.capturing else None)
        torch.cuda.empty_cache()
        record(lambda: None)()
    assert paper.num_replays == 4


def test_a_capture_that_cannot_begin_is_closed_as_well(paper: Paper) -> None:
    record = CudaRecorder(paper.default)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="non-default stream"):
        record(lambda: None)
    torch.cuda.empty_cache()


def test_an_allocator_that_is_left_open_refuses(paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake that was: nobody closes what a broken capture has opened. Torch 2.11 alone minds."""
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: None)
    checkpoint = checkpoint_of("dynamic", tmp_path)
    with Capturing(paper):
        assert use_graphs(draft_on_card(checkpoint)) is not None
    if paper.closes_first:
        torch.cuda.empty_cache()
        return
    with pytest.raises(RuntimeError, match="captures_underway"):
        torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_card_memory_comes_back_behind_a_failed_recording() -> None:
    number = torch.zeros(8, device="cuda:0")
    record = CudaRecorder(torch.cuda.Stream(number.device))
    with pytest.raises(RuntimeError):
        record(lambda: print(float(number.sum())) if torch.cuda.is_current_stream_capturing() else None)
    torch.cuda.empty_cache()
    replay = record(lambda: number.add_(1))
    replay()
    assert number.tolist() == [3.0] * 8
