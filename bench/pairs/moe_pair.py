"""Train a small mixture of experts and its draft, once, and keep them in the cache.

What experts on demand gain depends on how a text routes and on how often a draft is right, so both
have to be trained. A target that is trained this shortly would route by token alone; real mixtures
prefer some experts within a text, so the entropy of a text's mean choice is to lie below that of
all texts' by `_TEXT_NATS`; more is not rewarded.

The target begins as a dense Llama. Every expert is a slice of the dense feed-forward rows; experts
of one copy share a router row except for some noise, so that a token chooses the slices of one copy
and gets the dense layer back (virtual groups: He et al., 2410.07524). Query and key norms begin at
the size that queries and keys have. Invariant: without noise and these norms the logits are the
dense model's.
"""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from offload.bench.harness.setting import Setting
from offload.bench.harness.tables import Screen
from offload.bench.pairs.training import (
    KEPT,
    LEARNT,
    Course,
    draft_loss,
    held_out_texts,
    loss_of_logits,
    packaged,
    teach,
    trained_once,
    windows,
    write_rounded,
)
from offload.checkpoint.files import cache_folder, publish_atomically, replacing
from offload.checkpoint.packaged import inflated_target
from offload.units import parse_size

# the last in units of a tensor's own deviation
_ROUTER_STD = 0.1
_ROUTER_NOISE = 0.02
_WEIGHT_NOISE = 0.05

_STEP_TOKENS = 2048
_TEXT_TOKENS = 256
_LONG_TEXT_TOKENS = 512
_SHORT_SHARE = 0.75
_MEASURED = 99  # the seed of texts by which queries and keys are measured
# what routers are to know of texts of this many tokens
_ROUTED_TOKENS = 128
_TEXT_NATS = 0.8
_TEXT_WEIGHT = 1.0
# what the target writes for its draft: a third each greedy, at T = 0.6 and at T = 1
_NUM_WRITTEN = 64
_WRITTEN_TOKENS = 256
_PROMPT_TOKENS = 48
_WAYS: tuple[dict[str, Any], ...] = (
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.6, "top_k": 0},
    {"do_sample": True, "top_k": 0},
)
# what both are measured on
_NUM_HELD_OUT = 64
_NUM_GUESSES = 4
_BATCH = 8


class ExpertSizes(NamedTuple):
    num_experts: int = 32
    num_chosen: int = 4
    # of an expert; a slice of the dense rows, and fresh ones that nothing listens to yet
    ffn_size: int = 160


def upcycled(
    dense: LlamaForCausalLM, sizes: ExpertSizes, tokens_BS: Tensor, seed: int
) -> Qwen3MoeForCausalLM:
    """Return the mixture in float32; `tokens_BS` are for measuring queries and keys."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        **{name: getattr(dense.config, name) for name in (*KEPT, "rope_parameters")},
        num_experts=sizes.num_experts,
        num_experts_per_tok=sizes.num_chosen,
        norm_topk_prob=True,
        moe_intermediate_size=sizes.ffn_size,
        decoder_sparse_step=1,
        use_sliding_window=False,
        router_aux_loss_coef=0.0,
    )
    model = Qwen3MoeForCausalLM(config).float()
    weights = dense.float().state_dict()
    for name, scale in _norm_scales(dense, tokens_BS).items():
        weights[name] = torch.full((dense.config.head_dim,), scale)
    for index in range(dense.config.num_hidden_layers):
        mlp = f"model.layers.{index}.mlp."
        gate, up, down = (
            weights.pop(f"{mlp}{part}_proj.weight") for part in ("gate", "up", "down")
        )
        weights |= {mlp + part: weight for part, weight in _experts(gate, up, down, sizes).items()}
    model.load_state_dict(weights)
    return model


def _experts(
    gate_FH: Tensor, up_FH: Tensor, down_HF: Tensor, sizes: ExpertSizes
) -> dict[str, Tensor]:
    """Return a mixture's weights that compute what these of a dense layer do, except for noise.

    A copy of the layer is `num_chosen` experts, each a slice of its rows; an expert's further rows
    repeat others, and their output is dropped.
    """

    def noisy(weight: Tensor) -> Tensor:
        return weight + torch.randn_like(weight) * weight.std() * _WEIGHT_NOISE

    slice_size = len(gate_FH) // sizes.num_chosen
    assert slice_size <= sizes.ffn_size, "an expert has room for its slice"
    assert sizes.num_experts % sizes.num_chosen == 0, "experts are whole copies of the layer"
    offset_F = torch.arange(sizes.ffn_size)
    gate_ups = []
    downs = []
    for expert in range(sizes.num_experts):
        rows = (expert % sizes.num_chosen * slice_size + offset_F) % len(gate_FH)
        gate_ups.append(torch.cat([noisy(gate_FH[rows]), noisy(up_FH[rows])]))
        # each chosen expert has 1 / num_chosen of the router's weight
        down = down_HF[:, rows] * sizes.num_chosen
        downs.append(noisy(down.where(offset_F < slice_size, 0.0)))
    num_copies = sizes.num_experts // sizes.num_chosen
    copy_CH = torch.randn(num_copies, gate_FH.shape[1]) * _ROUTER_STD
    router_EH = copy_CH.repeat_interleave(sizes.num_chosen, 0)
    router_EH += torch.randn_like(router_EH) * _ROUTER_NOISE
    return {
        "gate.weight": router_EH,
        "experts.gate_up_proj": torch.stack(gate_ups),
        "experts.down_proj": torch.stack(downs),
    }


@torch.no_grad()
def _norm_scales(dense: LlamaForCausalLM, tokens_BS: Tensor) -> dict[str, float]:
    """Return root mean squares of queries and keys, by the names of their norms' weights."""
    scales = dict[str, float]()

    def measure(name: str, out: Tensor) -> None:
        scales[f"{name.removesuffix('_proj')}_norm.weight"] = out.square().mean().sqrt().item()

    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: measure(name, out))
        for name, module in dense.named_modules()
        if name.endswith((".q_proj", ".k_proj"))
    ]
    dense(input_ids=tokens_BS)
    for hook in hooks:
        hook.remove()
    return scales


def untrained_mixture(size_bytes: int) -> Path:
    """Return an untrained mixture of this size, where no good text is needed; it is made once."""
    folder = cache_folder() / "moe-untrained"
    if not folder.is_dir():
        dense = packaged("target")
        generator = torch.Generator().manual_seed(0)
        tokens_BS = torch.randint(dense.config.vocab_size, (4, 128), generator=generator)
        with publish_atomically(folder, folder.with_name(f"{folder.name}.part")) as scratch:
            write_rounded(upcycled(dense, ExpertSizes(), tokens_BS, 0), scratch)
    return inflated_target(size_bytes, lambda done, total: None, folder, folder.name)


class Recipe(NamedTuple):
    """All that a pair depends on, beside the text."""

    sizes: ExpertSizes = ExpertSizes()
    target: Course = Course(500, 1e-3)
    draft: Course = Course(350, 5e-4)
    seed: int = 0
    version: int = 1  # raise it when the same recipe comes to give another pair


def moe_pair(screen: Screen) -> Path:
    """Return the folder of `target` and `draft`, trained once in some twenty minutes on a core."""
    recipe = Recipe()
    return trained_once("moe-pair", recipe, partial(make_pair, recipe, screen))


def make_pair(recipe: Recipe, screen: Screen, work: Path, ids: Tensor, held_out: Tensor) -> None:
    """Train both models in `work`, or go on there; write them and `figures.json`."""
    measured = windows(ids, 2 * _STEP_TOKENS, _TEXT_TOKENS, recipe.seed + _MEASURED)
    target = upcycled(packaged("target"), recipe.sizes, measured, recipe.seed)
    target.set_experts_implementation("grouped_mm")

    def batch(step: int) -> Tensor:
        """Return short texts, and at last longer ones, so that late positions are trained too."""
        is_short = step < _SHORT_SHARE * recipe.target.num_steps
        length = _TEXT_TOKENS if is_short else _LONG_TEXT_TOKENS
        return windows(ids, _STEP_TOKENS, length, recipe.seed + LEARNT + step)

    teach(target, target_loss, batch, recipe.target, work / "target", screen)
    screen.wait("writing what the draft learns from")
    texts_BS = kept_texts(work / "written.state", target, ids, recipe.seed)
    draft = packaged("draft")

    def draft_batch(step: int) -> Tensor:
        """Return by turns what the target wrote and the corpus."""
        generator = torch.Generator().manual_seed(recipe.seed + LEARNT + step)
        num_texts = _STEP_TOKENS // texts_BS.shape[1]
        picked = torch.randint(0, len(texts_BS), (num_texts,), generator=generator)
        return batch(step) if step % 2 else texts_BS[picked]

    def loss(draft: LlamaForCausalLM, tokens_BS: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return draft_loss(target, draft, tokens_BS)

    teach(draft, loss, draft_batch, recipe.draft, work / "draft", screen)
    figures = held_out_figures(target, draft, held_out)
    (work / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")


def target_loss(model: Qwen3MoeForCausalLM, tokens_BS: Tensor) -> Tensor:
    """Return next-token loss and that of routers; texts are multiples of `_ROUTED_TOKENS`."""
    with torch.autocast("cpu", torch.bfloat16):
        out = model(input_ids=tokens_BS, use_cache=False, output_router_logits=True)
    missing = []
    for logits_NE in out.router_logits:
        told_nats = told_of_text(logits_NE.float().unflatten(0, (-1, _ROUTED_TOKENS)))
        missing.append((_TEXT_NATS - told_nats).clamp(min=0))
    loss = loss_of_logits(out.logits, tokens_BS)
    return loss + _TEXT_WEIGHT * torch.stack(missing).mean()


def told_of_text(logits_TSE: Tensor) -> Tensor:
    """Return in nats how far a text's mean choice of experts differs from that of all texts."""

    def entropy(share: Tensor) -> Tensor:
        return -(share * (share + 1e-9).log()).sum(-1)

    chosen_TE = logits_TSE.softmax(-1).mean(1)
    return entropy(chosen_TE.mean(0)) - entropy(chosen_TE).mean()


@torch.no_grad()
def kept_texts(path: Path, target: Qwen3MoeForCausalLM, ids: Tensor, seed: int) -> Tensor:
    """Return the target's texts behind corpus prompts, (texts, tokens), kept in a file."""
    if not path.exists():
        torch.manual_seed(seed)
        texts = []
        for number, way in enumerate(_WAYS):
            prompts = windows(ids, _NUM_WRITTEN * _PROMPT_TOKENS, _PROMPT_TOKENS, seed + number)
            options = {"attention_mask": torch.ones_like(prompts), **way}
            options |= {"min_length": _WRITTEN_TOKENS, "max_length": _WRITTEN_TOKENS}
            with torch.autocast("cpu", torch.bfloat16):
                texts.append(target.generate(prompts, **options))
        with replacing(path) as partial_file:
            save_file({"texts": torch.cat(texts)}, partial_file)
    return load_file(path)["texts"]


@torch.no_grad()
def held_out_figures(
    target: Qwen3MoeForCausalLM, draft: LlamaForCausalLM, ids: Tensor
) -> dict[str, float]:
    """Return losses, and `rank_N`: how often the draft's N-th guess is the target's token."""
    texts_BS = held_out_texts(ids, _TEXT_TOKENS, _NUM_HELD_OUT)
    wanted_BSV, guessed_BSV = (
        torch.cat([model(input_ids=rows).logits for rows in texts_BS.split(_BATCH)])
        for model in (target, draft)
    )
    hits = guessed_BSV.topk(_NUM_GUESSES, -1).indices == wanted_BSV.argmax(-1, keepdim=True)
    ranks = {f"rank_{n + 1}": hits[..., n].float().mean().item() for n in range(_NUM_GUESSES)}
    losses = (loss_of_logits(logits, texts_BS).item() for logits in (wanted_BSV, guessed_BSV))
    return {**dict(zip(("target_loss", "draft_loss"), losses, strict=True)), **ranks}


def moe_setting(size: str, ram: str | None, screen: Screen) -> Setting:
    """Return the pair with its target inflated to `size`, made once. Raises `UserError`."""
    size_bytes = parse_size(size, "--size")
    pair = moe_pair(screen)
    made = inflated_target(size_bytes, screen.make_target, pair / "target", "moe")
    ram_bytes = parse_size(ram or size_bytes // 4, "--ram")
    return Setting(made, pair / "draft", pair / "target", ram_bytes)


def main(
    size: Annotated[
        str | None, typer.Option(help="inflate the target to this, too", metavar="SIZE")
    ] = None,
) -> None:
    """Train the mixture of experts that other commands measure with; say what it is worth."""
    with Screen(is_quiet=False) as screen:
        target = None if size is None else moe_setting(size, None, screen).target
        pair = moe_pair(screen)
    print((pair / "figures.json").read_text(), end="")
    print(f"target {target or pair / 'target'}\ndraft  {pair / 'draft'}")


main.epilog = "Examples:\n\noffload bench moe-pair --size 3GB"  # type: ignore[attr-defined]
