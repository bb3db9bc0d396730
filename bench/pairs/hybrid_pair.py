"""Do recurrent layers cost acceptance? Tokens a pass of a hybrid beside its full-attention twin.

Both begin as the packaged target with every mixer of tokens again: the hybrid has layers of the
gated delta rule, with full attention in every fourth, the twin full attention throughout. They see
the same windows of the same text, and the one that learns faster stops earlier, so that both have
the same loss. Each has a draft that learnt from it: one of neither would tell which of them lies
closer to what it learnt from. An exact tree changes nothing, so the share of both should be one.

Whether trees or drafts make a difference is told by figures without trees: each written text is
read once by its target and once by its draft. If their ratios of hybrid and twin are those of
tokens a pass, trees treat recurrent layers as they treat attention.
"""

import json
import math
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

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

from offload.bench.harness.command import Bench, Findings, command, flag
from offload.bench.harness.gate import Written, reference
from offload.bench.harness.setting import PROMPT_TOKENS, Setting
from offload.bench.harness.tables import Column, Row, Screen, check
from offload.bench.pairs.training import (
    KEPT,
    LEARNT,
    Course,
    draft_loss,
    held_out_texts,
    library_ids,
    next_token_loss,
    packaged,
    teach,
    trained_once,
    windows,
)
from offload.planning.acceptance import bursts
from offload.sampling.sampler import Sampler
from offload.stats import Stats
from offload.trees.spec import parse_tree
from offload.trees.topology import DEFAULT_ACCEPTANCE, best_first
from offload.units import parse_size

HYBRID = "hybrid"
TWIN = "twin"
FIGURES = "figures.json"
TREE = "dynamic:64x16"
TEMPERATURES = (0.0, 0.8)
LIMIT = 0.05
PASSES = f"tokens a pass, {TREE}"
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
    sizes = dense.config
    kept = {key: getattr(sizes, key) for key in KEPT}
    config: Any
    if name == HYBRID:
        config = Qwen3_5TextConfig(
            **kept,
            linear_key_head_dim=sizes.head_dim,
            linear_value_head_dim=sizes.head_dim,
            linear_num_key_heads=sizes.num_key_value_heads,
            linear_num_value_heads=sizes.num_attention_heads,
        )
    else:
        config = Qwen3Config(**kept, rope_parameters=sizes.rope_parameters)
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


def hybrid_pair(recipe: Recipe, screen: Screen) -> Path:
    """Return the folder of both and their drafts, trained once in some forty minutes on a core."""
    return trained_once("hybrid-pair", recipe, partial(make_pair, recipe, screen))


def make_pair(recipe: Recipe, screen: Screen, work: Path, ids: Tensor, held_out: Tensor) -> None:
    """Train both and their drafts in `work`, or go on there; write them in bfloat16, and losses."""

    def learnt(step: int) -> Tensor:
        return windows(ids, _STEP_TOKENS, _TEXT_TOKENS, recipe.seed + LEARNT + step)

    def loss_of(name: str, num_steps: int) -> float:
        """Train one and its draft; return what it loses on held-out text."""
        target = begun(name, packaged("target"), recipe.seed)
        draft = packaged("draft")
        folder = work / draft_of(name)
        teach(target, next_token_loss, learnt, recipe.course, work / name, screen, stop=num_steps)
        teach(draft, partial(draft_loss, target), learnt, recipe.draft, folder, screen)
        batches = held_out_texts(held_out, _TEXT_TOKENS, _NUM_HELD_OUT).split(_BATCH)
        with torch.no_grad():
            return statistics.fmean(next_token_loss(target, batch).item() for batch in batches)

    steps = {HYBRID: recipe.hybrid_steps, TWIN: recipe.twin_steps}
    losses = {name: loss_of(name, num_steps) for name, num_steps in steps.items()}
    (work / FIGURES).write_text(json.dumps(losses, indent=2) + "\n")


def draft_of(name: str) -> str:
    return f"{name}-draft"


def setting_of(pair: Path, name: str) -> Setting:
    return Setting(pair / name, pair / draft_of(name), pair / name, parse_size(_RAM, "--ram"))


def texts_of(
    setting: Setting, prompts: Tensor, temperature: float, num_new: int, **options: Any
) -> tuple[list[Stats], list[Written]]:
    """Return the figures of each prompt's text, and the texts; each prompt has a seed of its own."""
    figures = list[Stats]()
    written = list[Written]()
    with setting.open(TREE, context=_CONTEXT, dtype="float32", **options) as decoder:
        for seed, ids in enumerate(prompts.tolist()):
            done = decoder.generate(ids, max_new_tokens=num_new, temperature=temperature, seed=seed)
            figures.append(done.stats)
            written.append(Written.from_result(ids, done))
    return figures, written


@torch.no_grad()
def without_trees(setting: Setting, written: Sequence[Written]) -> dict[str, list[float]]:
    """Return figures of each text for which target and draft read it once, without any tree.

    They are the sum of min(p, q); how often the draft draws the same token with the same noise;
    the tokens a pass of a static tree, which a walk along the draft's ranks of the text's tokens
    tells; and the target's entropy in nats.
    """
    bounds = parse_tree(TREE)
    tree = best_first(DEFAULT_ACCEPTANCE, bounds.num_nodes, bounds.depth)
    names = ("overlap of p and q", "first guesses drawn", "tokens a pass, by ranks", "entropy of p")
    by_name: dict[str, list[float]] = {name: [] for name in names}
    assert setting.draft is not None, "a draft guesses"
    with reference(setting.target, None, None) as target, reference(setting.draft, None, None) as q:
        for run in setting.begun(written):
            p_TV, q_TV = (score(run.prompt_ids, run.new_ids).float() for score in (target, q))
            sampler = Sampler(run.sampling, p_TV.shape[1])
            positions = [len(run.prompt_ids) + at for at in range(len(run.new_ids))]
            scores_TV = sampler.perturbed(q_TV, positions)
            drawn_T1 = scores_TV.gather(1, torch.tensor(run.new_ids)[:, None])
            ranks_T = (scores_TV > drawn_T1).sum(1)
            law_TV = sampler.distribution(p_TV)
            overlap_T = law_TV.minimum(sampler.distribution(q_TV)).sum(1)
            figures = (
                overlap_T.mean(),
                (ranks_T == 0).float().mean(),
                statistics.fmean(bursts(tree, ranks_T.tolist())),
                torch.special.entr(law_TV).sum(1).mean(),
            )
            for values, figure in zip(by_name.values(), figures, strict=True):
                values.append(float(figure))
    return by_name


def row_of(name: str, hybrid: Sequence[float], twin: Sequence[float]) -> Row:
    """Return means over prompts with their standard errors, and the ratio of both with its own.

    Prompts are the same, but what the two write is not, so the ratio's error is that of means.
    """
    row: Row = {"row": name, "num_texts": len(hybrid)}
    shares = list[float]()
    for side, values in ((HYBRID, hybrid), (TWIN, twin)):
        row[side] = statistics.fmean(values)
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        row[f"{side}_error"] = error
        shares.append(error / row[side] if row[side] else 0.0)
    # greedy laws have no entropy
    row["ratio"] = row[HYBRID] / row[TWIN] if row[TWIN] else None
    row["ratio_error"] = row["ratio"] and row["ratio"] * math.hypot(*shares)
    return row


def over_trainings(rows: Sequence[Row]) -> Row:
    """Return the mean ratio of one figure, with the larger of its errors: texts', or trainings'."""
    every = [row["ratio"] for row in rows]
    by_texts = math.hypot(*(row["ratio_error"] for row in rows)) / len(rows)
    by_trainings = statistics.stdev(every) / math.sqrt(len(rows))
    return {
        **dict.fromkeys((HYBRID, TWIN, f"{HYBRID}_error", f"{TWIN}_error")),
        "row": f"{rows[0]['row']}, all trainings",
        "num_texts": sum(row["num_texts"] for row in rows),
        "ratio": statistics.fmean(every),
        "ratio_error": max(by_texts, by_trainings),
    }


COLUMNS = (
    Column("", "row"),
    Column("training", "training"),
    Column("texts", "num_texts"),
    Column("hybrid", HYBRID, ".3f"),
    Column("+-", f"{HYBRID}_error", ".3f"),
    Column("twin", TWIN, ".3f"),
    Column("+-", f"{TWIN}_error", ".3f"),
    Column("hybrid / twin", "ratio", ".3f"),
    Column("+-", "ratio_error", ".3f"),
)


def measure(bench: Bench, pair: Path, prompts: Tensor, num_new: int, training: int) -> list[Row]:
    """Return a row for each figure and temperature; every text is proved."""
    rows = list[Row]()
    for temperature in TEMPERATURES:
        sides = {}
        for name in (HYBRID, TWIN):
            setting = setting_of(pair, name)
            bench.screen.wait(f"the {name} at T = {temperature}")
            stats, written = texts_of(setting, prompts, temperature, num_new)
            setting.prove(written)
            yields = [text.tokens_per_sweep for text in stats]
            sides[name] = {PASSES: yields, **without_trees(setting, written)}
        for figure, hybrid in sides[HYBRID].items():
            row = row_of(f"{figure}, T = {temperature}", hybrid, sides[TWIN][figure])
            rows.append(bench.row({**row, "training": training}))
    return rows


@command("hybrid-pair", "quick")
def main(
    bench: Bench,
    seed: Annotated[list[int] | None, flag("N", "of a training, several; default: 0")] = None,
) -> Findings:
    """Tokens a pass of a hybrid beside a twin with full attention, of equal loss.

    Both, and a draft for each, are trained when they are not in the cache, which takes some forty
    minutes on a core.
    """
    num_prompts, num_new = bench.effort((192, 96), (4, 32))
    rows = list[Row]()
    losses = {}
    with bench.screen:
        prompts = held_out_texts(library_ids(held_out=True), PROMPT_TOKENS, num_prompts)
        for training in dict.fromkeys(seed or [0]):
            pair = hybrid_pair(Recipe(seed=training), bench.screen)
            losses[training] = json.loads((pair / FIGURES).read_text())
            rows += measure(bench, pair, prompts, num_new, training)
    if len(losses) > 1:
        figures = dict.fromkeys(row["row"] for row in rows if row["ratio"] is not None)
        rows += [over_trainings([row for row in rows if row["row"] == name]) for name in figures]
    losses_line = "; ".join(
        f"{HYBRID} {side_losses[HYBRID]:.3f}, {TWIN} {side_losses[TWIN]:.3f}"
        for side_losses in losses.values()
    )
    wanted = f"{PASSES}: hybrid / twin, off one"
    off = [abs(row["ratio"] - 1) for row in rows if row["row"].startswith(PASSES)]
    return Findings(
        rows=rows,
        tables=[(COLUMNS, rows)],
        notes=[f"held-out loss in nats: {losses_line}"],
        checks=[check(wanted, off, LIMIT, "lower", max(off))],
        settings={"tree": TREE, "losses": losses, "num_new": num_new},
        ceiling={"tokens_per_sweep": 1 + parse_tree(TREE).depth},
    )
