"""Do recurrent layers cost acceptance? Tokens a pass of a hybrid beside its full-attention twin.

Both begin as the packaged target with every mixer of tokens anew: the hybrid has layers of the
gated delta rule, with full attention in every fourth, the twin full attention throughout. They see
the same windows of the same text in the same order, at the same pace, and the one that learns
faster stops earlier, so that both have the same loss. Each has a draft that learnt from it: a draft
of neither would tell which of them lies closer to what that draft learnt from. Prompts are held-out
code. An exact tree changes nothing, so the share of both should be one.
"""

import json
import math
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from offload.bench.harness.command import Bench, Findings, command
from offload.bench.harness.gate import Written
from offload.bench.harness.prompts import Prompt, encoded
from offload.bench.harness.record import Row
from offload.bench.harness.setting import PROMPT_TOKENS, Setting
from offload.bench.harness.tables import Column, Screen
from offload.bench.pairs.training import (
    KEPT,
    LEARNT,
    Course,
    draft_loss,
    held_out_texts,
    next_token_loss,
    packaged,
    teach,
    trained_once,
    windows,
)
from offload.trees.spec import parse_tree
from offload.units import parse_size

HYBRID = "hybrid"
TWIN = "twin"
FIGURES = "figures.json"
TREE = "dynamic:64x16"
TEMPERATURES = (0.0, 0.8)
LIMIT = 0.05
_RAM = "2GiB"
_CONTEXT = 512
_STEP_TOKENS = 512
_TEXT_TOKENS = 256
_NUM_HELD_OUT = 192
_BATCH = 16


class Recipe(NamedTuple):
    """All that the twins depend on, beside the text."""

    course: Course = Course(1600, 2e-3)
    # where each has the same loss on held-out text
    hybrid_steps: int = 1600
    twin_steps: int = 1450
    draft: Course = Course(350, 5e-4)
    seed: int = 0
    version: int = 2  # raise it when the same recipe comes to give other models


def begun(name: str, dense: LlamaForCausalLM, seed: int) -> PreTrainedModel:
    """Return a Qwen 3.5, or a Qwen 3, in float32 whose mixers begin at random."""
    own = dense.config
    kept = {key: getattr(own, key) for key in KEPT}
    config: Any
    if name == HYBRID:
        config = Qwen3_5TextConfig(
            **kept,
            linear_key_head_dim=own.head_dim,
            linear_value_head_dim=own.head_dim,
            linear_num_key_heads=own.num_key_value_heads,
            linear_num_value_heads=own.num_attention_heads,
        )
    else:
        config = Qwen3Config(**kept, rope_parameters=own.rope_parameters)
    torch.manual_seed(seed)
    model = (Qwen3_5ForCausalLM if name == HYBRID else Qwen3ForCausalLM)(config).float()
    taken = {}
    for key, weight in dense.state_dict().items():
        if ".self_attn." not in key:
            # norms of the hybrid store what is added to one
            norms_less = float(name == HYBRID and key.endswith("norm.weight"))
            taken[key] = weight.float() - norms_less
    _, unknown = model.load_state_dict(taken, strict=False)
    assert not unknown, f"a dense model has {unknown}"
    return model


def hybrid_pair(screen: Screen) -> Path:
    """Return the folder of both and their drafts, trained once in some forty minutes on a core."""
    recipe = Recipe()
    return trained_once("hybrid-pair", recipe, partial(make_pair, recipe, screen))


def make_pair(recipe: Recipe, screen: Screen, work: Path, ids: Tensor, held_out: Tensor) -> None:
    """Train both and their drafts in `work`, or go on there; write them in bfloat16, and losses."""

    def learnt(step: int) -> Tensor:
        return windows(ids, _STEP_TOKENS, _TEXT_TOKENS, recipe.seed + LEARNT + step)

    def loss_of(name: str, num_steps: int) -> float:
        """Train one and its draft; return what it loses on held-out text."""
        target = begun(name, packaged("target"), recipe.seed)
        draft = packaged("draft")
        own = work / draft_of(name)
        teach(target, next_token_loss, learnt, recipe.course, work / name, screen, stop=num_steps)
        teach(draft, partial(draft_loss, target), learnt, recipe.draft, own, screen)
        batches = held_out_texts(held_out, _TEXT_TOKENS, _NUM_HELD_OUT).split(_BATCH)
        with torch.no_grad():
            return statistics.fmean(next_token_loss(target, one).item() for one in batches)

    steps = {HYBRID: recipe.hybrid_steps, TWIN: recipe.twin_steps}
    losses = {name: loss_of(name, num_steps) for name, num_steps in steps.items()}
    (work / FIGURES).write_text(json.dumps(losses, indent=2) + "\n")


def draft_of(name: str) -> str:
    return f"{name}-draft"


def setting_of(pair: Path, name: str) -> Setting:
    return Setting(pair / name, pair / draft_of(name), pair / name, parse_size(_RAM, "--ram"))


def texts_of(
    setting: Setting, prompts: Sequence[Prompt], temperature: float, num_new: int
) -> tuple[list[float], list[Written]]:
    """Return tokens a pass by prompt, and the texts; each prompt has a seed of its own."""
    yields = list[float]()
    written = list[Written]()
    with setting.open(TREE, context=_CONTEXT, dtype="float32") as decoder:
        for seed, prompt in enumerate(prompts):
            ids = encoded(decoder, prompt, PROMPT_TOKENS)
            done = decoder.generate(ids, max_new_tokens=num_new, temperature=temperature, seed=seed)
            yields.append(done.stats.tokens_per_sweep)
            written.append(Written.of(ids, done))
    return yields, written


def row_of(temperature: float, hybrid: Sequence[float], twin: Sequence[float]) -> Row:
    """Return means over prompts with their standard errors, and the ratio of both with its own.

    Prompts are the same, but what the two write is not, so the ratio's error is that of means.
    """
    found: Row = {"row": f"T = {temperature}", "num_texts": len(hybrid)}
    shares = list[float]()
    for name, values in ((HYBRID, hybrid), (TWIN, twin)):
        found[name] = statistics.fmean(values)
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        found[f"{name}_error"] = error
        shares.append(error / found[name])
    found["ratio"] = found[HYBRID] / found[TWIN]
    found["ratio_error"] = found["ratio"] * math.hypot(*shares)
    return found


COLUMNS = (
    Column("tokens a pass", "row"),
    Column("texts", "num_texts"),
    Column("hybrid", HYBRID, ".3f"),
    Column("+-", f"{HYBRID}_error", ".3f"),
    Column("twin", TWIN, ".3f"),
    Column("+-", f"{TWIN}_error", ".3f"),
    Column("hybrid / twin", "ratio", ".3f"),
    Column("+-", "ratio_error", ".3f"),
)


@command("hybrid-pair", "quick")
def main(bench: Bench) -> Findings:
    """Tokens a pass of a hybrid beside a twin with full attention, of equal loss.

    Both, and a draft for each, are trained when they are not in the cache, which takes some forty
    minutes on a core.
    """
    with bench.screen:
        pair = hybrid_pair(bench.screen)
    num_prompts, num_new = bench.effort((48, 96), (4, 32))
    prompts = bench.prompts(num_prompts)
    settings = {name: setting_of(pair, name) for name in (HYBRID, TWIN)}
    rows = []
    written: dict[str, list[Written]] = {name: [] for name in settings}
    for temperature in TEMPERATURES:
        yields = {}
        for name, setting in settings.items():
            bench.screen.wait(f"the {name} at T = {temperature}")
            yields[name], texts = texts_of(setting, prompts, temperature, num_new)
            written[name] += texts
        rows.append(row_of(temperature, yields[HYBRID], yields[TWIN]))
    for name, setting in settings.items():
        setting.prove(written[name])
    losses = json.loads((pair / FIGURES).read_text())
    told = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
    return Findings(
        rows=rows,
        tables=[(COLUMNS, rows)],
        notes=[f"{TREE}; held-out loss in nats: {told}; the ratio should be within {LIMIT:.0%}"],
        settings={"tree": TREE, "losses": losses, "num_new": num_new},
        ceiling={"tokens_per_sweep": 1 + parse_tree(TREE).depth},
    )
