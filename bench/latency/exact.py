"""The gate of a place: with every layer streamed, every tree writes the ids of transformers.

In float32 they are equal. In 16 bits the ids of all trees are those of none, bit for bit, where the
decoder promises that; those of transformers, which rounds differently, may part from them where two
tokens lie closer than rounding, and only the first such place says anything. A decoder that
promises the same bits and one that does not compute in different ways: each is asked by itself.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from offload.bench.harness.command import Bench, Findings, command
from offload.bench.harness.models import place_of, resident_pair
from offload.bench.harness.setting import Setting
from offload.bench.harness.tables import Row, WrongTokenError, row, row_line
from offload.checkpoint.packaged import PROMPT
from offload.reports.proof import BF16_NOISE

TREES = ("none", "chain:8", "sequences:7x9", "64x16", "grown:64x16")
_LARGEST = "64x16"
_CONTEXT = 768
_NUM_NEW = 60


def gates(
    setting: Setting, prompt: str, num_new: int, invariant: bool | None = None
) -> Iterator[Row]:
    """Run the gate in both types, without `invariant` except for the bits of trees.

    Raises `WrongTokenError` where an id is wrong in float32, or a run in bf16 ends too early.
    """
    device = setting.opened.torch_device
    prompt_ids, wanted = reference_ids(setting.target, prompt, device, torch.float32, num_new)
    for tree, ours in streamed_ids(setting, prompt_ids, num_new, "float32", TREES, invariant):
        if ours != wanted:
            raise WrongTokenError(f"{tree}: not the ids of transformers in float32")
    name = "gate: float32 greedy ids equal transformers"
    yield row(name, len(wanted), "tokens", len(wanted), 1.0, promise="exact")
    yield from in_bf16(setting, prompt, device, num_new, invariant)
    for dtype in ("bfloat16", "float16") if invariant is not False else ():
        yield from same_for_all_trees(setting, prompt_ids, dtype, num_new)


def reference_ids(
    model: Path, prompt: str, device: torch.device, dtype: torch.dtype, num_new: int
) -> tuple[list[int], list[int]]:
    """Return the prompt's ids, and what transformers writes behind them."""
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(device)
    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": num_new,
        "do_sample": False,
    }
    theirs = _reference(model, dtype, device).generate(ids, **options)
    return ids[0].tolist(), theirs[0, ids.shape[1] :].tolist()


def _reference(model: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    made = AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype, trust_remote_code=False, use_safetensors=True
    )
    return made.eval().to(device)


def streamed_ids(
    setting: Setting,
    prompt_ids: list[int],
    num_new: int,
    dtype: str,
    trees: Sequence[str],
    invariant: bool | None,
) -> Iterator[tuple[str, list[int]]]:
    options = {"dtype": dtype, "context": _CONTEXT, "invariant": invariant}
    with setting.open_streamed(_LARGEST, **options) as decoder:
        assert not any(decoder.plan.is_resident), "a layer stays, which would not be tested"
        for tree in trees:
            yield tree, decoder.generate(prompt_ids, max_new_tokens=num_new, tree=tree).token_ids


def same_for_all_trees(
    setting: Setting, prompt_ids: list[int], dtype: str, num_new: int
) -> Iterator[Row]:
    """Count ids that are those without a tree; of a decoder that promises none it is no promise."""
    with setting.open_streamed(_LARGEST, dtype=dtype, context=_CONTEXT) as decoder:
        runs = [decoder.generate(prompt_ids, max_new_tokens=num_new, tree=tree) for tree in TREES]
        promised = decoder.invariance
    texts = [run.token_ids for run in runs]
    num_same = sum(
        ids_of_tree == other
        for ids in texts
        for ids_of_tree, other in zip(ids, texts[0], strict=False)
    )
    name = f"gate: {dtype}, ids of all trees are those of none"
    if promised.holds:
        yield row(name, num_same, "tokens", sum(map(len, texts)), 1.0, promise="same bits")
    else:
        name = f"{name} (not promised: {promised.reason})"
        yield row(name, num_same, "tokens", None, 1.0, promise="same bits") | {"is_met": None}


def in_bf16(
    setting: Setting, prompt: str, device: torch.device, num_new: int, invariant: bool | None
) -> Iterator[Row]:
    """Yield by how much the reference prefers its token where ids part; 0 where they do not."""
    prompt_ids, wanted = reference_ids(setting.target, prompt, device, torch.bfloat16, num_new)
    trees = ("none", "64x16")
    for tree, ours in streamed_ids(setting, prompt_ids, num_new, "bfloat16", trees, invariant):
        pairs = enumerate(zip(ours, wanted, strict=False))
        at = next((index for index, (token, other) in pairs if token != other), None)
        if at is None and len(ours) != len(wanted):
            raise WrongTokenError(f"{tree}: {len(ours)} of {len(wanted)} tokens in bfloat16")
        gap = 0.0
        if at is not None:
            ids = torch.tensor([[*prompt_ids, *wanted[:at]]], device=device)
            with torch.inference_mode():
                logits_V = _reference(setting.target, torch.bfloat16, device)(ids).logits[0, -1]
            gap = float(logits_V.float().max() - logits_V[ours[at]].float())
        name = f"gate: bf16, {tree}: gap of the reference where ids part"
        yield {**row(name, gap, "logits", BF16_NOISE, 1.0, promise="exact"), "parts_at": at}


@command("gate", "place max_tokens")
def main(bench: Bench) -> Findings:
    """Does every tree write what transformers writes here, every layer streamed?

    Exits with 2 where one does not.
    """
    logging.disable_progress_bar()  # of weights that take a blink to load
    place = place_of(bench.given.device, bench.given.gpu_mem)
    setting = resident_pair(bench.given.ram or "4GiB")._replace(**place)
    rows = []
    for measured_row in gates(setting, PROMPT, bench.given.max_tokens or _NUM_NEW):
        rows.append(measured_row)
        print(row_line(measured_row), flush=True)
    if missed := [row["row"] for row in rows if row["is_met"] is False]:
        raise WrongTokenError(f"{'; '.join(missed)}: missed")
    return Findings(rows=rows, settings=setting.as_dict(), ceiling={"logits": BF16_NOISE})
