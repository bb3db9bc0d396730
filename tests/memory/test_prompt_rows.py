"""Rows of a prompt's pass: as many as link and computing ask for, and never more than memory has room for."""

from typing import Any

import pytest
from mixture_headers import mixture
from test_planner import CONFIGS, checkpoint_of

from offload.checkpoint.sizes import ModelShape, model_shape
from offload.errors import UserError
from offload.memory import plan as plans
from offload.memory import planner
from offload.memory.plan import PROMPT_ROWS, MemoryPlan
from offload.memory.planner import Budgets, make_plan
from offload.memory.prompt_rows import USUAL_GPU, Rates, row_s, wanted_rows

GB, MIB = 10**9, 1 << 20
DENSE = model_shape(checkpoint_of(CONFIGS["Llama-3-70B"]))
MIXTURE = model_shape(mixture())
CPU = Rates(1e9, 1e12)


def plan_of(shape: ModelShape = DENSE, ram: int = 64 * GB, gpu: int | None = None, **how: Any) -> MemoryPlan:
    settings: dict[str, Any] = {"context": 8192, "num_nodes": 64, **how}
    rates = settings.pop("rates", CPU)
    return make_plan(shape, None, Budgets(ram, gpu, rates=rates), **settings)


def pass_bytes(plan: MemoryPlan) -> int:
    return plan.streamed_bytes + (plan.num_experts - plan.num_kept_experts) * plan.expert_slot_bytes


def test_rows_are_what_link_and_computing_say() -> None:
    one = wanted_rows(10.0, 0.01, 1 << 20)
    assert 1000 <= one <= 2000, "about as many as are computed while the link delivers, and some more"
    assert wanted_rows(20.0, 0.01, 1 << 20) == pytest.approx(2 * one, abs=64)
    assert wanted_rows(10.0, 0.005, 1 << 20) == pytest.approx(2 * one, abs=64)
    assert wanted_rows(10.0, 0.01, 900) == 900 and 0 < wanted_rows(0.0, 0.01, 900) <= 64


def test_a_row_of_a_mixture_meets_its_own_experts() -> None:
    assert row_s(DENSE, 1e12) == pytest.approx(2 * 68.5e9 / 1e12, rel=0.01)
    assert row_s(MIXTURE, 1e12) < 2 * MIXTURE.layer_weights / 1e12 / 2


@pytest.mark.parametrize("shape", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_a_slower_link_asks_for_more_rows(shape: ModelShape) -> None:
    ram = 64 * GB if shape is DENSE else 1600 * MIB
    rows = [plan_of(shape, ram, rates=Rates(link, 1e12)).max_prompt_rows for link in (1e12, 1e9, 2e8, 1e7)]
    assert rows == sorted(rows) and rows[0] == PROMPT_ROWS < rows[-1], rows
    assert plan_of(shape, ram, rates=None).max_prompt_rows == PROMPT_ROWS, "nothing is known of the machine"


def test_a_slow_disk_behind_a_fast_link_asks_for_more_rows() -> None:
    how = {"ram": 40 * GB, "gpu": 48 * GB}
    fast, slow = (plan_of(**how, rates=Rates(25e9, 1e14, disk)).max_prompt_rows for disk in (1e11, 2e9))
    assert fast < slow
    roomy = plan_of(ram=512 * GB, gpu=48 * GB, rates=Rates(25e9, 1e14, 2e9)).max_prompt_rows
    assert roomy == pytest.approx(fast, rel=0.3), "nothing comes from the disk"


def test_a_70b_on_an_l40_takes_in_700_tokens_a_second() -> None:
    plan = plan_of(ram=256 << 30, gpu=45 << 30, context=4096, rates=USUAL_GPU)
    seconds = max(
        pass_bytes(plan) / USUAL_GPU.link_bytes_per_s, plan.max_prompt_rows * row_s(DENSE, USUAL_GPU.flops_per_s)
    )
    assert plan.max_prompt_rows / seconds >= 700
    usual = plan_of(ram=256 << 30, gpu=45 << 30, context=4096, rates=None)
    seconds = pass_bytes(usual) / USUAL_GPU.link_bytes_per_s
    assert PROMPT_ROWS / seconds < 200, "with the usual rows the link is the slower side"


def test_what_stays_or_is_short_has_the_usual_rows() -> None:
    assert plan_of(ram=512 * GB, rates=Rates(1e6, 1e15)).max_prompt_rows == PROMPT_ROWS
    assert plan_of(context=300, rates=Rates(1e6, 1e15)).max_prompt_rows == 300
    assert plan_of(context=600, rates=Rates(1e6, 1e15)).max_prompt_rows == 600, "one pass, and no more than there are"


def exceeds(plan: MemoryPlan) -> bool:
    """Whether what its rows take, counted anew, is more than the plan has for them."""
    shape = DENSE if plan.num_experts == 0 and len(plan.layer_bytes) == 80 else MIXTURE
    outer = shape.row_bytes - (shape.inner_row_bytes if plan.gpu_bytes is None else 0)
    pairs = shape.pair_bytes * plan.context
    return plan.max_prompt_rows * (outer + pairs) > plan.activation_bytes


PLACES = [(DENSE, 16 * GB, None), (DENSE, 64 * GB, None), (DENSE, 130 * GB, None), (DENSE, 64 * GB, 24 * GB),
          (DENSE, 256 * GB, 48 * GB), (MIXTURE, 1200 * MIB, None), (MIXTURE, 1600 * MIB, None)]  # fmt: skip


@pytest.mark.parametrize(("shape", "ram", "gpu"), PLACES)
@pytest.mark.parametrize("parallel", [1, 8])
def test_rows_never_take_more_than_there_is(shape: ModelShape, ram: int, gpu: int | None, parallel: int) -> None:
    how: dict[str, Any] = {"parallel": parallel, "context": 2048 if parallel > 1 else 8192}
    usual = plan_of(shape, ram, gpu, rates=None, **how)
    for link in (1e6, 1e8, 1e9, 1e10):
        got = plan_of(shape, ram, gpu, rates=Rates(link, 1e14), **how)
        assert got.total_bytes <= ram and got.gpu_total_bytes <= (gpu or 0) and not exceeds(got)
        assert PROMPT_ROWS <= got.max_prompt_rows <= got.context
        assert pass_bytes(got) <= 1.05 * pass_bytes(usual), "a text is written with these passes"


def test_a_plan_that_forgets_the_memory_of_rows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(shape: ModelShape, num_rows: int, *more: Any, **how: Any) -> int:
        return plans.activation_bytes(shape, min(num_rows, PROMPT_ROWS), *more, **how)

    assert not exceeds(plan_of(rates=Rates(1e7, 1e15)))
    monkeypatch.setattr(planner, "activation_bytes", forgetful)
    assert exceeds(plan_of(rates=Rates(1e7, 1e15)))


def test_where_memory_is_short_passes_get_shorter_before_a_run_is_refused() -> None:
    with pytest.raises(UserError, match="two layer slots") as caught:
        plan_of(ram=2 * GB)
    least = planner.least_budget(lambda size: plan_of(ram=size))
    assert f"raise `ram` to {-(-least // MIB)}MiB" in str(caught.value)
    tight = plan_of(ram=least)
    assert tight.max_prompt_rows < PROMPT_ROWS and tight.total_bytes <= least and not exceeds(tight)
    assert plan_of(ram=least + 4 * GB).max_prompt_rows >= PROMPT_ROWS


def test_more_rows_need_no_more_keys_and_values() -> None:
    few, many = plan_of(rates=None), plan_of(rates=Rates(1e7, 1e15))
    assert many.max_prompt_rows > few.max_prompt_rows
    assert (many.kv_bytes, many.cache_slots, many.draft_slots) == (few.kv_bytes, few.cache_slots, few.draft_slots)
