"""Sections of a model, one after another: to the bit what the whole computes, and nothing held that is another's."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import small_t5
import torch
from matrix import matrix
from passes import causal
from plans import plan_memory
from quantised import save_quantised
from test_families import config_of, tiny_model
from tiny import FAMILIES, VOCAB_SIZE, build, displaced, save
from torch import Tensor

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.cuts import Section, checkpoint_of
from offload.checkpoint.open import open_checkpoint
from offload.distributed.section import SectionModel
from offload.engine.build import resident_model
from offload.errors import UserError
from offload.memory.plan import MemoryPlan
from offload.memory.planner import least_budget
from offload.model.headers import describe
from offload.model.kv_cache import KVCache
from offload.model.tree_model import TreeModel
from offload.streaming.device import HOST
from offload.streaming.disk import DiskReader
from offload.streaming.layers import LayerStream, open_layers

PLAIN = ["llama", "llama-tied", "qwen3-sliding", "gemma3", "mistral-sliding", "phi3"]
FAMILY_NAMES = [*PLAIN, "qwen2 in ct-w4-zeros"]
SIZES = {"dtype": "auto", "context": 64, "num_nodes": 32}


def sections(*cuts: int) -> list[Section]:
    """Between these layers, of which the first is 0 and the last the number of layers."""
    return [Section(first, last, first == 0, last == cuts[-1]) for first, last in pairwise(cuts)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    kept: dict[str, Checkpoint] = {}

    def of(family: str) -> Checkpoint:
        if family not in kept:
            name, _, format = family.partition(" in ")
            folder = displaced(save(build(FAMILIES[name]()), tmp_path_factory.mktemp(name)), 0)
            kept[family] = describe(
                save_quantised(folder, format, folder / "quantised").directory if format else folder
            )
        return kept[family]

    return of


def plan_of(checkpoint: Checkpoint, section: Section, ram: int = 1 << 40) -> MemoryPlan:
    return plan_memory((checkpoint_of(checkpoint, section), None), ram=ram, **SIZES)


@contextmanager
def opened(
    checkpoint: Checkpoint, section: Section, *, is_streamed: bool, runs: bool = True
) -> Iterator[tuple[SectionModel, LayerStream]]:
    """A section with its weights, all of them there or as many layers in slots as can be; it takes them as it runs."""
    with ExitStack() as resources:
        model = SectionModel(checkpoint, section)
        resources.callback(model.close)
        source = DiskReader(checkpoint.shards, stamps=checkpoint.stamps)
        resources.callback(source.close)
        least = least_budget(lambda ram: plan_of(checkpoint, section, ram)) if is_streamed else 1 << 40
        plan = plan_of(checkpoint, section, least)
        model.read_rest(source.fetch)
        stream = open_layers(source, model.layer_layouts, plan, HOST, resources)
        stream.load_resident()
        if runs:
            model.stream_layers(stream)
        assert [layout.slab_bytes for layout in model.layer_layouts] <= list(plan.layer_bytes)
        assert model.rest_layout.slab_bytes <= plan.rest_bytes
        yield model, stream


Pass = Callable[[Tensor, Tensor, Tensor, int], Tensor]  # ids, positions of all uncommitted rows, sight, num_logits


def play(run: Pass, caches: Sequence[KVCache], seed: int = 0) -> list[Tensor]:
    """A prompt longer than any window, then trees behind rows that wait, committed in part; what each pass gives."""
    rng, given = np.random.default_rng(seed), []
    given.append(run(torch.from_numpy(rng.integers(3, VOCAB_SIZE, 40)), torch.arange(40), causal(40), 1))
    for cache in caches:
        cache.commit(range(40))
    position_U, sees_UU = torch.empty(0, dtype=torch.long), torch.empty(0, 0, dtype=torch.bool)
    for _ in range(4):
        for width in (1, 5):  # each row sees one before it, and what that one sees
            old = len(position_U)
            position_U = torch.cat([position_U, torch.zeros(width, dtype=torch.long)])
            sees_UU = torch.nn.functional.pad(sees_UU, (0, width, 0, width)) | torch.eye(old + width, dtype=torch.bool)
            for row in range(old, old + width):
                sees_UU[row] |= sees_UU[rng.integers(0, row)] if row else False
            position_U[old:] = caches[0].length + sees_UU[old:].sum(1) - 1
            token_T = torch.from_numpy(rng.integers(3, VOCAB_SIZE, width))
            given.append(run(token_T, position_U, sees_UU[old:], 0))
        path = sees_UU[int(rng.integers(1, len(position_U)))].nonzero()[:, 0]
        kept = [row for row in range(len(position_U)) if row not in path.tolist() and sees_UU[row, path].all()]
        for cache in caches:
            cache.commit(path.tolist(), kept)
        position_U, sees_UU = position_U[kept], sees_UU[kept][:, kept]
    return given


def run_whole(model: TreeModel) -> list[Tensor]:
    cache = model.new_cache(160)
    return play(lambda *rows: model.forward(*rows[:3], cache, num_logits=rows[3]), [cache])


def run_parts(parts: Sequence[tuple[SectionModel, LayerStream]]) -> list[Tensor]:
    caches = [model.new_cache(160) for model, _ in parts]

    def run(rows: Tensor, position_U: Tensor, sees_TU: Tensor, num_logits: int) -> Tensor:
        for (model, stream), cache in zip(parts, caches, strict=True):
            stream.begin_sweep()
            stream.poison_released = True
            rows = model.forward(
                rows, position_U, sees_TU, cache, num_logits=num_logits if model.section.has_head else 0
            )
        return rows

    given = play(run, caches)
    for (model, _), cache in zip(parts, caches, strict=True):
        assert (
            cache.num_layers
            == model.num_layers
            == sum(bool(cache.layer_states(layer)) for layer in range(cache.num_layers))
        )
    return given


@matrix("cuts", [(0, 4), (0, 1, 4), (0, 1, 3, 4)], ids=str, always=[(0, 1, 3, 4)])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["resident", "streamed"])
@matrix("family", FAMILY_NAMES, always=["llama"], daily=2)
def test_sections_compute_what_the_whole_computes(
    family: str, is_streamed: bool, cuts: Sequence[int], checkpoints: Callable[[str], Checkpoint]
) -> None:
    checkpoint = checkpoints(family)
    wanted = run_whole(resident_model(checkpoint, "auto"))
    with ExitStack() as resources:
        parts = [
            resources.enter_context(opened(checkpoint, section, is_streamed=is_streamed)) for section in sections(*cuts)
        ]
        got = run_parts(parts)
    assert all(map(torch.equal, got, wanted)) and len(got) == 9


def test_all_layers_without_table_and_head(checkpoints: Callable[[str], Checkpoint]) -> None:
    """Hidden states go in and come out: those that stand before and behind the layers of the whole."""
    checkpoint, seen = checkpoints("gemma3"), list[Tensor]()
    whole = resident_model(checkpoint, "auto")
    first, last = whole.meta_model.model.layers[0], whole.meta_model.model.layers[-1]
    first.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    last.register_forward_hook(lambda _, __, out: seen.append(out[0]))
    rows = (torch.arange(9), causal(9))
    whole.forward(torch.arange(20, 29), *rows, whole.new_cache(20))
    with opened(checkpoint, Section(0, 4, False, False), is_streamed=True) as (model, stream):
        assert model.width == 64 and model.rest_layout.slab_bytes == 0 and not model.rest_layout.pieces
        for _ in range(2):
            stream.begin_sweep()
            assert torch.equal(model.forward(seen[0], *rows, model.new_cache(20)), seen[1])


@pytest.mark.parametrize("family", PLAIN)
def test_a_plan_counts_what_a_section_has(family: str, checkpoints: Callable[[str], Checkpoint]) -> None:
    checkpoint = checkpoints(family)
    whole = plan_of(checkpoint, Section(0, 4, True, True))
    first, two, three = (plan_of(checkpoint, section) for section in sections(0, 1, 3, 4))
    assert whole == plan_memory((checkpoint, None), ram=1 << 40, **SIZES), "all of it is the whole"
    assert (*first.layer_bytes, *two.layer_bytes, *three.layer_bytes) == whole.layer_bytes
    assert first.kv_bytes + two.kv_bytes + three.kv_bytes == whole.kv_bytes and two.kv_bytes == 2 * first.kv_bytes
    assert two.rest_bytes == 0 < first.rest_bytes <= three.rest_bytes < whole.rest_bytes + first.rest_bytes
    assert two.activation_bytes == first.activation_bytes < three.activation_bytes, "without a head no row is scored"


def test_layers_that_hang_together_are_refused(tmp_path: Path) -> None:
    cases = {"gemma3n_text": "share keys and values", "gemma4_text": "share keys and values"}
    for family, reason in cases.items():
        checkpoint = open_checkpoint(save(tiny_model(config_of(family)), tmp_path / family))
        with pytest.raises(UserError, match=rf"{family} cannot be divided by layers \(layers that {reason}.*\): let"):
            SectionModel(checkpoint, Section(0, 4, True, False))
    checkpoint = open_checkpoint(small_t5.save(small_t5.build("v1.0"), tmp_path / "t5", "v1.0"))
    with pytest.raises(UserError, match=r"model type t5 cannot be divided by layers \(its encoder .*\): let one"):
        SectionModel(checkpoint, Section(0, 2, True, False))
