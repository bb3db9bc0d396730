"""What does knowing the draw bring a block? Trains a DFlash block drafter for the packaged target.

The block has z-lab's form and names, as `drafting/dflash.py` reads them: two layers of the target's
width over its states behind three layers, with its table and head. It learns the target's
distribution at every position of a block, behind many places of a text in one pass; what it cannot
see, the tokens between, it learns to average over. So its lists are the marginals that trees of
blocks are made of elsewhere, and the same block ranked without the noise of the draws stands beside
it: that is rule `topk`.
"""

import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    LlamaForCausalLM,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
)

from offload.bench.harness.command import Bench, Findings, command
from offload.bench.harness.setting import PROMPT_TOKENS, Setting
from offload.bench.harness.tables import Column, Row, Screen, check
from offload.bench.pairs.training import (
    LEARNT,
    TREE,
    Course,
    held_out_texts,
    library_ids,
    packaged,
    texts_of,
    train,
    trained_once,
    windows,
)
from offload.checkpoint.packaged import PAIR
from offload.units import parse_size

TEMPERATURES = (0.0, 0.7, 1.0)
LEAST_GAIN = 1.3
MOST_SHARE = 0.2
SMALL, MARGINALS, COUPLED = "small draft", "block by marginals", "block"
RULES = {SMALL: "match", MARGINALS: "topk", COUPLED: "match"}
BLOCK = 8
MASK = 4095
# what leaves these layers of the target; the last one behind the final norm
LAYERS = (1, 3, 5)
_RAM = "2GiB"
# of the config of a block, as the target has them
_SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "rms_norm_eps", "max_position_embeddings"),
)
_FORM = ("num_hidden_layers", "rope_parameters", "layer_types")
_LABEL_WEIGHT = 0.5
_DECAY = 0.8  # of a position's weight, times that of the position before


class Recipe(NamedTuple):
    """All that the block depends on, beside the text and the target."""

    course: Course = Course(3000, 3e-3)
    num_texts: int = 8
    num_tokens: int = 128  # of each
    num_blocks: int = 24  # of each text
    seed: int = 0
    version: int = 1  # raise it when the same recipe comes to give another block


class Block(nn.Module):
    """The block as it learns: the library's own, whose layers begin as the target's last ones."""

    def __init__(self, target: LlamaForCausalLM) -> None:
        super().__init__()
        stated = target.config
        sizes: dict[str, Any] = {name: getattr(stated, name) for name in _SIZES}
        config = MuseGlimmerAssistantConfig(
            **sizes,
            num_hidden_layers=2,
            rope_parameters=stated.rope_parameters,
            layer_types=["full_attention"] * 2,
            block_size=BLOCK,
            mask_token_id=MASK,
            target_layer_ids=[*LAYERS],
            bos_token_id=stated.bos_token_id,
            eos_token_id=stated.eos_token_id,
            pad_token_id=None,
        )
        self.model = MuseGlimmerAssistantModel(config).float()
        for layer, donor in zip(self.model.layers, target.model.layers[-2:], strict=True):
            layer.load_state_dict(donor.state_dict(), strict=False)
        self.model.norm.load_state_dict(target.model.norm.state_dict())
        with torch.no_grad():
            self.model.encoder.fc.weight.zero_()
            self.model.encoder.fc.weight[:, -stated.hidden_size :] = torch.eye(stated.hidden_size)
        self._target = [target]

    def forward(self, token_BS: Tensor, tapped_BSW: Tensor, first_BA: Tensor) -> Tensor:
        """Return (B, A, K, D), behind the norm: a block's rows behind each of A places of a text.

        Args:
            first_BA: places of the tokens that blocks begin with; the states of those before count.
        """
        num_texts, num_tokens = token_BS.shape
        block_BAK = first_BA[..., None] + torch.arange(BLOCK)
        asked = torch.full_like(block_BAK, MASK)
        asked[..., 0] = token_BS.gather(1, first_BA)
        place_BS = torch.arange(num_tokens).expand(num_texts, -1)
        out = self.model(
            noise_embeds=self._target[0].model.embed_tokens(asked.flatten(1)),
            context_hidden_states=tapped_BSW,
            position_ids=torch.cat([place_BS, block_BAK.flatten(1)], dim=1),
            attention_mask={"full_attention": block_mask(first_BA, num_tokens)},
        )
        rows_BAKD: Tensor = out.last_hidden_state.unflatten(1, (-1, BLOCK))
        return rows_BAKD

    def stored(self) -> dict[str, Tensor]:
        """Return its tensors in bf16 by the names of a file."""
        renamed = {"encoder.fc": "fc", "encoder.output_norm_enc": "hidden_norm"}
        named = {}
        for name, weight in self.model.state_dict().items():
            module, _, leaf = name.rpartition(".")
            named[f"{renamed.get(module, module)}.{leaf}"] = weight.bfloat16().contiguous()
        return named

    def config(self) -> dict[str, Any]:
        """Return the record of a file."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "vocab_size": self._target[0].config.vocab_size,
            "block_size": BLOCK,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [*LAYERS]},
            **{name: getattr(self.model.config, name) for name in (*_SIZES, *_FORM)},
        }


def block_mask(first_BA: Tensor, num_tokens: int) -> Tensor:
    """Return (B, 1, A * K, S + A * K), to be added: blocks see what lies before, and themselves."""
    num_blocks = first_BA.shape[1]
    is_before_BAS = torch.arange(num_tokens) < first_BA[..., None]
    block_U = torch.arange(num_blocks).repeat_interleave(BLOCK)
    is_beside_UU = (block_U[:, None] == block_U).expand(len(first_BA), -1, -1)
    seen = torch.cat([is_before_BAS.repeat_interleave(BLOCK, 1), is_beside_UU], dim=2)
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]


def block_losses(
    target: LlamaForCausalLM, block: Block, token_BS: Tensor, first_BA: Tensor
) -> Tensor:
    """Return (K - 1) losses by position: KL from the target's distribution, and its best as label."""
    with torch.no_grad():
        seen = target.model(input_ids=token_BS, output_hidden_states=True, use_cache=False)
        tapped_BSW = torch.cat([seen.hidden_states[layer + 1] for layer in LAYERS], dim=-1)
        # row k of a block guesses what the target gives behind the token before it
        before_BU = (first_BA[..., None] + torch.arange(BLOCK - 1)).flatten(1)
        place_BUD = before_BU[..., None].expand(-1, -1, seen.last_hidden_state.shape[2])
        state_BUD = seen.last_hidden_state.gather(1, place_BUD)
        law_BUV = target.lm_head(state_BUD).log_softmax(-1)
    rows_BAKD = block(token_BS, tapped_BSW, first_BA)[:, :, 1:]
    log_BUV = target.lm_head(rows_BAKD.flatten(1, 2)).log_softmax(-1)
    kl_BU = functional.kl_div(log_BUV, law_BUV, log_target=True, reduction="none").sum(-1)
    label_BU = -log_BUV.gather(2, law_BUV.argmax(-1, keepdim=True))[..., 0]
    loss_BU = kl_BU + _LABEL_WEIGHT * label_BU
    return loss_BU.unflatten(1, (-1, BLOCK - 1)).mean((0, 1))


def make_block(recipe: Recipe, screen: Screen, work: Path, ids: Tensor, _: Tensor) -> None:
    """Train in `work`, or go on there; write the block into a folder of its own."""
    target = packaged("target").requires_grad_(False)
    torch.manual_seed(recipe.seed)
    block = Block(target)
    weight_K = _DECAY ** torch.arange(BLOCK - 1)

    def loss_of(step: int) -> Tensor:
        seed = recipe.seed + LEARNT + step
        num_tokens = recipe.num_texts * recipe.num_tokens
        tokens_BS = windows(ids, num_tokens, recipe.num_tokens, seed)
        generator = torch.Generator().manual_seed(seed)
        sizes = (recipe.num_texts, recipe.num_blocks)
        first_BA = torch.randint(1, recipe.num_tokens - BLOCK, sizes, generator=generator)
        losses = block_losses(target, block, tokens_BS, first_BA)
        return (losses * weight_K).sum() / weight_K.sum()

    progress = partial(screen.count, label="training the block")
    train(block, loss_of, recipe.course, work / "block.state", progress)
    write_block(block, work / "draft")


def write_block(block: Block, folder: Path) -> None:
    """Write the block as a checkpoint of its own."""
    folder.mkdir(exist_ok=True)
    save_file(block.stored(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(block.config(), indent=2) + "\n")


def block_draft(screen: Screen) -> Path:
    """Return the folder of the block, trained once in some twenty-five minutes on a core."""
    recipe = Recipe()
    return trained_once("block-pair", recipe, partial(make_block, recipe, screen)) / "draft"


COLUMNS = (
    Column("T", "temperature", ".1f"),
    *(Column(name, name, ".2f") for name in RULES),
    Column("block / by marginals", "gain", ".2f"),
    Column("drafting / small draft's", "share", ".2f"),
)


def tokens_a_pass(draft: Path, prompts: Tensor, temperature: float, num_new: int) -> Row:
    """Return the mean tokens a pass of each way to draft, and drafting times; texts are proved."""
    row: Row = {"temperature": temperature}
    draft_s = {}
    for name, rule in RULES.items():
        folder = PAIR / "draft" if name == SMALL else draft
        setting = Setting(PAIR / "target", folder, PAIR / "target", parse_size(_RAM, "--ram"))
        options = {"rule": rule, "lookup": False}
        figures, written = texts_of(setting, prompts, temperature, num_new, **options)
        setting._replace(draft=None).prove(written)
        row[name] = statistics.fmean(stats.tokens_per_sweep for stats in figures)
        draft_s[name] = statistics.fmean(stats.draft_s / stats.num_sweeps for stats in figures)
    row["gain"] = row[COUPLED] / row[MARGINALS]
    row["share"] = draft_s[COUPLED] / draft_s[SMALL]
    return {**row, **{f"{name}_draft_s": took for name, took in draft_s.items()}}


@command("block-pair", "quick")
def main(bench: Bench) -> Findings:
    """Tokens a pass of a block drafter that knows the draws, beside the same one that does not.

    The block is trained when it is not in the cache, which takes half an hour on a core.
    """
    num_prompts, num_new = bench.effort((24, 128), (4, 48))
    with bench.screen:
        draft = block_draft(bench.screen)
        prompts = held_out_texts(library_ids(held_out=True), PROMPT_TOKENS, num_prompts)
        rows = [
            bench.row(tokens_a_pass(draft, prompts, temperature, num_new))
            for temperature in TEMPERATURES
        ]
    gains = [row["gain"] for row in rows if row["temperature"]]
    shares = [row["share"] for row in rows]
    return Findings(
        rows=rows,
        tables=[(COLUMNS, rows)],
        checks=[
            check(f"{TREE}: block / by marginals", gains, LEAST_GAIN, "higher", min(gains)),
            check(f"{TREE}: drafting / small draft's", shares, MOST_SHARE, "lower", max(shares)),
        ],
        settings={"tree": TREE, "num_new": num_new},
        ceiling={"tokens_per_sweep": BLOCK},
    )
