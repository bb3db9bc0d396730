"""What the tokens before a position of a block add to its scores: a list of guesses for each path.

Forms, by the names of their tensors in files: DSpark's Markov heads (2607.05147; speculators 0.9
`MarkovHead`), DFlash 2's selector (z-lab/dflash at 1012959, `CandidateSelector`), and xPress's
refiner (2608.02438; speculators at 261a82d, `XPressRefinerHead`). Servers resolve a refiner's block
by some parallel passes that settle on what each position gives behind the positions before it. In a
tree a node has its path, so that is computed at once.

Shape letters, in this file only: B rows of a block, D those that guess, F nodes of one pass, R
numbers of a form's rank, Z numbers of its state, W words that are scored.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from offload.drafting.head_model import empty_linear


class Sizes(NamedTuple):
    """The sizes of a head."""

    num_words: int  # of the target
    num_scored: int  # W
    width: int  # H, of a block's rows
    rank: int  # R
    num_rows: int  # B
    num_candidates: int  # that a selector chooses among


class BlockOutput(NamedTuple):
    """What came out of a block's pass: scores of the positions that guess, and all of its rows."""

    scores_DV: Tensor
    hidden_BH: Tensor

    @property
    def num_before(self) -> int:
        """Return the number of rows before the first that guesses."""
        return len(self.hidden_BH) - len(self.scores_DV)

    def hidden(self, depth_F: Tensor) -> Tensor:
        """Return the rows (F, H) that guess at these depths."""
        return self.hidden_BH[depth_F + self.num_before]


class Corrections(nn.Module):
    """A module with the tensors of a form, by the names of files."""

    state_width = 0  # Z

    def start(self, output: BlockOutput, tokens: Sequence[int]) -> Tensor:
        """Return the state (1, Z) before the root, the last of these tokens."""
        return output.hidden_BH.new_zeros(1, self.state_width)

    def forward(
        self, output: BlockOutput, depth_F: Tensor, token_F: Tensor, state_FZ: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return numbers (F, W) for the scores behind tokens, and the states behind these."""
        raise NotImplementedError


class MarkovHead(Corrections):
    """DSpark's: of the token alone, gated by the block's row, or of a state that goes on."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, parts: Mapping[str, object]) -> None:
        super().__init__()
        rank = sizes.rank
        both = sizes.width + rank
        self.markov_w1 = _table(sizes.num_words, rank, dtype)
        self.markov_w2 = empty_linear(rank, sizes.num_scored, dtype)
        has_bias = "gate_proj.bias" in parts
        is_gated = "gate_proj.weight" in parts
        self.gate_proj = empty_linear(both, rank, dtype, has_bias=has_bias) if is_gated else None
        goes_on = "joint_proj.weight" in parts
        self.joint_proj = empty_linear(both + rank, 3 * rank, dtype) if goes_on else None
        self.state_width = rank if goes_on else 0

    def forward(
        self, output: BlockOutput, depth_F: Tensor, token_F: Tensor, state_FZ: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `Corrections`."""
        before_FR = self.markov_w1(token_F)
        hidden_FH = output.hidden(depth_F)
        if self.joint_proj is not None:
            joint_F = self.joint_proj(torch.cat([state_FZ, before_FR, hidden_FH], dim=-1))
            kept, new, before_FR = joint_F.chunk(3, dim=-1)
            state_FZ = kept.sigmoid() * state_FZ + (1 - kept.sigmoid()) * new.tanh()
            before_FR = before_FR.tanh()
        elif self.gate_proj is not None:
            gate_FR = self.gate_proj(torch.cat([hidden_FH, before_FR], dim=-1)).sigmoid()
            before_FR = gate_FR * before_FR
        return self.markov_w2(before_FR), state_FZ


class CandidateSelector(Corrections):
    """DFlash 2's: of the token, the row and a candidate; words that are no candidates are out."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype) -> None:
        super().__init__()
        self._num_candidates = sizes.num_candidates
        self.predecessor_codebook = _empty(dtype, sizes.num_words, sizes.rank)
        self.successor_codebook = _empty(dtype, sizes.num_words, sizes.rank)
        self.hidden_projection = empty_linear(sizes.width, sizes.rank, dtype)

    def forward(
        self, output: BlockOutput, depth_F: Tensor, token_F: Tensor, state_FZ: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `Corrections`."""
        scores_FV = output.scores_DV[depth_F]
        word_FC = scores_FV.topk(self._num_candidates).indices
        asked_FR = self.predecessor_codebook[token_F] * self.hidden_projection(
            output.hidden(depth_F)
        )
        added_FC = (self.successor_codebook[word_FC] @ asked_FR[:, :, None])[:, :, 0]
        outside_FV = torch.full_like(scores_FV, -torch.inf)
        return outside_FV.scatter_(1, word_FC, added_FC), state_FZ


class CausalRefiner(Corrections):
    """xPress's: of all rows of the block up to this one, each with the token before it.

    Its state are the mixed rows so far. A block whose first row is the root's starts with that
    row, which the token before the root belongs to.
    """

    def __init__(self, sizes: Sizes, dtype: torch.dtype, num_inner: int) -> None:
        super().__init__()
        rank = sizes.rank
        self._rank = rank
        self.state_width = rank * sizes.num_rows
        self.token_embed = _table(sizes.num_words, rank, dtype)
        self.down_h = empty_linear(sizes.width, rank, dtype)
        self.down_g = empty_linear(sizes.width, rank, dtype)
        self.in_proj = empty_linear(3 * rank, rank, dtype)
        self.mix_l = _empty(dtype, rank, sizes.num_rows, sizes.num_rows)
        self.mlp_gate = empty_linear(rank, num_inner, dtype)
        self.mlp_up = empty_linear(rank, num_inner, dtype)
        self.mlp_down = empty_linear(num_inner, rank, dtype)
        self.readout = empty_linear(rank, sizes.num_scored, dtype)

    def start(self, output: BlockOutput, tokens: Sequence[int]) -> Tensor:
        """See `Corrections`."""
        state_1Z = super().start(output, tokens)
        if not output.num_before:
            return state_1Z
        token_1 = torch.tensor([*tokens][-2:-1] or tokens, device=state_1Z.device)
        return self._taken_in(output, torch.zeros_like(token_1), token_1, state_1Z).flatten(1)

    def forward(
        self, output: BlockOutput, depth_F: Tensor, token_F: Tensor, state_FZ: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `Corrections`."""
        row_F = depth_F + output.num_before
        state_FBR = self._taken_in(output, row_F, token_F, state_FZ)
        # rows behind this one are zeros
        mixed_FR = torch.einsum("rfb,fbr->fr", self.mix_l[:, row_F], state_FBR)
        mixed_FR = mixed_FR + state_FBR[torch.arange(len(row_F)), row_F]
        inner = silu(self.mlp_gate(mixed_FR)) * self.mlp_up(mixed_FR)
        return self.readout(mixed_FR + self.mlp_down(inner)), state_FBR.flatten(1)

    def _taken_in(
        self, output: BlockOutput, row_F: Tensor, token_F: Tensor, state_FZ: Tensor
    ) -> Tensor:
        """Return states (F, B, R) with one row more, and the tokens before these."""
        mean_FH = output.hidden_BH.mean(0).expand(len(row_F), -1)
        parts = (self.down_h(output.hidden_BH[row_F]), self.down_g(mean_FH))
        added_FR = self.in_proj(torch.cat([*parts, self.token_embed(token_F)], dim=-1))
        state_FBR = state_FZ.unflatten(1, (-1, self._rank)).clone()
        state_FBR[torch.arange(len(row_F)), row_F] = added_FR
        return state_FBR


def corrections_of(
    shapes: Mapping[str, tuple[int, ...]], sizes: Sizes, dtype: torch.dtype
) -> Corrections | None:
    """Return the module of the form that tensors of these names are of; None for no such form."""
    if words := shapes.get("markov_w1.weight"):
        return MarkovHead(sizes._replace(rank=words[-1]), dtype, shapes)
    if words := shapes.get("predecessor_codebook"):
        return CandidateSelector(sizes._replace(rank=words[-1]), dtype)
    if words := shapes.get("token_embed.weight"):
        num_inner = next(iter(shapes["mlp_gate.weight"]), 0)
        return CausalRefiner(sizes._replace(rank=words[-1]), dtype, num_inner)
    return None


def _table(num_words: int, rank: int, dtype: torch.dtype) -> nn.Embedding:
    return nn.Embedding(num_words, rank, device="meta", dtype=dtype)


def _empty(dtype: torch.dtype, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta", dtype=dtype), requires_grad=False)
