"""Mixtures on a device without one, their experts one by one: read ahead, expanded there, with few looks of the host.

That their texts are transformers' from pools of any size is seen in `test_races.py` and on a card.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice, fake_arena
from stored import quantised
from strict_place import OnCard, StrictDevice, place
from test_device_path import BUDGETS, device, pair_of, place_layers
from test_experts import logits_of, opened, whole_layers
from test_families import config_of, tiny_model
from test_path_rows import CLOSE
from tiny import save

import offload
from offload.checkpoint.layout import BLOCK_BYTES
from offload.engine.decoder import Decoder
from offload.planning.cost_model import NEVER
from offload.streaming.expert_carrier import DeviceExpertCarrier
from offload.streaming.experts import ExpertPool

__all__ = ["device"]  # a fixture
LOAD: dict[str, Any] = {"context": 128, "threads": 1, "experts": "demand", **BUDGETS}
SIZES = {"least": (2, 2), "some": (9, 5)}


def place_experts(monkeypatch: pytest.MonkeyPatch, num_slots: int, num_host_slots: int, *tiers: str) -> None:
    """Plans give pools these numbers of slots, and put the dense parts of layers where these tiers say."""
    place_layers(monkeypatch, *tiers, num_expert_slots=num_slots, num_host_expert_slots=num_host_slots)


def poisoned(decoder: Decoder) -> ExpertPool:
    pool = decoder.target.experts
    assert pool is not None and isinstance(pool.carrier, DeviceExpertCarrier)
    pool.poison_released = True
    return pool


def test_a_long_prompt_is_read_ahead(device: FakeDevice, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, _ = pair_of("qwen3-moe", base)
    prompt = torch.randint(3, 199, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    with offload.load(target, draft, tree="8x3", **{**LOAD, "experts": "layers"}) as decoder:
        wanted = decoder.generate(prompt, max_new_tokens=6).token_ids
    for sizes in ((4, 4), (9, 20)):
        place_experts(monkeypatch, *sizes, "RESIDENT")
        with offload.load(target, draft, tree="8x3", **LOAD) as decoder:
            assert poisoned(decoder).ahead_rows <= len(prompt)
            assert decoder.generate(prompt, max_new_tokens=6).token_ids == wanted


def on_card(folder: Path, num_slots: int, num_host_slots: int, **options: int) -> Any:
    """On the strict place, its layers bound; to be used where that is entered."""
    device = FakeDevice(5)
    device.torch_device, device.open_allocator = place(), fake_arena
    return opened(folder, num_slots, device=device, num_host_slots=num_host_slots, **options)


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "mixtral"])
def test_the_host_looks_once_a_layer(family: str, tmp_path: Path) -> None:
    folder, cuts = save(tiny_model(config_of(family)), tmp_path), (9, 1, 14)
    wanted = whole_layers(folder, cuts)
    for sizes, ahead_rows in (((3, 4), NEVER), ((7, 9), 4)):
        with StrictDevice() as card, on_card(folder, *sizes, ahead_rows=ahead_rows) as (model, pool):
            card.looks.clear()
            card.sends.clear()
            got = logits_of(model, pool, cuts)
            assert isinstance(got, OnCard)
            torch.testing.assert_close(got.held, wanted, **CLOSE)
            assert len(card.looks) == len(cuts) * len(model.experts)
            small = [size for size in card.sends if size < BLOCK_BYTES]  # others are experts
            assert len(small) <= 5 * len(cuts), "tokens, positions and masks go there, and nothing for an expert"


@pytest.mark.parametrize(("family", "recipe"), [("gpt_oss", "mxfp4"), ("qwen3_moe", "fp8-block")])
def test_coded_experts_are_expanded_there(family: str, recipe: str, tmp_path: Path) -> None:
    folder, cuts = quantised(recipe, family)(tmp_path / "coded"), (9, 1, 14)
    wanted = whole_layers(folder, cuts)
    with StrictDevice(), on_card(folder, 4, 3) as (model, pool):
        assert any(record.coded for record in pool.layouts)
        torch.testing.assert_close(logits_of(model, pool, cuts).held, wanted, **CLOSE)
