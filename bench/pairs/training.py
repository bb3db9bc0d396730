"""What all trained pairs share: the text, steps of AdamW that go on where they were cut, losses.

The text is the standard library's source; held-out files are those of `prompts`, so benches prompt
with text that no pair has seen. Invariant: a step's loss depends on the weights and the step's
number alone and the state is on disk whole or as it was before, so a run that goes on ends with the
weights of an uncut one; a pair's folder is whole or not there.
"""

import math
import random
import shutil
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from offload.bench.harness.prompts import held_out_files, library_files, read_source
from offload.bench.harness.tables import Screen
from offload.checkpoint.files import cache_folder, locked_anew, replacing
from offload.checkpoint.packaged import PAIR

# files beside a packaged model's weights
COMPANIONS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
# of a config, as the dense model has them
KEPT = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    *("bos_token_id", "eos_token_id", "tie_word_embeddings"),
)
LEARNT = 1000  # where the seeds of windows begin
_END_OF_TEXT = 0
_WARMUP_STEPS = 20
_LEAST_SHARE = 0.05
_SAVE_EVERY = 50
# routers begin at random, beside weights that were trained
_DECAY = 0.05
_ROUTER_SPEED = 10
_LABEL_WEIGHT = 0.5
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Course(NamedTuple):
    num_steps: int
    peak_lr: float


def library_ids(*, held_out: bool) -> Tensor:
    """Return ids of all files in random order, the end of text before each."""
    kept_back = held_out_files()
    files = kept_back if held_out else sorted(set(library_files()).difference(kept_back))
    texts = [read_source(path) for path in random.Random(0).sample(files, len(files))]
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target", trust_remote_code=False)
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return torch.tensor([token for document in ids for token in (_END_OF_TEXT, *document)])


def windows(ids: Tensor, num_tokens: int, length: int, seed: int) -> Tensor:
    """Return `num_tokens` ids as (windows, length), from random places."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(ids) - length, (num_tokens // length,), generator=generator)
    return torch.stack([ids[start : start + length] for start in starts])


def held_out_texts(ids: Tensor, length: int, num_texts: int) -> Tensor:
    """Return (texts, length), spread over all that was kept back."""
    rows = ids[: len(ids) // length * length].view(-1, length)
    return rows[:: max(1, len(rows) // num_texts)][:num_texts]


def packaged(name: str) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(PAIR / name, dtype=torch.float32, use_safetensors=True)


def write_rounded(model: PreTrainedModel, folder: Path) -> None:
    """Round the model to bf16 and store it, with companions of the packaged target."""
    model.eval().bfloat16().save_pretrained(folder)
    model.float()
    for name in COMPANIONS:
        shutil.copyfile(PAIR / "target" / name, folder / name)


def trained_once(name: str, recipe: Any, make: Callable[[Path, Tensor, Tensor], None]) -> Path:
    """Return the folder of a recipe's models, made when it is not there.

    `make` writes them into a folder, beside states; it gets the ids to learn and held-out ones.
    Raises `UserError` while another process makes them.
    """
    folder = cache_folder() / f"{name}-{zlib.crc32(repr(recipe).encode()):08x}"
    if folder.exists():
        return folder
    # a run that is cut leaves it as it is
    work = folder.with_name(f".{folder.name}.training")
    with locked_anew(work):
        make(work, library_ids(held_out=False), library_ids(held_out=True))
        for state in work.glob("*.state"):
            state.unlink()
        work.replace(folder)
    return folder


def teach(
    model: PreTrainedModel,
    loss: Callable[[Any, Tensor], Tensor],
    batch: Callable[[int], Tensor],
    course: Course,
    folder: Path,
    screen: Screen,
    *,
    stop: int | None = None,
) -> None:
    """Train a model on batches by step, or go on, with its state beside `folder`; store it there.

    That rounds it, so that its draft learns from what is stored.
    """
    state = folder.with_name(f"{folder.name}.state")
    progress = partial(screen.count, label=f"training {folder.name}")
    train(model, lambda step: loss(model, batch(step)), course, state, progress, stop)
    write_rounded(model, folder)


def train(
    model: nn.Module,
    loss_of: Callable[[int], Tensor],
    course: Course,
    state: Path,
    progress: Callable[[int, int], None],
    stop: int | None = None,
) -> None:
    """Learn until the last step of the course, or `stop`; go on from `state`, and keep it there."""
    num_steps = course.num_steps if stop is None else stop
    optimiser = _optimiser(model, course)
    first = _load(model, optimiser, state) if state.exists() else 0
    for step in range(first, num_steps):
        # a short warm-up, then a cosine
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / course.num_steps)
        share = min(1.0, (step + 1) / _WARMUP_STEPS)
        for group in optimiser.param_groups:
            group["lr"] = group["peak_lr"] * share * (_LEAST_SHARE + (1 - _LEAST_SHARE) * cosine)
        loss_of(step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if (step + 1) % _SAVE_EVERY == 0 or step + 1 == num_steps:
            _save(model, optimiser, state, step + 1)
        progress(step + 1, num_steps)


def _optimiser(model: nn.Module, course: Course) -> torch.optim.AdamW:
    groups_of = dict[tuple[float, float], list[nn.Parameter]]()
    for name, weight in model.named_parameters():
        is_router = name.endswith(".gate.weight")
        peak_lr = course.peak_lr * (_ROUTER_SPEED if is_router else 1)
        decay = 0.0 if is_router or weight.ndim < 2 else _DECAY
        groups_of.setdefault((peak_lr, decay), []).append(weight)
    names = ("peak_lr", "weight_decay")
    groups = [
        {"params": held, **dict(zip(names, key, strict=True))} for key, held in groups_of.items()
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def _save(model: nn.Module, optimiser: torch.optim.AdamW, path: Path, num_done: int) -> None:
    tensors = {}
    for name, weight in model.named_parameters():
        tensors[f"weight.{name}"] = weight.detach()
        tensors |= {f"{part}.{name}": optimiser.state[weight][part] for part in _MOMENTS}
    with replacing(path) as scratch:
        save_file(tensors, scratch, {"num_steps": str(num_done)})


def _load(model: nn.Module, optimiser: torch.optim.AdamW, path: Path) -> int:
    with safe_open(path, "pt") as file:
        num_done = int(file.metadata()["num_steps"])
        for name, weight in model.named_parameters():
            weight.data.copy_(file.get_tensor(f"weight.{name}"))
            moments = {part: file.get_tensor(f"{part}.{name}") for part in _MOMENTS}
            optimiser.state[weight] = {"step": torch.tensor(float(num_done)), **moments}
    return num_done


def next_token_loss(model: PreTrainedModel, tokens_BS: Tensor) -> Tensor:
    return loss_of_logits(model(input_ids=tokens_BS, use_cache=False).logits, tokens_BS)


def loss_of_logits(logits_BSV: Tensor, tokens_BS: Tensor) -> Tensor:
    logits_NV = logits_BSV[:, :-1].flatten(0, 1).float()
    return functional.cross_entropy(logits_NV, tokens_BS[:, 1:].flatten())


def draft_loss(target: PreTrainedModel, draft: PreTrainedModel, tokens_BS: Tensor) -> Tensor:
    """Return KL from the target's law, for T > 0, plus its argmax as a label, for T = 0."""
    with torch.no_grad():
        wanted_NV = target(input_ids=tokens_BS, use_cache=False).logits.flatten(0, 1)
    got_NV = draft(input_ids=tokens_BS, use_cache=False).logits.flatten(0, 1)
    log_NV = got_NV.float().log_softmax(-1)
    law_NV = wanted_NV.float().log_softmax(-1)
    kl = functional.kl_div(log_NV, law_NV, log_target=True, reduction="batchmean")
    return kl + _LABEL_WEIGHT * functional.nll_loss(log_NV, wanted_NV.argmax(-1))
