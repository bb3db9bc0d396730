"""Which draft the planner takes for the best is the one that is, where steps are played through layer by layer.

This checks times: how link, draft and layers wait for each other. What guesses are accepted is not checked, both sides
have the planner's tokens per sweep (tests/engine/test_near_copy.py counts real ones).
"""

import json
import random
from pathlib import Path

import pytest

from offload.checkpoint.sizes import model_shape
from offload.model.meta import describe
from offload.planning.cost_model import VERIFY_S, Traffic, costs_on, draft_widths
from offload.planning.hardware import Hardware, read_hardware
from offload.planning.near_copy import files_of, models_to_read
from offload.planning.options import LoadOptions
from offload.planning.room import MemoryBudget
from offload.reports.drafts import DraftCandidate, compare_drafts

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "dtype": "bfloat16",
         "max_position_embeddings": 8192, "tie_word_embeddings": False}  # fmt: skip
LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
         "num_key_value_heads": 8}  # fmt: skip
SMALL = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8}  # fmt: skip
# A fast device with room for a copy, the same beside a link that is nearly as fast as it, and a slow one.
MACHINES = {
    "fast": {"gpu_bytes": "64GiB", "memory_bytes_per_s": 3e12, "flops_per_s": 9e14, "link_bytes_per_s": 12e9},
    "wide": {"gpu_bytes": "64GiB", "memory_bytes_per_s": 3e11, "flops_per_s": 4e14, "link_bytes_per_s": 200e9},
    "slow": {"gpu_bytes": "64GiB", "memory_bytes_per_s": 1e11, "flops_per_s": 2e13, "link_bytes_per_s": 25e9},
}
NUM_STEPS, CONTEXT = 60, 2048


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    paths = []
    for name, sizes in (("large", LARGE), ("small", SMALL)):
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps({**LLAMA, **sizes}))
        paths.append(str(folder / "config.json"))
    return paths[0], paths[1]


def played(models: tuple[str, str], one: DraftCandidate, machine: Hardware) -> float:
    """Seconds per token when every layer crosses the link and is computed in its turn.

    The link fills slots ahead of what computes, also while the draft works; each is free when its layer was computed.
    """
    headers = [describe(str(name)) for name in models_to_read(models[0], one.draft)]
    files = files_of(headers, one.draft, one.draft_dtype)
    shapes = [model_shape(checkpoint) for checkpoint in files if checkpoint is not None]
    room = MemoryBudget(ram=machine.ram_bytes, gpu=machine.gpu_bytes, dtype="auto", context=CONTEXT, rule="match")
    assert one.prediction is not None
    plan = room.plan(files, one.prediction.shape.num_nodes)
    costs = costs_on(machine, shapes[0], shapes[1] if len(shapes) > 1 else None, plan.context // 2)
    share = plan.streamed_bytes / max(1, Traffic.of(plan, machine).streamed_bytes)
    layer_link_s = [
        0.0 if is_resident else size / share / costs.link_bytes_per_s
        for size, is_resident in zip(plan.layer_bytes, plan.is_resident, strict=True)
    ]
    layer_s = costs.compute_s.at(one.prediction.shape.num_nodes) / len(layer_link_s)
    chance, now, link_at, tokens = random.Random(0), 0.0, 0.0, 0
    done = [0.0] * max(1, plan.num_slots)  # when each slot was last let go
    for _ in range(NUM_STEPS):
        if one.draft is not None:
            now += sum(map(costs.draft_step_s.at, draft_widths(one.prediction.shape)))
        for link_s in layer_link_s:
            if link_s:
                link_at = max(link_at, done[0]) + link_s
                now = max(now, link_at)
            now += layer_s
            if link_s:
                done = [*done[1:], now]
        now += VERIFY_S
        mean = one.prediction.tokens_per_sweep  # of what was recorded; a step yields more or less
        tokens += 1 if one.draft is None else max(1, round(chance.uniform(0.5, 1.5) * mean))
    return now / tokens


@pytest.mark.parametrize("name", MACHINES)
def test_the_choice_is_what_playing_it_through_says(name: str, models: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({**MACHINES[name], "ram_bytes": "512GiB"}))
    machine = read_hardware(path)
    ways = compare_drafts(*models, LoadOptions(context=CONTEXT), str(path))
    assert all(one.prediction for one in ways[:3]), [one.refusal for one in ways]
    kinds = {"small": models[1], "copy": "self:int4", "none": None}
    plain = {one.draft: one for one in ways if not one.draft_dtype}
    of_kind = {kind: plain[draft] for kind, draft in kinds.items()}
    predicted = {kind: one.prediction.s_per_token for kind, one in of_kind.items() if one.prediction}
    seen = {kind: played(models, one, machine) for kind, one in of_kind.items() if one.prediction}
    assert len(seen) == 3 and min(predicted, key=predicted.__getitem__) == min(seen, key=seen.__getitem__)
    assert min(seen, key=seen.__getitem__) == {"fast": "copy", "wide": "small", "slow": "small"}[name]
    for kind in seen:
        assert seen[kind] == pytest.approx(predicted[kind], rel=0.25), kind
