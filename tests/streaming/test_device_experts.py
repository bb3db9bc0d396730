"""Two pools of experts, on a device and on its host: who waits for what, and mixtures on a device without one.

Experts carry their number in every byte from their first weight on. A kernel looks at its slot when the compute stream
gets to it, and whatever is overwritten holds NaN before. That texts are transformers' from pools of any size is seen in
`test_races.py` and on a card.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import FakeDevice, ThreadStore, fake_arena
from stored import quantised
from strict_place import OnCard, StrictDevice, place
from test_device_layers import LEAD_BYTES, layouts
from test_device_path import BUDGETS, device, pair_of, place_layers
from test_experts import logits_of, opened, whole_layers
from test_families import config_of, tiny_model
from test_path_rows import CLOSE
from tiny import save

import offload
from offload.checkpoint.layout import BLOCK_BYTES
from offload.engine.decoder import Decoder
from offload.errors import ReadError
from offload.planning.cost_model import NEVER
from offload.streaming.expert_carrier import DeviceExpertCarrier
from offload.streaming.experts import ExpertPool, open_pool

NUM_LAYERS, NUM_EXPERTS = 3, 8
RECORDS = [layouts(NUM_EXPERTS) for _ in range(NUM_LAYERS)]


def own_store() -> ThreadStore:
    return ThreadStore([record for layer in RECORDS for record in layer], LEAD_BYTES)


@contextmanager
def pools(
    num_slots: int = 2, num_host_slots: int = 2, *, seed: int = 0, ahead_rows: int = NEVER, **options: Any
) -> Iterator[tuple[ExpertPool, FakeDevice, ThreadStore]]:  # fmt: skip
    device, store = FakeDevice(seed, **{"is_compute_late": True, "haste": 0.4, **options}), own_store()
    with ExitStack() as resources:
        resources.callback(store.close)
        resources.callback(device.finish)
        resources.callback(lambda: device.copies and pytest.fail("memory went before every copy had ended"))
        settings = {"num_host_slots": num_host_slots, "ahead_rows": ahead_rows}
        pool = open_pool(store, RECORDS, num_slots, device, resources, **settings)
        pool.poison_released = True
        yield pool, device, store


def chosen(num_passes: int, num_chosen: int, seed: int = 0) -> list[list[list[int]]]:
    """Experts of every layer of each pass; low numbers come more often."""
    generator = np.random.default_rng(seed)
    share_E = 1.0 / np.arange(1, NUM_EXPERTS + 1)
    return [
        [sorted(generator.choice(NUM_EXPERTS, num_chosen, replace=False, p=share_E / share_E.sum()).tolist())
         for _ in range(NUM_LAYERS)]
        for _ in range(num_passes)
    ]  # fmt: skip


def run(pool: ExpertPool, device: FakeDevice, wanted: Sequence[Sequence[Sequence[int]]]) -> list[str]:
    """These passes; what the kernels will have seen that was not their expert, once the device has run them."""
    wrong, num_seen = list[str](), 0

    def look(block: int, slab: torch.Tensor) -> None:
        nonlocal num_seen
        num_seen += 1
        if not (slab[: BLOCK_BYTES - LEAD_BYTES] == block).all():
            wrong.append(f"expert {block} saw {int(slab[0])}")

    for experts_L in wanted:
        pool.begin_pass(1)
        for layer, experts in enumerate(experts_L):
            for expert, _, slab in pool.bring(layer, experts, [1] * len(experts)):
                for _ in range(2):  # the later one is the one that a hasty copy would hit
                    device.launch(lambda block=layer * NUM_EXPERTS + expert, slab=slab: look(block, slab))
    device.finish()
    assert num_seen == 2 * sum(len(experts) for experts_L in wanted for experts in experts_L)
    return wrong


SIZES = [(2, 2), (2, 9), (9, 2), (5, 12), (24, 2)]


def test_what_the_host_has_is_sent_without_waiting_for_anything() -> None:
    """A whole pass is enqueued while the device has not begun, and no thread has a part in it."""
    with pools(4, 24, haste=0.0) as (pool, device, store):
        everything = [[list(range(NUM_EXPERTS))] * NUM_LAYERS]
        assert not run(pool, device, everything)
        asked, waits, copies = len(store.asked), device.num_host_waits, device.num_copies
        pool.carrier._feed.submit = None
        pool.begin_pass(1)
        for layer, experts in enumerate(everything[0]):
            for _ in pool.bring(layer, experts, [1] * NUM_EXPERTS):
                pass
        del pool.carrier._feed.submit
        assert (len(store.asked), device.num_host_waits, device.num_copies) == (asked, waits, copies)
        device.finish()
        assert device.num_copies - copies == pool.num_misses - 24 > 12


def test_a_read_that_fails_or_cannot_begin_reaches_what_wants_the_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_slots, ahead_rows in ((3, NEVER), (6, 1)):
        with pools(num_slots, 4, ahead_rows=ahead_rows) as (pool, device, store):
            store.failing = {NUM_EXPERTS + 3}
            with pytest.raises(ReadError, match=f"block {NUM_EXPERTS + 3} cannot be read"):
                run(pool, device, [[[0, 1], [2, 3, 4], [5]]])
            store.failing = set()
            assert not run(pool, device, chosen(5, 4)), "the pool must recover with the next pass"
    # A read that cannot begin is heard.
    with pools() as (pool, device, store):
        working = store.read
        monkeypatch.setattr(store, "read", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(pool, device, [[[0], [], []]])
        monkeypatch.setattr(store, "read", working)
        assert not run(pool, device, chosen(3, 3))


def test_guesses_that_nobody_needs_are_given_up_and_closing_leaves_no_thread() -> None:
    for seed in range(3):
        with pools(6, 3, seed=seed, ahead_rows=1) as (pool, device, store):
            store.delay_s = 0.002
            assert not run(pool, device, chosen(4, 1, seed))
    # Closing while the disk reads leaves no thread.
    before = threading.active_count()
    with pools(6, 4, ahead_rows=1) as (pool, _, store):
        store.delay_s = 0.1
        pool.begin_pass(1)
        time.sleep(0.02)
    assert threading.active_count() <= before


__all__ = ["device"]  # a fixture
LOAD: dict[str, Any] = {"context": 128, "threads": 1, "experts": "demand", **BUDGETS}
POOLS = {"least": (2, 2), "some": (9, 5)}


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
