"""How small pairs of models are trained here: AdamW that goes on where it was cut, and a draft's loss.

Invariant: the state is on disk whole or as it was before; a run that goes on ends with the weights
of an uncut one, because a step's loss depends on the weights and the step's number alone.
"""

import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel

from offload.checkpoint.packaged import PAIR

_WARMUP_STEPS = 20
_LEAST_SHARE = 0.05
_SAVE_EVERY = 50
# routers begin at random, beside weights that were trained
_DECAY = 0.05
_ROUTER_SPEED = 10
_LABEL_WEIGHT = 0.5
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
    stop: int | None = None,
) -> None:
    """Learn until the last step; `progress` receives the numbers of steps done and of all.

    Args:
        loss_of: the loss of a step, by its number.
        state: the file to go on from, and to keep the state in.
        stop: take no more steps of the course than these.
    """
    num_steps = course.num_steps if stop is None else stop
    optimiser = _optimiser(model, course)
    first = _load(model, optimiser, state) if state.exists() else 0
    for step in range(first, num_steps):
        for group in optimiser.param_groups:
            group["lr"] = group["peak_lr"] * _share(step, course.num_steps)
        loss = loss_of(step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if (step + 1) % _SAVE_EVERY == 0 or step + 1 == num_steps:
            _save(model, optimiser, state, step + 1)
        progress(step + 1, num_steps)


def _share(step: int, num_steps: int) -> float:
    """Return the learning rate's share: a short warm-up, then a cosine."""
    cosine = 0.5 + 0.5 * math.cos(math.pi * step / num_steps)
    return min(1.0, (step + 1) / _WARMUP_STEPS) * (_LEAST_SHARE + (1 - _LEAST_SHARE) * cosine)


def _optimiser(model: nn.Module, course: Course) -> torch.optim.AdamW:
    groups: dict[bool, dict[str, Any]] = {}
    routers = list[nn.Parameter]()
    for name, weight in model.named_parameters():
        if name.endswith(".gate.weight"):
            routers.append(weight)
            continue
        decay = _DECAY if weight.ndim > 1 else 0.0
        empty = {"params": [], "peak_lr": course.peak_lr, "weight_decay": decay}
        groups.setdefault(weight.ndim > 1, empty)["params"].append(weight)
    found = [*groups.values()]
    if routers:
        speed = course.peak_lr * _ROUTER_SPEED
        found.append({"params": routers, "peak_lr": speed, "weight_decay": 0.0})
    return torch.optim.AdamW(found, betas=(0.9, 0.95), fused=True)


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


def packaged(name: str) -> LlamaForCausalLM:
    """Return a model of the packaged pair, to begin with."""
    return LlamaForCausalLM.from_pretrained(PAIR / name, dtype=torch.float32, use_safetensors=True)


def write_rounded(model: PreTrainedModel, folder: Path, companions: Sequence[str]) -> None:
    """Round the model to bf16 and store it, with these files of the packaged target."""
    model.eval().bfloat16().save_pretrained(folder)
    model.float()
    for name in companions:
        shutil.copyfile(PAIR / "target" / name, folder / name)


def distillation_loss(got_NV: Tensor, wanted_NV: Tensor) -> Tensor:
    """Return KL from the target's distribution, plus its argmax as a label.

    T > 0 accepts by the first, T = 0 by the second.
    """
    log_NV = got_NV.float().log_softmax(-1)
    law_NV = wanted_NV.float().log_softmax(-1)
    kl = functional.kl_div(log_NV, law_NV, log_target=True, reduction="batchmean")
    return kl + _LABEL_WEIGHT * functional.nll_loss(log_NV, wanted_NV.argmax(-1))
