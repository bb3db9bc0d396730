"""Two pools of experts, on a device and on its host: every wait is needed. Copies and kernels run late.

Experts carry their number in every byte from their first weight on. A kernel looks at its slot when the compute stream
gets to it, and whatever is overwritten holds NaN before.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import FakeDevice, ThreadStore
from test_device_layers import LEAD_BYTES, layouts

from offload.checkpoint.layout import BLOCK_BYTES
from offload.errors import ReadError
from offload.planning.cost_model import NEVER
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
