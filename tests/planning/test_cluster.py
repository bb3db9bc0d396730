"""Machines that files describe, which rank gets how much of a model, and what is refused."""

import json
import math
import random
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from offload.distributed.sharding import Gathers
from offload.distributed.shares import Load, RankCapacity, _link_s, shard_fractions, stage_layers, stage_link_s
from offload.errors import UserError
from offload.planning.hardware import KNOWN, Hardware, read_hardware

GB = 10**9


def test_known_cards_are_what_their_data_sheets_say() -> None:
    nominal_gb = {"l40": 48, "rtx4090": 24, "rtx3090": 24, "a100-80gb": 80, "h100": 80, "h200": 141}
    assert KNOWN.keys() == nominal_gb.keys()
    for name, card in KNOWN.items():
        assert nominal_gb[name] * 0.93 < card.gpu_bytes / 2**30 < nominal_gb[name] * 1.01
        assert card.link_bytes_per_s in (25e9, 52e9) and card.flops_per_s < 1e15


MACHINE = {"gpu_bytes": "48GiB", "memory_bytes_per_s": 864e9, "flops_per_s": 181e12, "link_bytes_per_s": "25GB/s"}


def written(folder: Path, content: Any) -> Path:
    path = folder / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_machine_is_read_from_a_file(tmp_path: Path) -> None:
    machine = read_hardware(written(tmp_path, {**MACHINE, "ram_bytes": 64 * GB}))
    wanted = {"gpu_bytes": 48 << 30, "memory_bytes_per_s": 864e9, "flops_per_s": 181e12, "link_bytes_per_s": 25e9}
    assert machine == Hardware(name="mine", ram_bytes=64 * GB, **wanted)  # type: ignore[arg-type]
    laptop = read_hardware(written(tmp_path, {"ram_bytes": "32GiB", "disk_bytes_per_s": "3GB"}))
    assert laptop == Hardware(name="mine", ram_bytes=32 << 30, disk_bytes_per_s=3 * GB)
    assert laptop.feed_bytes_per_s == 3 * GB and laptop.flops_per_s is None, "it needs no fields of a GPU"


RANGE = "must be above 0 and at most 1e+21, got"
BAD_MACHINES: list[tuple[Any, str]] = [
    ("[]", "holds a JSON list"),
    ("{", "is not valid JSON"),
    ({**MACHINE, "ram": 1}, "a machine has the keys"),
    ({"gpu_bytes": 1}, "needs memory_bytes_per_s, flops_per_s, link_bytes_per_s as well"),
    ({"link_bytes_per_s": 1}, "needs gpu_bytes as well"),
    ({"flops_per_s": 1}, "needs memory_bytes_per_s as well"),
    ({**MACHINE, "gpu_bytes": "much"}, "gpu_bytes must be a size, got"),
    ({**MACHINE, "flops_per_s": ["181T"]}, "flops_per_s must be a number, got ['181T']"),
    ({**MACHINE, "flops_per_s": True}, "flops_per_s must be a number, got True"),
    ({**MACHINE, "link_bytes_per_s": -1}, f"link_bytes_per_s {RANGE} -1"),
    ({**MACHINE, "disk_bytes_per_s": float("nan")}, "NaN is no number"),
    ({**MACHINE, "memory_bytes_per_s": 10**400}, f"memory_bytes_per_s {RANGE} 1000"),
    ({**MACHINE, "gpu_bytes": float("inf")}, f"gpu_bytes {RANGE} inf"),
    ({**MACHINE, "flops_share": 1.5}, "flops_share must be at most 1, got 1.5"),
]


@pytest.mark.parametrize(("content", "words"), BAD_MACHINES)
def test_a_malformed_file_is_refused_in_one_line(content: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\A[^\n]*\Z") as refusal:
        read_hardware(written(tmp_path, content))
    assert words in str(refusal.value) and "mine" in str(refusal.value)


LLAMA = Load([1_711_250_000] * 80, num_slots=0)  # Llama-3-70B in bf16; 136.9 GB


def laptops(count: int, memory_gb: float = 26) -> list[RankCapacity]:
    return [RankCapacity(int(memory_gb * GB), 3e9)] * count


def shard_link_s(rank: RankCapacity, load: Load, fraction: float) -> float:
    """What a rank's link needs in every pass for its share of each layer."""
    held_bytes = load.slots_bytes + load.kv_bytes
    return _link_s(rank, fraction * load.num_bytes, fraction * load.kv_bytes, fraction * held_bytes)


def shard_s(ranks: list[RankCapacity], load: Load) -> float:
    """Return the seconds of the slowest rank, with the shares that are chosen."""
    times = []
    for rank, share in zip(ranks, shard_fractions(ranks, load), strict=True):
        times.append(max(shard_link_s(rank, load, share), rank.compute_s * share))
    return max(times)


def stage_s(rank: RankCapacity, load: Load, layers: range) -> float:
    """Return the seconds of one stage; infinite where there is no room for it."""
    own_bytes = sum(load.layer_bytes[layer] for layer in layers)
    part = own_bytes / load.num_bytes
    if min(own_bytes, load.least_slots_bytes) + part * load.kv_bytes > rank.memory_bytes:
        return math.inf
    return max(stage_link_s(rank, load, own_bytes), rank.compute_s * part)


@pytest.mark.parametrize(
    ("memory_gb", "shards", "stages"),
    [(26, (37.0, 14.2, 6.5, 2.7), (37.0, 28.3, 19.6, 11.0)), (10, (42.3, 19.5, 11.9, 8.1), ())],
)
def test_the_times_of_four_laptops(memory_gb: int, shards: tuple[float, ...], stages: tuple[float, ...]) -> None:
    for num_ranks, seconds in enumerate(shards, 1):
        assert shard_s(laptops(num_ranks, memory_gb), LLAMA) == pytest.approx(seconds, abs=0.051)
    for num_ranks, seconds in enumerate(stages, 1):
        ranks = laptops(num_ranks, memory_gb)
        layers = stage_layers(ranks, LLAMA)
        one_run_s = sum(map(stage_s, ranks, [LLAMA] * num_ranks, layers))
        assert max(map(len, layers)) - min(map(len, layers)) <= 1
        assert one_run_s == pytest.approx(seconds, abs=0.051)


def test_who_is_slower_gets_less() -> None:
    # Uneven ranks are done at once.
    ranks = [RankCapacity(26 * GB, 3e9), RankCapacity(10 * GB, 7e9), RankCapacity(0, 1e9)]
    seconds = (136.9 - 36) / 11
    shares = shard_fractions(ranks, LLAMA)
    assert shares == pytest.approx([(26 + 3 * seconds) / 136.9, (10 + 7 * seconds) / 136.9, seconds / 136.9])
    assert [shard_link_s(*pair, share) for *pair, share in zip(ranks, [LLAMA] * 3, shares, strict=True)] == (
        pytest.approx([seconds] * 3)
    )
    # Slow processors get less: the second rank's link would do for half of it, its processor for a
    # tenth.
    ranks = [RankCapacity(0, 1e9, 10.0), RankCapacity(0, 1e9, 1000.0)]
    seconds = 1 / (1e9 / LLAMA.num_bytes + 1 / 1000)
    assert shard_fractions(ranks, LLAMA) == pytest.approx([1e9 * seconds / LLAMA.num_bytes, seconds / 1000])
    # Between two slots and three nothing stays.
    ranks, load = [RankCapacity(1_800_000, 1e6), RankCapacity(1_200_000, 1e6)], Load([10**6] * 4)
    seconds = (1 - 1.8 / 7) / (1 / 7 + 1 / 4)
    assert shard_fractions(ranks, load) == pytest.approx([(1.8 + seconds) / 7, seconds / 4])
    assert shard_s(ranks, load) == pytest.approx(seconds)


def test_where_all_of_it_fits_computing_decides_and_else_memory() -> None:
    whole = 2 * LLAMA.num_bytes
    assert shard_fractions([RankCapacity(whole, 1e9, 1.0), RankCapacity(whole, 9e9, 3.0)], LLAMA) == (
        pytest.approx([0.75, 0.25])
    )
    sizes = [RankCapacity(80 * GB, 1e9), RankCapacity(120 * GB, 9e9)]
    assert shard_fractions(sizes, LLAMA) == pytest.approx([0.4, 0.6])
    assert [len(layers) for layers in stage_layers(sizes, LLAMA)] == [32, 48]
    small = RankCapacity(int(0.2 * LLAMA.num_bytes), 1e9, 1.0)  # may compute half, but can hold no more than a fifth
    shares = shard_fractions([small, RankCapacity(whole, 1e9, 1.0)], LLAMA)
    assert shares[0] > 0.2 and shards_are_even([small, RankCapacity(whole, 1e9, 1.0)], LLAMA, shares)


def shards_are_even(ranks: list[RankCapacity], load: Load, shares: tuple[float, ...]) -> bool:
    """Whether no rank could take anything of the slowest and both be earlier."""
    times = [
        max(shard_link_s(rank, load, share), rank.compute_s * share) for rank, share in zip(ranks, shares, strict=True)
    ]
    slowest = max(times)
    for rank, share, seconds in zip(ranks, shares, times, strict=True):
        above = share + 1e-3
        later = max(shard_link_s(rank, load, above), rank.compute_s * above)
        if seconds < slowest * (1 - 1e-6) and later < slowest * (1 - 1e-6) and holds(rank, load, above):
            return False
    return True


def holds(rank: RankCapacity, load: Load, share: float) -> bool:
    """Whether a rank has room for the slots of such a share, or for all of it."""
    needed = min(load.num_bytes, load.least_slots_bytes) + load.kv_bytes
    return share * needed <= rank.memory_bytes and share <= 1


def random_ranks(rng: random.Random, num_ranks: int, load: Load) -> list[RankCapacity]:
    knows_compute = rng.random() < 0.5
    return [
        RankCapacity(
            int(load.num_bytes * rng.choice([0.3, 1.0, 2.0]) * rng.random()) + load.slots_bytes + load.kv_bytes,
            10 ** rng.uniform(6, 11),
            10 ** rng.uniform(-3, 2) if knows_compute else 0.0,
            int(load.num_bytes * rng.random()) if rng.random() < 0.2 else 0,
            10 ** rng.uniform(6, 10) if rng.random() < 0.3 else math.inf,
        )
        for _ in range(num_ranks)
    ]


def random_load(rng: random.Random, num_layers: int) -> Load:
    layer_bytes = [rng.randrange(10**6, 10**7) for _ in range(num_layers)]
    return Load(layer_bytes, rng.choice([0, 10**6]), rng.choice([0, 2, 3]))


def test_random_ranks_get_all_of_it_and_none_waits_in_vain() -> None:
    rng = random.Random(14)
    for _ in range(200):
        load = random_load(rng, rng.randrange(1, 30))
        ranks = random_ranks(rng, rng.randrange(1, 6), load)
        shares = shard_fractions(ranks, load)
        assert math.fsum(shares) == pytest.approx(1, abs=1e-12) and min(shares) > 0
        assert shards_are_even(ranks, load, shares)
        assert all(holds(rank, load, share * (1 - 1e-9)) for rank, share in zip(ranks, shares, strict=True))


def test_stages_are_as_good_as_all_others() -> None:
    rng = random.Random(15)
    for _ in range(200):
        load = random_load(rng, rng.randrange(1, 9))
        num_layers = len(load.layer_bytes)
        num_ranks = rng.randrange(1, min(4, num_layers) + 1)
        ranks = random_ranks(rng, num_ranks, load)
        bounds = ([0, *inner, num_layers] for inner in combinations(range(1, num_layers), num_ranks - 1))
        cuts = [[range(lo, hi) for lo, hi in pairwise(ends)] for ends in bounds]
        times = [[stage_s(rank, load, seconds) for rank, seconds in zip(ranks, cut, strict=True)] for cut in cuts]
        stages = list(stage_layers(ranks, load))
        least = min(map(max, times))
        assert max(times[cuts.index(stages)]) == pytest.approx(least, rel=1e-9, abs=1e-12)
        as_good = [sum(seconds) for seconds in times if max(seconds) <= least * (1 + 1e-12)]
        assert sum(times[cuts.index(stages)]) == pytest.approx(min(as_good), rel=1e-6, abs=1e-12)


def test_what_cannot_be_shared_is_refused() -> None:
    load, small = Load([10**6] * 4), RankCapacity(900_000, 1e6, name="beta")
    with pytest.raises(UserError, match=r"^5 stages need as many layers, got 4: take fewer ranks$"):
        stage_layers([RankCapacity(10**7, 1e6)] * 5, load)
    with pytest.raises(
        UserError, match=r"^rank beta has 879 KiB for layers, and two slots .* take 1.91 MiB: give it 1"
    ):
        stage_layers([RankCapacity(3 * 10**6, 1e6), small], load)
    with pytest.raises(UserError, match=r"^all ranks together have 1.81 MiB for layers, and 1.91 MiB is the least"):
        shard_fractions([RankCapacity(10**6, 1e6), small], load)
    least = shard_fractions([RankCapacity(10**6, 1e6)] * 2, load)  # two slots of half a layer each
    assert least == pytest.approx([0.5, 0.5])


def test_a_card_behind_a_disk_is_as_slow_as_its_disk() -> None:
    """40 GB on the card, 60 in pinned memory, and 36.9 of a 136.9 GB model come from the disk."""
    card = RankCapacity(40 * GB, 25e9, 0.0, 60 * GB, 1e9)
    assert shard_s([card], LLAMA) == pytest.approx(36.9)
    assert shard_s([card._replace(host_bytes=100 * GB)], LLAMA) == pytest.approx(96.9 / 25)
    assert stage_link_s(card, LLAMA, LLAMA.num_bytes) == pytest.approx(36.9)


def test_what_shards_send_is_padded_to_the_widest() -> None:
    gathers = Gathers([[3, 5], [10, 6]], 2, 4, 2)
    assert gathers.sent_bytes(7) == ((2 * 15 + 4) * 7 * 2, 2 * 15 * 7 * 2)
