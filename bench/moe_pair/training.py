"""AdamW over a number of steps, which goes on where it was cut.

Invariant: the state is on disk whole or as it was before; a run that goes on ends with the weights
of an uncut one, because a step's loss depends on the weights and the step's number alone.
"""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

_WARMUP_STEPS = 20
_LEAST_SHARE = 0.05
_SAVE_EVERY = 50
# routers begin at random, beside weights that were trained
_DECAY = 0.05
_ROUTER_SPEED = 10
_STATES = ("exp_avg", "exp_avg_sq")


class Course(NamedTuple):
    """How long and how fast a model learns."""

    num_steps: int
    peak_lr: float


def train(
    model: nn.Module,
    loss_of: Callable[[int], Tensor],
    course: Course,
    state: Path,
    progress: Callable[[int, int], None],
) -> None:
    """Learn until the last step; `progress` receives the numbers of steps done and of all.

    Args:
        loss_of: the loss of a step, by its number.
        state: the file to go on from, and to keep the state in.
    """
    optimiser = _optimiser(model, course)
    first = _load(model, optimiser, state) if state.exists() else 0
    for step in range(first, course.num_steps):
        for group in optimiser.param_groups:
            group["lr"] = group["peak_lr"] * _share(step, course.num_steps)
        loss = loss_of(step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if (step + 1) % _SAVE_EVERY == 0 or step + 1 == course.num_steps:
            _save(model, optimiser, state, step + 1)
        progress(step + 1, course.num_steps)


def _share(step: int, num_steps: int) -> float:
    """Return the learning rate's share: a short warm-up, then a cosine."""
    cosine = 0.5 + 0.5 * math.cos(math.pi * step / num_steps)
    return min(1.0, (step + 1) / _WARMUP_STEPS) * (_LEAST_SHARE + (1 - _LEAST_SHARE) * cosine)


def _optimiser(model: nn.Module, course: Course) -> torch.optim.AdamW:
    kinds: dict[str, list[nn.Parameter]] = {"router": [], "matrix": [], "vector": []}
    for name, weight in model.named_parameters():
        kinds[
            "router" if name.endswith(".gate.weight") else "matrix" if weight.ndim > 1 else "vector"
        ].append(weight)
    peaks = {
        "router": course.peak_lr * _ROUTER_SPEED,
        "matrix": course.peak_lr,
        "vector": course.peak_lr,
    }
    groups: list[dict[str, Any]] = [
        {
            "params": weights,
            "peak_lr": peaks[kind],
            "weight_decay": _DECAY if kind == "matrix" else 0.0,
        }
        for kind, weights in kinds.items()
        if weights
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def _save(model: nn.Module, optimiser: torch.optim.AdamW, path: Path, num_done: int) -> None:
    tensors = {}
    for name, weight in model.named_parameters():
        tensors[f"weight.{name}"] = weight.detach()
        tensors |= {f"{part}.{name}": optimiser.state[weight][part] for part in _STATES}
    partial = path.with_name(f".{path.name}.partial")
    save_file(tensors, partial, {"num_steps": str(num_done)})
    os.replace(partial, path)


def _load(model: nn.Module, optimiser: torch.optim.AdamW, path: Path) -> int:
    """Take over weights and moments; return the number of steps done."""
    with safe_open(path, "pt") as file:
        num_done = int(file.metadata()["num_steps"])
        for name, weight in model.named_parameters():
            weight.data.copy_(file.get_tensor(f"weight.{name}"))
            moments = {part: file.get_tensor(f"{part}.{name}") for part in _STATES}
            optimiser.state[weight] = {"step": torch.tensor(float(num_done)), **moments}
    return num_done
