"""What does knowing the draw bring a block? Trains a DFlash block drafter for the packaged target.

The block has z-lab's form and names, as `drafting/dflash.py` reads them: two layers of the target's
width over its states behind three layers, with its table and head. It learns the target's
distribution at every position of a block, behind many places of a text in one pass; what it cannot
see, the tokens between, it learns to average over. So its lists are the marginals that trees of
blocks are made of elsewhere, and the same block ranked without the noise of the draws stands beside
it: that is rule `topk`.
"""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    LlamaForCausalLM,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
)

from offload.bench.harness.command import Bench, Findings, command, flag
from offload.bench.harness.tables import Screen
from offload.bench.pairs.training import LEARNT, Course, packaged, train, trained_once, windows
from offload.bench.pairs.ways import Share, Way, compare_ways
from offload.checkpoint.packaged import PAIR

TEMPERATURES = (0.0, 0.7, 1.0)
SMALL, MARGINALS, COUPLED = "small draft", "block by marginals", "block"
BLOCK = 8
MASK = 4095
# what leaves these layers of the target; the last one behind the final norm
LAYERS = (1, 3, 5)
_TRAIN = "measure a block that is trained here, once, in half an hour on a core"
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


def trained_block(screen: Screen) -> Path:
    """Return the folder of a block trained once, in some twenty-five minutes on a core."""
    recipe = Recipe()
    with screen:
        return trained_once("block-pair", recipe, partial(make_block, recipe, screen)) / "draft"


WAYS = {
    SMALL: Way(PAIR / "draft"),
    MARGINALS: Way(PAIR / "block", rule="topk"),
    COUPLED: Way(PAIR / "block"),
}
SHARES = (
    Share("block / by marginals", COUPLED, [MARGINALS], 1.3, "higher", temperatures=(0.7, 1.0)),
    Share("drafting / small draft's", COUPLED, [SMALL], 0.2, "lower", figure="drafting"),
)


@command("block-pair", "quick")
def main(
    bench: Bench,
    is_trained_here: Annotated[bool, flag(None, _TRAIN, "--train")] = False,
) -> Findings:
    """Tokens a pass of a block drafter that knows the draws, beside the same one that does not."""
    block = trained_block(bench.screen) if is_trained_here else PAIR / "block"
    ways = {name: way if name == SMALL else way._replace(draft=block) for name, way in WAYS.items()}
    return compare_ways(bench, PAIR / "target", ways, TEMPERATURES, SHARES, most_tokens=BLOCK)
