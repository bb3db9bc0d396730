"""Which expert stays and which gives way: the promises of the cache, on passes that are made up."""

import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from offload.streaming import expert_cache
from offload.streaming.expert_cache import HALF_LIVES_TOKENS, ExpertCache


def cache_of(num_blocks: int, num_slots: int, **options: Any) -> ExpertCache:
    return ExpertCache(num_blocks, num_slots, num_passing=8, **options)


def kept(cache: ExpertCache) -> list[int]:
    """The blocks that are there, most used first."""
    blocks = cache._block_in_S[cache._block_in_S >= 0]
    return blocks[np.argsort(-cache.uses_B[blocks], kind="stable")].tolist()


def need(cache: ExpertCache, blocks: list[int], *, uses: bool = True) -> list[int]:
    """One layer of a pass as a pool serves it, hits first and misses in waves; returns the misses."""
    if uses:
        cache.use(blocks)
    there = [block for block in blocks if cache.lend(block) is not None]
    missing, waiting = [block for block in blocks if block not in there], []
    for block in there:
        cache.release(block)
    for block in missing:
        while cache.make_room(block) is None:
            cache.release(waiting.pop(0))
        waiting.append(block)
    for block in waiting:
        cache.release(block)
    return missing


def passes(cache: ExpertCache, blocks: list[int], times: int) -> int:
    """How many misses these passes over the blocks have had."""
    misses = 0
    for _ in range(times):
        cache.begin_pass()
        misses += len(need(cache, blocks))
    return misses


def test_what_fits_is_read_once_a_larger_cycle_still_hits_and_a_new_subject_takes_over() -> None:
    cache = cache_of(100, 10)
    assert passes(cache, list(range(10)), 20) == 10
    assert sorted(kept(cache)) == list(range(10))
    # Dropping what was used longest ago would hit never.
    cache = cache_of(100, 30)
    passes(cache, list(range(40)), 5)
    assert passes(cache, list(range(40)), 20) <= 20 * (40 - 30 + cache.num_passing)
    # A new subject takes over.
    cache = cache_of(200, 40)
    passes(cache, list(range(30)), 200)
    passes(cache, list(range(100, 130)), int(max(HALF_LIVES_TOKENS)))
    assert passes(cache, list(range(100, 130)), 1) == 0


def test_what_is_used_stays_when_a_pass_needs_everything_or_blocks_pass_through() -> None:
    cache = cache_of(1000, 50)
    popular = list(range(42))
    passes(cache, [*popular, *range(100, 108)], 1)
    passes(cache, popular, 30)
    cache.begin_pass(512)
    need(cache, list(range(1000)))
    cache.begin_pass()
    assert need(cache, popular) == []
    # Whole layers, read ahead of the router: no `use`, and nothing that is kept gives way.
    cache = cache_of(1000, 50)
    popular = list(range(42))
    passes(cache, popular, 10)
    for block in range(100, 1000):
        assert cache.make_room(block) is not None
        cache.release(block)
    assert set(popular) <= set(kept(cache))


def test_what_is_held_never_gives_way() -> None:
    cache = cache_of(20, 4)
    for block in range(4):
        assert cache.make_room(block) is not None
    cache.use([7])
    assert cache.make_room(7) is None, "every slot is held"
    assert cache.lend(2) is not None
    cache.release(2)
    assert cache.make_room(7) is None, "it was held twice"
    cache.release(2)
    slot = cache.make_room(7)
    assert slot is not None and cache.lend(2) is None and cache.lend(7) == slot


def test_at_most_a_few_slots_pass_at_once_and_a_failed_read_leaves_an_empty_one() -> None:
    cache = ExpertCache(100, 20, num_passing=3)
    passes(cache, list(range(20)), 5)
    assert [cache.make_room(block) is not None for block in range(50, 54)] == [True, True, True, False]
    cache.release(50)
    assert cache.make_room(54) is not None and cache.lend(50) is None
    cache.begin_pass(1000)
    cache.use([60], 1000)
    assert cache.make_room(60) is not None, "one that is used more than what is kept is no passing one"
    # A failed read leaves an empty slot.
    cache = cache_of(20, 2)
    slot = cache.make_room(3)
    cache.lend(3)
    cache.forget(3)
    assert cache.lend(3) is None and list(kept(cache)) == []
    assert {cache.make_room(4), cache.make_room(5)} == {0, 1} and slot is not None
    cache.forget(6)


def test_any_order_of_calls_keeps_the_books() -> None:
    """Against a plain model of what is there and who holds it."""
    rng, cache, holds = random.Random(1), ExpertCache(60, 12, num_passing=4), dict[int, int]()
    place_of: dict[int, int] = {}
    for _ in range(20_000):
        block, choice = rng.randrange(60), rng.random()
        if choice < 0.1:
            cache.begin_pass(rng.choice([1, 4, 16]))
        elif choice < 0.3:
            cache.use(rng.sample(range(60), 5))
        elif choice < 0.6 and holds:
            block = rng.choice(list(holds))
            cache.release(block)
            holds[block] -= 1
            holds = {held: number for held, number in holds.items() if number}
        elif choice < 0.62:
            cache.forget(block)
            place_of.pop(block, None), holds.pop(block, None)
        elif (slot := cache.lend(block)) is not None:
            assert place_of[block] == slot
            holds[block] = holds.get(block, 0) + 1
        elif (slot := cache.make_room(block)) is not None:
            assert not any(place_of[hold] == slot for hold in holds), "a held block gave way"
            place_of = {held: place for held, place in place_of.items() if place != slot} | {block: slot}
            holds[block] = 1
        else:
            assert holds, "None where nothing is held"
        assert sorted(kept(cache)) == sorted(place_of)


def routed(num_texts: int = 3, num_tokens: int = 150) -> list[list[list[int]]]:
    """By token and layer, four of 48 experts: some are popular, some are of a text, some of what is near."""
    rng = np.random.default_rng(0)
    lasting, near = 0.5 * rng.normal(size=(4, 48)), rng.normal(size=(4, 48))
    results = []
    for _ in range(num_texts):
        subject = lasting + 1.2 * rng.normal(size=(4, 48))
        for _ in range(num_tokens):
            near = 0.9 * near + 0.44 * rng.normal(size=(4, 48))
            scores_LE = subject + 1.2 * near + rng.normal(size=(4, 48))
            chosen_LK = np.argsort(-scores_LE)[:, :4] + 48 * np.arange(4)[:, None]
            results.append([sorted(layer) for layer in chosen_LK.tolist()])
    return results


def misses_of(tokens: list[list[list[int]]], num_slots: int) -> int:
    cache, misses = cache_of(192, num_slots), 0
    for layers in tokens:
        cache.begin_pass()
        misses += sum(len(need(cache, blocks)) for blocks in layers)
    return misses


def misses_of_lru(tokens: list[list[list[int]]], num_slots: int) -> int:
    kept, misses = OrderedDict[int, None](), 0
    for blocks in (blocks for layers in tokens for blocks in layers):
        misses += sum(block not in kept for block in blocks)
        for block in blocks:
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > num_slots:
            kept.popitem(last=False)
    return misses


def test_nothing_is_read_more_often_than_by_lru(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = routed()
    ours = {num_slots: misses_of(tokens, num_slots) for num_slots in (6, 20, 40, 80)}
    assert all(ours[num_slots] <= misses_of_lru(tokens, num_slots) for num_slots in ours), ours
    monkeypatch.setattr(expert_cache, "_AHEAD", 1.0)
    monkeypatch.setattr(expert_cache, "HALF_LIVES_TOKENS", (400.0, 400.0))
    assert misses_of(tokens, 40) > 1.05 * ours[40], "one average, and no regard for what is ahead: a planted setback"
