"""What a T5 takes: its encoder stays only where everything does, and keys and values are those of both stacks."""

import shutil
from pathlib import Path

import pytest
import torch
from small_t5 import build, save, streaming_ram

from offload.checkpoint.safetensors import Checkpoint, open_checkpoint
from offload.checkpoint.sizes import model_shape
from offload.engine.build import resident_model
from offload.errors import UserError
from offload.memory.plan import MemoryPlan
from offload.memory.planner import plan_memory
from offload.model.meta import describe


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(save(build("v1.0"), tmp_path_factory.mktemp("t5"), "v1.0"))


def plan(checkpoint: Checkpoint, ram: int, context: int | None = 64) -> MemoryPlan:
    return plan_memory((checkpoint, None), ram=ram, dtype="auto", context=context, num_nodes=1)


def test_every_layer_is_as_large_as_planned(checkpoint: Checkpoint) -> None:
    shape, model = model_shape(checkpoint), resident_model(checkpoint, "auto")
    layouts = ((model.layer_layouts, shape.layer_bytes), (model.encoder_layouts, shape.encoder_bytes))
    for own, planned in layouts:
        assert len(own) == len(planned) and all(one.slab_bytes <= most for one, most in zip(own, planned, strict=True))
    assert model.rest_layout.slab_bytes <= shape.rest_bytes
    model.close()
    assert (len(shape.layer_bytes), len(shape.encoder_bytes)) == (4, 3)
    assert shape.num_bytes >= checkpoint.num_bytes


def test_layers_that_every_sweep_needs_stay_before_the_encoder(checkpoint: Checkpoint) -> None:
    least, shape = streaming_ram(checkpoint.directory, None, context=64, num_nodes=1), model_shape(checkpoint)
    whole_bytes = sum(shape.layer_bytes) + sum(shape.encoder_bytes)
    slots_bytes = 3 * max(*shape.layer_bytes, *shape.encoder_bytes)
    two = plan(checkpoint, least + 2 * shape.layer_bytes[0])
    assert (two.num_resident, two.encoder_bytes, two.num_slots) == (2, 0, 3)
    everything = plan(checkpoint, least - slots_bytes + whole_bytes)
    assert (everything.num_resident, everything.num_slots) == (4, 0)
    assert everything.encoder_bytes == sum(shape.encoder_bytes)
    for one in (two, everything):
        assert one.total_bytes <= one.ram_bytes


def test_both_stacks_have_keys_and_values(checkpoint: Checkpoint) -> None:
    """Of 4 layers in float32, 5 heads of 8 numbers: of the decoder's own positions and of the prompt's."""
    one = plan(checkpoint, 1 << 40)
    assert (one.source_tokens, one.context) == (64, 64)
    assert one.kv_bytes == 2 * 4 * 5 * 8 * 4 * (one.cache_slots + 64)
    assert plan(checkpoint, 1 << 40, None).context == 512, "what T5 was trained with"


def test_the_encoder_reads_a_long_prompt_at_once(checkpoint: Checkpoint) -> None:
    """Twice the prompt are four times the pairs of positions, each with a bias for every head."""
    short, long = (plan(checkpoint, 1 << 40, context).activation_bytes for context in (4096, 8192))
    fixed = plan(checkpoint, 1 << 40, 1).activation_bytes
    assert 3.5 < (long - fixed) / (short - fixed) < 4.5
    assert long - fixed > 8192**2 * 5 * 4


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
    shapes = [{name: entry.shape for name, entry in one.tensors.items()} for one in (model, alone)]
    assert shapes[0] == shapes[1]


def test_a_device_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(UserError, match="computed by the CPU, `device` is cuda: give `device` cpu"):
        plan_memory((checkpoint, None), ram="1GiB", dtype="auto", context=64, num_nodes=1, gpu="1GiB")
