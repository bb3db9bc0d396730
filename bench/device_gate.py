"""Nothing is timed on a GPU before this: every layer streamed, the ids are those of transformers on the same GPU.

In float32 they are equal, whatever the tree. In bf16 a tree and a single row round differently, so the two may part
where two tokens lie closer than rounding; from there on they write different texts, so only the first such place says
anything.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from offload.bench.gate import WrongTokenError
from offload.bench.promises import Row, row
from offload.engine.decoder import Decoder
from offload.memory.plan import MemoryPlan, Tier
from offload.planning import room
from offload.tuning.audit import BF16_NOISE

TREES = ("none", "chain:8", "sequences:7x9", "64x16", "grown:64x16")
_LARGEST = "64x16"

Open = Callable[..., AbstractContextManager[Decoder]]  # target, draft, options -> a decoder on the GPU


def gates(open_decoder: Open, pair: Path, prompt: str, place: torch.device, num_new: int) -> Iterator[Row]:
    """Both types; how far apart bf16 may be is a promise, and every run in it is proved once more.

    Args:
        pair: folder with a small `target` and `draft`.

    Raises:
        WrongTokenError: an id is wrong in float32, or a run in bf16 ends before the reference does.
    """
    prompt_ids, wanted = reference_ids(pair / "target", prompt, place, torch.float32, num_new)
    for tree, ours in streamed_ids(open_decoder, pair, prompt_ids, num_new, "float32", TREES):
        if ours != wanted:
            raise WrongTokenError(f"{tree}: not the ids of transformers in float32, so nothing is timed")
    yield row("gate: float32 greedy ids equal transformers", len(wanted), len(wanted), 1.0, "tokens", promise="exact")
    yield from _in_bf16(open_decoder, pair, prompt, place, num_new)


def reference_ids(
    model: Path, prompt: str, place: torch.device, dtype: torch.dtype, num_new: int
) -> tuple[list[int], list[int]]:
    """The prompt's ids, and what transformers writes behind them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)(prompt, return_tensors="pt")["input_ids"].to(place)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(place).eval()
    out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False)
    return ids[0].tolist(), out[0, ids.shape[1] :].tolist()


@contextmanager
def all_streamed() -> Iterator[None]:
    """Meanwhile every layer stays in host memory, also where the GPU has room for it."""
    plan_memory = room.plan_memory

    def streamed(*args: Any, **more: Any) -> MemoryPlan:
        plan = plan_memory(*args, **more)
        sizes: dict[str, Any] = {"slot_bytes": max(plan.layer_bytes), "num_slots": 2}
        return replace(plan, tier_L=(Tier.HOST,) * len(plan.layer_bytes), num_host_slots=0, **sizes)

    with mock.patch.object(room, "plan_memory", streamed):
        yield


def streamed_ids(
    open_decoder: Open, pair: Path, prompt_ids: Sequence[int], num_new: int, dtype: str, trees: Sequence[str]
) -> Iterator[tuple[str, list[int]]]:
    """What we write with each tree while every layer comes out of host memory."""
    with all_streamed(), open_decoder(pair / "target", pair / "draft", tree=_LARGEST, dtype=dtype) as decoder:
        for tree in trees:
            yield tree, decoder.generate(list(prompt_ids), max_new_tokens=num_new, tree=tree).token_ids


def parting_gap(logits_V: Tensor, ours: int) -> float:
    """By how much the reference prefers its own token to `ours`."""
    return float(logits_V.float().max() - logits_V[ours].float())


def _in_bf16(open_decoder: Open, pair: Path, prompt: str, place: torch.device, num_new: int) -> Iterator[Row]:
    prompt_ids, wanted = reference_ids(pair / "target", prompt, place, torch.bfloat16, num_new)
    for tree, ours in streamed_ids(open_decoder, pair, prompt_ids, num_new, "bfloat16", ("none", "64x16")):
        at = next((i for i, (one, other) in enumerate(zip(ours, wanted, strict=False)) if one != other), None)
        if at is None and len(ours) != len(wanted):
            raise WrongTokenError(f"{tree}: {len(ours)} of {len(wanted)} tokens in bfloat16, so nothing is timed")
        gap = 0.0
        if at is not None:
            gap = parting_gap(_next_logits(pair / "target", [*prompt_ids, *wanted[:at]], place), ours[at])
        name = f"gate: bf16, {tree}: gap of the reference where ids part"
        yield {**row(name, gap, BF16_NOISE, 1.0, "logits", promise="exact"), "parts_at": at}


def _next_logits(model: Path, ids: Sequence[int], place: torch.device) -> Tensor:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(place).eval()
    with torch.inference_mode():
        logits: Tensor = theirs(torch.tensor([list(ids)], device=place)).logits[0, -1]
    return logits
