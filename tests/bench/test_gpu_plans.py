"""Every step of the GPU bench, planned from headers with its own words: one that is refused at load proves nothing.

The device is a name, the models are sketches of kilobytes, and loading ends where headers have been read and admitted.
"""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from shell import shell

from offload.bench.gpu import __main__ as runner
from offload.bench.gpu import promised
from offload.bench.gpu.__main__ import Step, all_steps
from offload.bench.harness import models
from offload.bench.latency import exact, passes
from offload.engine import opening
from offload.engine.setup import Setup
from offload.memory.plan import MemoryPlan
from offload.memory.tiers import LayerTier

PLANNED = ("gate", "device", "plain", "large")  # what opens models of a size that is named


class _AdmittedError(Exception):
    """Headers were read, and there is room for what they tell."""


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> list[MemoryPlan]:
    """Return the plan of every decoder that was admitted; none is built."""
    own = {"name": "a device", "torch_device": torch.device("cuda", 0), "has_own_memory": True}
    card = SimpleNamespace(computing=nullcontext, **own)
    found = list[MemoryPlan]()

    def open_pair(setup: Setup, *_: Any, **__: Any) -> NoReturn:
        found.append(setup.plan_for(setup.tree.num_nodes))
        raise _AdmittedError

    def reference_ids(*_: Any) -> tuple[list[int], list[int]]:
        return [5], [6]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(models, "open_device", lambda *_: card)
    monkeypatch.setattr(exact, "reference_ids", reference_ids)
    monkeypatch.setattr(opening, "open_pair", open_pair)
    return found


def refused(step: Step, tmp_path: Path) -> list[str]:
    """What loading says where it refuses the step."""
    words = [word.format(rows=tmp_path / "rows.jsonl", out=tmp_path) for word in step.command]
    assert words[:3] == ["-m", "offload.bench.suite", "device"]
    outcome = shell("bench", *words[2:])
    assert outcome.code in (1, 2)
    opened = ("opening: failed", "gate: failed", "loading: failed")
    errors = [line for line in outcome.out.splitlines() if line.removeprefix("not invariant, ").startswith(opened)]
    assert errors and all("MISSED" in line for line in errors), "every step opens a model, and none is built"
    return [line for line in errors if "_AdmittedError" not in line]


def named(name: str) -> Step:
    return next(one for one in all_steps(False) if one.name == name)


@pytest.mark.parametrize("name", PLANNED)
def test_every_step_is_admitted(name: str, plans: list[MemoryPlan], tmp_path: Path) -> None:
    is_admitted(name, 32 << 30, plans, tmp_path)


def test_the_whole_model_is_admitted(plans: list[MemoryPlan], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where a machine has memory for it."""
    monkeypatch.setattr(runner, "available_ram_bytes", lambda: 124 << 30)
    is_admitted("large", 45 << 30, plans, tmp_path)
    assert len(plans[0].layer_bytes) == 80 and plans[0].bytes_in(LayerTier.PINNED) < 110 << 30


def is_admitted(name: str, gpu_bytes: int, plans: list[MemoryPlan], tmp_path: Path) -> None:
    assert refused(named(name), tmp_path) == [] and plans
    if name != "gate":
        (plan,) = plans
        num_layers = len(plan.layer_bytes)
        assert plan.num_nodes == max(passes.ON_DEVICE.sizes) and plan.gpu_bytes == gpu_bytes
        assert plan.streamed_bytes > 0 and not plan.disk_streamed_bytes, "the link is what is measured"
        assert sum(plan.is_resident) < num_layers / 2, "a sweep has to move most of the model"


def other_budget(step: Step, budget: str) -> Step:
    command = list(step.command)
    command[command.index("--gpu-mem") + 1] = budget
    return step._replace(command=tuple(command))


MISTAKES: dict[str, tuple[str, tuple[int, ...]]] = {
    "the budget and the sizes of old": ("24GiB", (1, 64, 256, 768, 1024, 2048, 4096)),
    "a budget that is too small": ("20GiB", promised.Amounts().sizes),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", PLANNED[1:])
def test_a_step_that_would_be_refused_is_noticed(
    name: str, mistake: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    budget, sizes = MISTAKES[mistake]
    monkeypatch.setattr(promised, "Amounts", partial(promised.Amounts, sizes))
    lines = refused(other_budget(named(name), budget), tmp_path)
    assert lines and all("raise `gpu_memory` to" in line for line in lines)


def test_steps_that_name_no_budget_of_models_are_known() -> None:
    """A step that opens models has to be planned above; of experts each decoder has the least that works."""
    assert {one.name for one in all_steps(False) if "device" in one.command} == {*PLANNED, "experts"}
