"""What does a carried layer guess, beside a small draft? Trains an MTP layer for the packaged target.

The layer has Qwen's form (`mtp.*`: two norms, a projection of both halves, one decoder layer, a
norm), with the target's table and head. It learns the target's distribution at several depths by
feeding back: a row of depth d takes what depth d - 1 made of the row before, and sees committed
rows up to where its guesses begin and its own path behind (training as in EAGLE-3, 2503.01840,
section 3). The target is as it was; its files get the layer beside their own tensors.
"""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, LlamaForCausalLM

from offload.bench.harness.command import Bench, Findings, command, flag
from offload.bench.harness.tables import Screen
from offload.bench.pairs.training import LEARNT, Course, packaged, train, trained_once, windows
from offload.bench.pairs.ways import Share, Way, compare_ways
from offload.checkpoint.open import shard_name
from offload.checkpoint.packaged import PAIR
from offload.model.library import CACHE

TEMPERATURES = (0.0, 0.7)
SMALL, CARRIED, LOOKUP, JOINED = "small draft", "mtp", "lookup", "mtp + lookup"
SHARD = shard_name(1, 2)  # the packaged target's file that has the layer
_TRAIN = "measure a layer that is trained here, once, in half an hour on a core"
_LABEL_WEIGHT = 0.5
_DEPTH_WEIGHT = 0.8  # of a depth, times that of the depth before
_NAMES = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "block": "mtp.layers.0",
    "norm": "mtp.norm",
}


class Recipe(NamedTuple):
    """All that the layer depends on, beside the text and the target."""

    course: Course = Course(1500, 3e-3)
    num_texts: int = 8
    num_tokens: int = 128  # of each
    num_depths: int = 4
    seed: int = 0
    version: int = 1  # raise it when the same recipe comes to give another layer


class MtpLayer(nn.Module):
    """The layer as it learns, made of the target's last one."""

    def __init__(self, target: LlamaForCausalLM) -> None:
        super().__init__()
        donor: Any = packaged("target").model
        width = target.config.hidden_size
        self.enorm = type(donor.norm)(width, target.config.rms_norm_eps)
        self.hnorm = type(donor.norm)(width, target.config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.eh_proj.weight.data = 0.1 * torch.eye(width).repeat(1, 2)
        self.block: Any = donor.layers[-1]
        self.block.self_attn.layer_idx = 0
        self.norm = donor.norm
        self._rotary = [donor.rotary_emb]  # of no weights
        self._target = [target]

    def forward(
        self, token_BS: Tensor, fed_BSD: Tensor, mask: Tensor, cache: DynamicCache
    ) -> Tensor:
        """Return (B, S, D), behind the norm: the rows of one depth, whose keys join the cache."""
        embedded_BSD = self._target[0].model.embed_tokens(token_BS)
        both = torch.cat([self.enorm(embedded_BSD), self.hnorm(fed_BSD)], dim=-1)
        mixed_BSD = self.eh_proj(both)
        position_1S = torch.arange(token_BS.shape[1])[None]
        out = self.block(
            mixed_BSD,
            attention_mask=mask,
            position_ids=position_1S,
            position_embeddings=self._rotary[0](mixed_BSD, position_1S),
            **{CACHE: cache},
        )
        normed_BSD: Tensor = self.norm(out)
        return normed_BSD

    def stored(self) -> dict[str, Tensor]:
        """Return its tensors in bf16 by the names of a file."""
        named = {}
        for name, weight in self.state_dict().items():
            part, _, rest = name.partition(".")
            named[f"{_NAMES[part]}.{rest}"] = weight.bfloat16().contiguous()
        return named


def depth_mask(num_rows: int, depth: int) -> Tensor:
    """Return (1, 1, S, depth * S), to be added: what rows of this depth, from 1, see of all depths.

    Row i of depth d sees rows up to i - d + 1 of depth 1, and row i - d + m of each depth m behind.
    """
    row_S = torch.arange(num_rows)
    sees = [row_S[None, :] <= row_S[:, None] - depth + 1]
    for above in range(2, depth + 1):
        sees.append(row_S[None, :] == row_S[:, None] - depth + above)
    # rows that stand before their path see themselves, so that none sees nothing
    sees[-1] = sees[-1] | (row_S[None, :] == row_S[:, None])
    seen = torch.cat(sees, dim=1)
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


def depth_outputs(
    layer: MtpLayer, token_BS: Tensor, hidden_BSD: Tensor, num_depths: int
) -> Iterator[Tensor]:
    """Yield (B, S, D) for each depth from 1: row i has token i + 1, and what was made of token i.

    Rows of depth d have sense from row d - 1 on.
    """
    next_BS = token_BS[:, 1:]
    fed_BSD = hidden_BSD[:, :-1]
    cache = DynamicCache()
    for depth in range(1, num_depths + 1):
        out_BSD = layer(next_BS, fed_BSD, depth_mask(next_BS.shape[1], depth), cache)
        yield out_BSD
        fed_BSD = torch.cat([fed_BSD[:, :1], out_BSD[:, :-1]], dim=1)


def depth_losses(
    target: LlamaForCausalLM, layer: MtpLayer, token_BS: Tensor, num_depths: int
) -> list[Tensor]:
    """Return each depth's KL from the target's distribution, plus its likeliest token as a label."""
    with torch.no_grad():
        hidden_BSD = target.model(input_ids=token_BS, use_cache=False).last_hidden_state
        law_BSV = target.lm_head(hidden_BSD).log_softmax(-1)[:, 1:]
    losses = []
    for row, out_BSD in enumerate(depth_outputs(layer, token_BS, hidden_BSD, num_depths)):
        log_NV = target.lm_head(out_BSD[:, row:]).log_softmax(-1).flatten(0, 1)
        law_NV = law_BSV[:, row:].flatten(0, 1)
        kl = functional.kl_div(log_NV, law_NV, log_target=True, reduction="batchmean")
        label = functional.nll_loss(log_NV, law_NV.argmax(-1))
        losses.append(kl + _LABEL_WEIGHT * label)
    return losses


def make_layer(recipe: Recipe, screen: Screen, work: Path, ids: Tensor, _: Tensor) -> None:
    """Train in `work`, or go on there; write the packaged target with the layer in its file."""
    target = packaged("target").requires_grad_(False)
    torch.manual_seed(recipe.seed)
    layer = MtpLayer(target)
    weight_K = torch.tensor([_DEPTH_WEIGHT**depth for depth in range(recipe.num_depths)])

    def loss_of(step: int) -> Tensor:
        num_tokens = recipe.num_texts * recipe.num_tokens
        tokens_BS = windows(ids, num_tokens, recipe.num_tokens, recipe.seed + LEARNT + step)
        losses = depth_losses(target, layer, tokens_BS, recipe.num_depths)
        return (torch.stack(losses) * weight_K).sum() / weight_K.sum()

    progress = partial(screen.count, label="training the layer")
    train(layer, loss_of, recipe.course, work / "layer.state", progress)
    write_carrying(layer.stored(), work / "target")


def write_carrying(carried: dict[str, Tensor], folder: Path) -> None:
    """Write the packaged target with these tensors in place of its own MTP layer."""
    shutil.copytree(PAIR / "target", folder, dirs_exist_ok=True)
    save_file(carried, folder / SHARD, metadata={"format": "pt"})


def trained_target(screen: Screen) -> Path:
    """Return the folder of the target with a layer trained once, in some twenty minutes on a core."""
    recipe = Recipe()
    with screen:
        return trained_once("mtp-pair", recipe, partial(make_layer, recipe, screen)) / "target"


WAYS = {
    SMALL: Way(PAIR / "draft"),
    CARRIED: Way(Path("mtp")),
    LOOKUP: Way(None, has_lookup=True),
    JOINED: Way(Path("mtp+lookup"), has_lookup=True),
}
SHARES = (
    Share("mtp / small draft", CARRIED, [SMALL], 0.8, "higher"),
    Share("mtp + lookup / better alone", JOINED, [CARRIED, LOOKUP], 1.1, "higher"),
)


@command("mtp-pair", "quick")
def main(
    bench: Bench,
    is_trained_here: Annotated[bool, flag(None, _TRAIN, "--train")] = False,
) -> Findings:
    """Tokens a pass of the packaged target's MTP layer beside a small draft, and of both with lookup."""
    target = trained_target(bench.screen) if is_trained_here else PAIR / "target"
    return compare_ways(bench, target, WAYS, TEMPERATURES, SHARES, most_tokens=17)
