"""Draws without replacement from many distributions: the K largest of log(u) / q in each row.

This exponential sort is Gumbel top-k on another scale (Sequoia, section 4.2). The uniform numbers
are a hash of (seed, number of the row, token), as in `keyed_gumbel` under another seed; kernel and
reference draw the same tokens. Invariant: a row's number is used once in a generation (the caller
counts), and no uniform number is one of the shared noise. W rows in this file.
"""

import torch
from torch import Tensor

from offload.kernels.jit import jit, tl, triton
from offload.kernels.keyed_gumbel import log_uniform, row_key, row_keys, signed_seed_key, uniform

_FRESH = 0x6F66666C6F616421  # turns the seed into one of another stream than the shared noise
_BLOCK = 1024  # tokens of one program
_MAX_KEYS = 1 << 19  # float64 numbers that the reference holds at once


def draw_without_replacement_reference(
    probs_WV: Tensor, num_draws: int, seed: int, first_row: int
) -> Tensor:
    """Return tokens (int64, W x min(num_draws, V)) in the order of their draws, in plain torch.

    Rows need not sum to one. Tokens without mass come last and among themselves in uniform order,
    Sequoia's fall-back.
    """
    num_rows, vocab_size = probs_WV.shape
    number_W1 = torch.arange(first_row, first_row + num_rows, device=probs_WV.device)[:, None]
    token_V = torch.arange(vocab_size, device=probs_WV.device)
    block = max(1, _MAX_KEYS // vocab_size)
    chosen = []
    for probs_RV, number_R1 in zip(probs_WV.split(block), number_W1.split(block), strict=True):
        uniform_RV = uniform(row_keys(seed ^ _FRESH, number_R1), token_V)
        chosen.append(largest_keys(uniform_RV, probs_RV, num_draws))
    return torch.cat(chosen)


def largest_keys(uniform_RV: Tensor, probs_RV: Tensor, num_draws: int) -> Tensor:
    """Return the tokens of the largest log(u) / q; overwrites u. 1e-300 stands in for zero."""
    key_RV = uniform_RV.log_().div_(probs_RV.double().clamp_(min=1e-300))
    return key_RV.topk(min(num_draws, probs_RV.shape[1])).indices


def draw_without_replacement_kernel(
    probs_WV: Tensor, num_draws: int, seed: int, first_row: int
) -> Tensor:
    """Do what the reference does, in Triton, without storing keys.

    It takes the largest keys of each chunk of a row, then the largest of those.
    """
    assert probs_WV.stride(1) == 1, "a row is one run of memory"
    num_rows, vocab_size = probs_WV.shape
    num_kept = min(num_draws, vocab_size)
    num_chunks = triton.cdiv(vocab_size, _BLOCK)
    num_candidates = min(num_kept, _BLOCK)
    key_WC = probs_WV.new_empty((num_rows, num_chunks * num_candidates), dtype=torch.float64)
    token_WC = torch.empty_like(key_WC, dtype=torch.int64)
    _candidates[(num_rows, num_chunks)](
        key_WC,
        token_WC,
        probs_WV,
        probs_WV.stride(0),
        vocab_size,
        num_candidates,
        signed_seed_key(seed ^ _FRESH),
        first_row,
        BLOCK=_BLOCK,
    )
    return token_WC.gather(1, key_WC.topk(num_kept).indices)


@jit(do_not_specialize=["num_candidates", "key_of_seed", "first_row"])
def _candidates(
    best: tl.tensor,
    best_token: tl.tensor,
    distribution: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    num_candidates: tl.tensor,
    key_of_seed: tl.tensor,
    first_row: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Run one program per row and chunk: write the largest key, strike it out, repeat."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocab_size
    mass = tl.load(distribution + row * stride + token, mask=is_token, other=1.0).to(tl.float64)
    key = log_uniform(row_key(key_of_seed, first_row + row), token) / tl.maximum(mass, 1e-300)
    key = tl.where(is_token, key, float("-inf"))
    place = (row * tl.num_programs(1) + chunk) * num_candidates
    for draw in range(num_candidates):
        largest = tl.max(key, 0)
        winner = tl.min(tl.where(key == largest, token, vocab_size), 0)
        tl.store(best + place + draw, largest)
        tl.store(best_token + place + draw, winner.to(tl.int64))
        key = tl.where(token == winner, float("-inf"), key)
