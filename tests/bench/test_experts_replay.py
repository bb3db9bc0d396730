"""Replays of routing: nobody reads less than the optimum, which knows the future, and we never more than LRU."""

import json
from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch
from shell import shell
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from offload.bench.harness.replay import expected, optimal, ours, recent
from offload.bench.harness.routing import MadeUp, Pass, Routing, made_up, passes, recorded
from offload.bench.studies import expert_cache as experts
from offload.streaming import expert_cache

SMALL = MadeUp(num_layers=4, num_experts=48, num_chosen=4, num_texts=3, num_tokens=150)
FLAT = SMALL._replace(popularity=0.2, subject=0.2, nearby=0.2)
LOCAL = SMALL._replace(popularity=0.5, subject=1.2, nearby=1.2, fading=0.9, num_tokens=250)


@pytest.mark.parametrize("num_rows", [1, 4, 16])
@pytest.mark.parametrize("how", [SMALL, FLAT, LOCAL])
def test_nothing_is_read_more_often_than_by_lru(how: MadeUp, num_rows: int) -> None:
    """Nor much more often than by the optimum: the more room there is, the more of its misses are first uses alone."""
    routing = made_up(how)
    run = list(passes(routing, num_rows))
    for room, most in {0.03: 1.4, 0.1: 1.75, 0.2: 1.9, 0.3: 1.95, 0.6: 2.3}.items():  # few rows, which tell little
        num_slots = max(2, int(room * routing.num_blocks))
        misses, best = ours(run, routing.num_blocks, num_slots), optimal(run, num_slots)
        assert best <= misses <= min(recent(run, num_slots), most * best), (num_rows, room)


def test_a_pass_that_needs_more_than_fits_has_hits_where_recency_has_none() -> None:
    routing = made_up(SMALL._replace(num_experts=128, num_chosen=8))
    run = list(passes(routing, 16))
    needed = sum(len(blocks) for one in run for blocks in one.blocks)
    num_slots = routing.num_blocks // 10
    assert recent(run, num_slots) > 0.98 * needed
    assert ours(run, routing.num_blocks, num_slots) < 0.92 * needed


def test_one_average_and_no_regard_for_what_is_ahead_read_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule before: a planted setback that these replays must tell."""
    routing = made_up(LOCAL)
    run = list(passes(routing, 4))
    count = partial(ours, run, routing.num_blocks, routing.num_blocks // 5)
    now = count()
    monkeypatch.setattr(expert_cache, "_AHEAD", 1.0)
    monkeypatch.setattr(expert_cache, "HALF_LIVES_TOKENS", (400.0, 400.0))
    assert count() > 1.05 * now


def test_the_optimum_is_what_trying_everything_finds() -> None:
    """Which blocks to keep after each moment, all choices tried, on texts that are short enough for it."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        moments = [np.unique(rng.integers(0, 5, size=2)) for _ in range(7)]
        run = [Pass([blocks], [np.ones(len(blocks))], 1, 1) for blocks in moments]
        assert optimal(run, 2) == fewest([set(blocks.tolist()) for blocks in moments], frozenset(), 2)


def fewest(moments: list[set[int]], kept: frozenset[int], num_slots: int) -> int:
    if not moments:
        return 0
    there = kept | moments[0]
    choices = [frozenset(one) for one in combinations(sorted(there), min(num_slots, len(there)))]
    return len(moments[0] - kept) + min(fewest(moments[1:], one, num_slots) for one in choices)


def test_popularity_alone_tells_the_misses_of_routing_without_habits() -> None:
    routing = made_up(SMALL._replace(subject=0.0, nearby=0.0, num_texts=1, num_tokens=600))
    run = list(passes(routing, 1))
    num_slots = routing.num_blocks // 5
    assert expected(run, routing.num_blocks, num_slots, 1) == pytest.approx(
        ours(run, routing.num_blocks, num_slots), rel=0.2
    )


def test_passes_go_through_a_text_once() -> None:
    routing = Routing(np.arange(60).reshape(60, 1, 1), 60, (0, 40))
    run = list(passes(routing, 4, prompt_tokens=10))
    assert [one.num_rows for one in run if one.num_rows != 4] == [10, 10]
    assert sum(one.num_tokens for one in run) == 60
    seen = np.concatenate([one.blocks[0] for one in run])
    assert set(seen.tolist()) == set(range(60))
    assert all(rows.sum() == one.num_rows for one in run for rows in one.rows)


def test_routing_is_recorded_from_a_model() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "vocab_size": 50, "head_dim": 8}
    counts = {"num_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 3, "mlp_only_layers": [1]}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **counts, **heads)).eval()
    routing = recorded(model, [range(10), range(7)])
    assert routing.chosen_TLK.shape == (17, 2, 2) and routing.num_experts == 6 and routing.starts == (0, 10)
    logits = model(torch.arange(7)[None], output_router_logits=True).router_logits[1]
    assert np.array_equal(np.sort(logits.topk(2).indices, axis=1), np.sort(routing.chosen_TLK[10:, 1], axis=1))


def test_the_study_prints_every_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "QUICK", experts.Effort(SMALL._replace(num_tokens=40), 1))
    outcome = shell("bench", "expert-cache", "--quick")
    assert outcome.code == 0, outcome.err
    rows = json.loads(outcome.out.splitlines()[-1])["rows"]
    assert [(row["num_rows"], row["room"]) for row in rows][::6] == [(1, 0.03), (4, 0.03), (16, 0.03)]
    assert all(row["optimal"] <= row["ours"] for row in rows)
