"""The target's draws for many rows: argmax of logits / temperature + keyed Gumbel noise.

Noise is computed where it is added, so no (N, V) matrix of it is ever stored, and the tokens of all
rows come to the host in one copy. Invariant: noise and sum are float64 and the division is float32,
as when one row is drawn alone; ties go to the lowest token. So kernel and reference draw the same
token, except for logarithms that differ in their last place.
"""

import torch
from torch import Tensor

from offload.kernels.jit import jit, tl, triton
from offload.kernels.keyed_gumbel import (
    keyed_gumbel_reference,
    log_uniform,
    row_key,
    signed_seed_key,
)

_BLOCK = 1024  # tokens at once
_BLOCKS = 4  # of one program


def match_rows_reference(
    logits_NV: Tensor, position_N: Tensor, seed: int, *, temperature: float
) -> Tensor:
    """Return the token (int64, N) that each row draws, in plain torch; temperature 0 is greedy.

    Args:
        logits_NV: float32, float16 or bfloat16; -inf is drawn where a row holds nothing else.
        position_N: absolute position of the token that a row predicts; the noise depends on it.
    """
    if temperature == 0:
        return logits_NV.argmax(1)
    # A tensor, since on CUDA division by a scalar becomes a product with its reciprocal.
    divisor = torch.tensor([temperature], dtype=torch.float32, device=logits_NV.device)
    tokens = []
    for row, position in enumerate(position_N.tolist()):
        score_V = logits_NV[row].float() / divisor
        noise_V = keyed_gumbel_reference(seed, position, len(score_V), score_V.device)
        tokens.append((score_V + noise_V).argmax())
    return torch.stack(tokens)


def match_rows_kernel(
    logits_NV: Tensor, position_N: Tensor, seed: int, *, temperature: float
) -> Tensor:
    """Do what the reference does, in Triton: the best of each chunk, then of all chunks."""
    assert logits_NV.stride(1) == 1, "a row is one run of memory"
    num_rows, vocab_size = logits_NV.shape
    has_noise = temperature > 0
    num_chunks = triton.cdiv(vocab_size, _BLOCK * _BLOCKS)
    dtype = torch.float64 if has_noise else torch.float32
    best_NC = logits_NV.new_empty((num_rows, num_chunks), dtype=dtype)
    token_NC = torch.empty_like(best_NC, dtype=torch.int64)
    _best_of_chunk[(num_rows, num_chunks)](
        best_NC,
        token_NC,
        logits_NV,
        position_N,
        logits_NV.stride(0),
        vocab_size,
        signed_seed_key(seed),
        float(temperature),
        HAS_NOISE=has_noise,
        BLOCK=_BLOCK,
        BLOCKS=_BLOCKS,
    )
    return token_NC.gather(1, best_NC.argmax(1, keepdim=True))[:, 0]


@jit(do_not_specialize=["key_of_seed", "temperature"])
def _best_of_chunk(
    best: tl.tensor,
    best_token: tl.tensor,
    logits: tl.tensor,
    position: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    key_of_seed: tl.tensor,
    temperature: tl.tensor,
    HAS_NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Run one program per row and chunk.

    Each lane keeps the first of its best tokens, then the lanes are compared.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    lane = chunk * BLOCK * BLOCKS + tl.arange(0, BLOCK)
    token = tl.minimum(lane, vocab_size - 1)
    top = tl.full((BLOCK,), float("-inf"), tl.float64 if HAS_NOISE else tl.float32)
    for block in range(BLOCKS):
        here = lane + block * BLOCK
        score = tl.load(
            logits + row * stride + here, mask=here < vocab_size, other=float("-inf")
        ).to(tl.float32)
        if HAS_NOISE:
            score = tl.div_rn(score, tl.full((BLOCK,), 0.0, tl.float32) + temperature)
            key = row_key(key_of_seed, tl.load(position + row))
            score = score.to(tl.float64) - tl.log(-log_uniform(key, here))
        token = tl.where(score > top, here, token)
        top = tl.maximum(score, top)
    winner = tl.max(top, 0)
    place = row * tl.num_programs(1) + chunk
    tl.store(best + place, winner)
    tl.store(best_token + place, tl.min(tl.where(top == winner, token, vocab_size), 0).to(tl.int64))
