"""A mixture whose experts come one by one to a GPU: exactness, speed, and waits of the host.

The weights are random, and made here; what transformers writes with them on the CPU is the
reference. The draft is the model itself, so that trees are accepted. Of the experts few, some or
all stay on the device; the others lie in locked host memory, or in the file alone.
"""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from offload.bench.harness.setting import least_ram
from offload.bench.harness.tables import Row, WrongTokenError, row
from offload.checkpoint.checkpoint import ModelFiles
from offload.engine.decoder import Decoder
from offload.engine.generation import Generation
from offload.engine.load import load
from offload.memory.plan import MemoryBudget, MemoryPlan
from offload.memory.planner import least_budget, plan_memory
from offload.model.headers import describe
from offload.streaming.device import Device
from offload.trees.spec import parse_tree

TREES = ("none", "16x6", "grown:16x6")
_LARGEST = TREES[1]
# of experts on the device, on its host
_SHARES = {"least": (0.0, 0.0), "a third": (0.3, 1.0), "all": (1.0, 0.0)}
# standard deviation of weights: enough for text that is not one token for ever
_SPREAD = 0.12
_PROMPT = tuple(range(5, 29))


class Size(NamedTuple):
    hidden_size: int
    num_experts: int
    num_layers: int
    num_new: int


# of the large one an expert has 3.5 MB, all 450
LARGE = Size(768, 32, 4, 48)
TINY = Size(64, 8, 2, 6)


def measure(device: Device) -> Iterator[Row]:
    """Yield all rows. Raises `WrongTokenError` where a token is not the reference's."""
    size = TINY if device.torch_device.type == "cpu" else LARGE
    with tempfile.TemporaryDirectory(prefix="offload-experts-") as name:
        wanted = _make(Path(name), size)
        for about in _SHARES:
            options = {"device": device, "tree": _LARGEST, **_how(Path(name), about)}
            with load(Path(name), Path(name), **options) as decoder:
                yield from _of_pools(decoder, wanted, about)


def _make(folder: Path, size: Size) -> list[int]:
    """Write the model; return what transformers writes behind the prompt."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=997,
        hidden_size=size.hidden_size,
        intermediate_size=size.hidden_size,
        head_dim=64,
        num_hidden_layers=size.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        num_experts=size.num_experts,
        num_experts_per_tok=4,
        moe_intermediate_size=size.hidden_size // 2,
        max_position_embeddings=512,
    )
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, _SPREAD)
    model.save_pretrained(folder)
    ids = torch.tensor([_PROMPT])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": size.num_new}
    out = model.generate(ids, **options, do_sample=False, pad_token_id=0)
    return list(out[0, len(_PROMPT) :].tolist())


def _how(model: Path, about: str) -> dict[str, Any]:
    """Return budgets with this many expert slots on the device and its host, beside the least."""
    files = ModelFiles(*[describe(model)] * 2)
    options: dict[str, Any] = {"dtype": "float32", "context": 256, "experts": "demand"}
    num_nodes = parse_tree(_LARGEST).num_nodes

    def plan(gpu: int, ram: int = 1 << 40) -> MemoryPlan:
        return plan_memory(files, MemoryBudget(ram_bytes=ram, gpu_bytes=gpu, **options), num_nodes)

    gpu_bytes = least_budget(plan)
    ram_bytes = least_ram(files, num_nodes, gpu_bytes=gpu_bytes, **options)
    here, behind = _SHARES[about]
    experts = plan(gpu_bytes, ram_bytes)
    all_bytes = experts.num_experts * experts.expert_slot_bytes + sum(experts.layer_bytes)
    options["gpu_memory"] = gpu_bytes + int(here * all_bytes)
    options["ram"] = ram_bytes + int(behind * all_bytes)
    return {**options, "profile": "none"}


@contextmanager
def _waits() -> Iterator[list[Any]]:
    """Return torch's warnings of every operation that lets the host wait for a GPU."""
    if not torch.cuda.is_available():
        yield []
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield seen
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _of_pools(decoder: Decoder, wanted: list[int], about: str) -> Iterator[Row]:
    plan = decoder.plan
    pool = decoder.target.experts
    assert pool is not None, "experts come one by one"

    def written(tree: str, way: str) -> Generation:
        result = decoder.generate(_PROMPT, max_new_tokens=len(wanted), tree=tree)
        if result.token_ids != wanted:
            complaint = f"experts, {about} of them, {way}"
            raise WrongTokenError(f"{complaint}: not the ids of transformers on the CPU")
        return result

    num_same = sum(len(written(tree, tree).token_ids) for tree in TREES)
    name = f"experts, {about}: float32 ids of all trees are those of transformers on the CPU"
    counted = row(name, num_same, "tokens", len(TREES) * len(wanted), 1.0, promise="exact")
    yield counted | {"notes": decoder.notes, "plan": plan.as_dict()}
    asked = pool.num_hits + pool.num_misses
    missed = pool.num_misses
    with _waits() as seen:
        stats = written("none", "the timed run").stats
    yield row(f"experts, {about}: one token", stats.tpot_s, "s") | {"stall_s": stats.stall_s}
    hits = 1 - (pool.num_misses - missed) / (pool.num_hits + pool.num_misses - asked)
    counted = row(f"experts, {about}: found on the device", hits, "")
    yield counted | {"num_slots": plan.num_expert_slots}
    name = f"experts, {about}: waits of the host a sweep, against layers"
    yield row(name, len(seen) / (stats.num_sweeps + 1), "", plan.num_expert_layers)
