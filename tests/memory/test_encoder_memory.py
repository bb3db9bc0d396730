"""What a T5 takes, whose encoder stays only where everything does, and what numba takes when it compiles."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from plans import model_shape, plan_memory
from shell import run_python
from small_t5 import build, save, streaming_ram
from stored import quantised

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.open import open_checkpoint
from offload.engine.build import resident_model
from offload.errors import UserError
from offload.memory.plan import MemoryPlan
from offload.model.headers import describe


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(save(build("v1.0"), tmp_path_factory.mktemp("t5"), "v1.0"))


def plan(checkpoint: Checkpoint, ram: int, context: int | None = 64) -> MemoryPlan:
    return plan_memory((checkpoint, None), ram=ram, dtype="auto", context=context, num_nodes=1)


def test_every_layer_is_as_large_as_planned(checkpoint: Checkpoint) -> None:
    shape, model = model_shape(checkpoint), resident_model(checkpoint, "auto")
    layouts = ((model.layer_layouts, shape.layer_bytes), (model.encoder_layouts, shape.encoder_bytes))
    for ours, planned in layouts:
        assert len(ours) == len(planned) and all(
            layout.slab_bytes <= most for layout, most in zip(ours, planned, strict=True)
        )
    assert model.rest_layout.slab_bytes <= shape.rest_bytes
    model.close()
    assert (len(shape.layer_bytes), len(shape.encoder_bytes)) == (4, 3)
    assert shape.num_bytes >= checkpoint.num_bytes


def test_layers_that_every_sweep_needs_stay_before_the_encoder(checkpoint: Checkpoint) -> None:
    least, shape = streaming_ram(checkpoint.directory, None, context=64, num_nodes=1), model_shape(checkpoint)
    whole_bytes = sum(shape.layer_bytes) + sum(shape.encoder_bytes)
    slots_bytes = 3 * max(*shape.layer_bytes, *shape.encoder_bytes)
    two = plan(checkpoint, least + 2 * shape.layer_bytes[0])
    assert (two.num_resident, two.encoder_bytes, two.num_layer_slots) == (2, 0, 3)
    everything = plan(checkpoint, least - slots_bytes + whole_bytes)
    assert (everything.num_resident, everything.num_layer_slots) == (4, 0)
    assert everything.encoder_bytes == sum(shape.encoder_bytes)
    for roomy in (two, everything):
        assert roomy.total_bytes <= roomy.ram_bytes


def test_an_encoder_reads_one_prompt_at_a_time(checkpoint: Checkpoint) -> None:
    with pytest.raises(UserError, match="encoder write one text at a time, `parallel` must be 1"):
        plan_memory((checkpoint, None), ram="1GiB", context=64, num_nodes=1, parallel=2)


def test_what_stays_in_float32_is_counted(tmp_path: Path) -> None:
    """transformers keeps the second half of T5's feed-forward in float32 where float16 is asked for."""
    model = save(build("v1.1").to(torch.float16), tmp_path, "v1.1")
    shape = model_shape(open_checkpoint(model), "float16")
    assert shape.cast_bytes >= 4 * 64 * 48


@pytest.mark.parametrize("layout", ["v1.0", "v1.1", "mt5"])
def test_a_config_alone_weighs_what_the_model_does(layout: str, tmp_path: Path) -> None:
    """A head of its own included, which transformers calls tied."""
    model = open_checkpoint(save(build(layout), tmp_path / layout, layout))
    alone = describe(str(shutil.copy(model.directory / "config.json", tmp_path / "config.json")))
    shapes = [{name: entry.shape for name, entry in checkpoint.tensors.items()} for checkpoint in (model, alone)]
    assert shapes[0] == shapes[1]


_RUN = """
import json, sys
import torch, transformers, offload, offload.engine.load
from offload.machine import peak_rss_bytes, rss_bytes
from offload.kernels.expansion import COMPILED
own_bytes = rss_bytes()
more = {"context": 128, "threads": 1, "tree": "none", "profile": "none", "lookup": False}
with offload.load(sys.argv[1], None, sys.argv[2], **more) as decoder:
    decoder.target._model.set_expansion(COMPILED)  # whatever was the faster one
    decoder.generate([5, 6, 7], max_new_tokens=8)
    print(json.dumps([peak_rss_bytes() - own_bytes, decoder.plan.total_bytes]))
"""


@pytest.fixture(scope="module")
def coded(base: Path) -> Path:
    return quantised("fp8-block")(base / "fp8")


@pytest.mark.full
def test_the_peak_with_an_empty_cache_is_within_the_plan(
    coded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    peak_bytes, planned_bytes = json.loads(run_python("-c", _RUN, coded, "1GiB").splitlines()[-1])
    assert 0.3 * planned_bytes < peak_bytes <= planned_bytes
