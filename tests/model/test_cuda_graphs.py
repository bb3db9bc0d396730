"""Recorded passes: padding and buckets with direct calls in the place of a recording, and recording on paper.

By the rules of CUDA and of torch's allocator, which `paper_cuda` says, what a recording refuses breaks nothing else.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import needs_cuda
from paper_cuda import Capturing, Paper, draft_on_card
from passes import causal
from strict_place import OnCard, place
from test_families import CHANGING, tiny_model
from tiny import FAMILIES, VOCAB_SIZE, build, save

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.open import open_checkpoint
from offload.engine.build import resident_model
from offload.model import cuda_graphs as graphed
from offload.model.cuda_graphs import CudaRecorder, Graphs, Work, use_graphs
from offload.model.kv_cache import KVCache
from offload.model.parts import BatchPart
from offload.model.path_attention import path_attention
from offload.model.tree_model import TreeModel
from offload.trees.spec import parse_tree
from offload.trees.token_tree import ancestors


class Calls:
    """Stands in for a recorder; counts what was recorded."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def __call__(self, work: Work) -> Work:
        self.num_recorded += 1
        work()
        return work


def models(family: str, directory: Path) -> tuple[TreeModel, TreeModel, Calls]:
    checkpoint = open_checkpoint(save(build(FAMILIES[family]()), directory))
    plain, replayed, calls = resident_model(checkpoint, "float32"), resident_model(checkpoint, "float32"), Calls()
    replayed.set_attention_kernel(path_attention)
    replayed.set_graph_runner(Graphs(replayed, lambda: calls))
    return plain, replayed, calls


def passes(model: TreeModel, cache: KVCache) -> list[torch.Tensor]:
    """A prompt, then trees grown level by level, of which a path is kept; several widths, and an extent crossed."""
    generator, out = torch.Generator().manual_seed(1), []
    prompt = torch.randint(3, VOCAB_SIZE, (29,), generator=generator)
    out.append(model.forward(prompt, torch.arange(29), causal(29), cache, num_logits=2))
    cache.commit(range(29))
    for spec in ("8x3", "sequences:3x2", "chain:2", "12x3"):
        topology = parse_tree(spec).build()
        depth_N, sees_NN = torch.from_numpy(topology.depth_N.copy()), ancestors(topology)
        token_N = torch.randint(3, VOCAB_SIZE, (topology.num_nodes,), generator=generator)
        for level in topology.levels:
            position_U = depth_N[: level.stop] + cache.length
            out.append(model.forward(token_N[level], position_U, sees_NN[level, : level.stop], cache))
        deep = topology.num_nodes - 1
        cache.commit([node for node in range(topology.num_nodes) if sees_NN[deep, node]])
    return out


@pytest.mark.parametrize("family", ["llama", "qwen3-sliding", "gemma2"])
def test_padded_passes_give_the_same_logits(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "WIDTHS", (2, 5, 12))
    plain, replayed, calls = models(family, tmp_path)
    num_slots = 29 + 24 + 12
    wanted = passes(plain, KVCache(plain.num_layers, num_slots))
    got = passes(replayed, KVCache(replayed.num_layers, num_slots))
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    assert calls.num_recorded == 2, "a width is recorded once; the prompt is wider than any of them"


def test_a_pass_that_is_too_deep_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk in a recording has room for a fixed number of columns."""
    monkeypatch.setattr(graphed, "_MOST_COLUMNS", 64)
    plain, replayed, calls = models("llama", tmp_path)
    tree_TU = torch.ones(3, 70, dtype=torch.bool).tril(67)
    tree_TU[0, :] = False
    tree_TU[0, 67] = True  # so that there is next to nothing that all rows see
    out = []
    for model in (plain, replayed):
        cache = KVCache(model.num_layers, 70)
        cache.fix()
        model.forward(torch.arange(67), torch.arange(67), causal(67), cache)
        out.append(model.forward(torch.arange(3), torch.arange(70), tree_TU, cache))
    torch.testing.assert_close(*out, atol=2e-5, rtol=1e-4)
    assert calls.num_recorded == 1, "the first pass alone"


def grown(model: TreeModel, cache: KVCache) -> torch.Tensor:
    """A pass of one row behind what there is, which is not kept."""
    return model.forward(torch.tensor([9]), torch.tensor([cache.length]), causal(1), cache)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_texts_that_have_shared_a_pass_go_on_alone(family: str, tmp_path: Path) -> None:
    plain, replayed, _ = models(family, tmp_path)
    results = []
    for model in (plain, replayed):
        model.share_passes()
        lent = [model.new_cache(40) for _ in range(2)]
        KVCache.side_by_side(lent)
        prompts = [torch.arange(5, 5 + length) for length in (11, 3)]
        pairs = zip(prompts, lent, strict=True)
        model.forward_parts([BatchPart(ids, torch.arange(len(ids)), causal(len(ids)), cache) for ids, cache in pairs])
        for ids, cache in zip(prompts, lent, strict=True):
            cache.commit(range(len(ids)))
        results.append([grown(model, cache) for cache in lent])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_a_full_cache_has_room_for_padding(tmp_path: Path) -> None:
    """The last rows of a cache are real ones: padding must not land on them."""
    plain, replayed, _ = models("llama", tmp_path)
    token_T, position_T = torch.arange(3, 9), torch.arange(6)
    logits = []
    for model in (plain, replayed):
        cache = KVCache(model.num_layers, 6)
        for lo, hi in ((0, 3), (3, 6)):  # three rows are padded to four
            logits.append(model.forward(token_T[lo:hi], position_T[:hi], causal(6)[lo:hi, :hi], cache))
        logits.append(model.forward(token_T[5:], position_T, causal(6)[5:], cache))
    for theirs, ours in zip(logits[:3], logits[3:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_padding_sees_numbers_and_slots_never_written_hold_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that is masked everywhere is NaN in some kernels of CUDA."""
    _, replayed, _ = models("llama", tmp_path)
    recorded = Graphs(replayed, Calls)
    replayed.set_graph_runner(recorded)
    replayed.forward(torch.arange(3), torch.arange(3), causal(3), KVCache(replayed.num_layers, 8))
    ((_, recording),) = recorded._recordings.items()
    walk_WL = recording.input_WI[:, graphed._INPUTS :]
    assert len(walk_WL) == 4 and torch.equal(walk_WL[3], walk_WL[2]), "what the last row sees"
    # Memory as an allocator may hand it out: NaN in every slot that was never written.
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(torch.nan))
    _, replayed, _ = models("llama", tmp_path)
    assert not grown(replayed, KVCache(replayed.num_layers, 40)).isnan().any()


TORCHES = {"torch 2.11": False, "torch 2.13": True}


@pytest.fixture(params=TORCHES)
def paper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Paper:
    return Paper(closes_first=TORCHES[request.param]).install(monkeypatch)


def failing(*_: Any) -> None:
    raise ValueError("this family goes by the length of a text")


def first_rows(model: TreeModel) -> torch.Tensor:
    logits = model.forward(torch.arange(5, 8), torch.arange(3), causal(3), model.new_cache(8))
    return logits.held if isinstance(logits, OnCard) else logits


def checkpoint_of(family: str, directory: Path) -> Checkpoint:
    model = tiny_model(CHANGING["dynamic"]()) if family in CHANGING else build(FAMILIES[family]())
    return open_checkpoint(save(model, directory))


REFUSED = "not permitted when stream is capturing"
HOOKS = [
    ("dynamic", None, REFUSED),
    ("llama", lambda *_: float(torch.ones(2, device=place()).sum()), REFUSED),
    ("llama", failing, "goes by the length of a text"),
]


@pytest.mark.parametrize(("family", "hook", "line"), HOOKS, ids=["dynamic rope", "looks", "fails"])
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
        text = use_graphs(model)
        torch.cuda.empty_cache()
        got = first_rows(model)
    assert text is not None and text.startswith("the draft runs without CUDA graphs") and line in text
    assert "\n" not in text and not paper.underway and paper.num_replays == 0 and paper.now is paper.default
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


def test_a_draft_that_can_be_is_recorded(paper: Paper, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("llama", tmp_path)
    wanted = first_rows(resident_model(checkpoint, "float32"))
    with Capturing(paper):
        model = draft_on_card(checkpoint)
        assert use_graphs(model) is None
        torch.cuda.empty_cache()
        torch.testing.assert_close(first_rows(model), wanted, atol=2e-5, rtol=1e-4)
    assert paper.num_replays == 2, "one to see whether it goes, and the pass"


@pytest.mark.gpu
@needs_cuda
def test_on_a_card_memory_comes_back_behind_a_failed_recording() -> None:
    number = torch.zeros(8, device="cuda:0")
    record = CudaRecorder(torch.cuda.Stream(number.device))
    with pytest.raises(RuntimeError):
        record(lambda: print(float(number.sum())) if torch.cuda.is_current_stream_capturing() else None)
    torch.cuda.empty_cache()
    # torch 2.11 takes no other recording into that pool
    replay = CudaRecorder(torch.cuda.Stream(number.device))(lambda: number.add_(1))
    replay()
    assert number.tolist() == [3.0] * 8
