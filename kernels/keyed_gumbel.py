"""Gumbel noise as a function of (seed, position, token): the same on any device and for any tree.

A counter-based hash (two rounds of the SplitMix64 finaliser, constants from Steele, Lea and Flood
2014) of the three keys gives 52 uniform bits per token, -log(-log u) makes them Gumbel; argmax(log
p + G) is then a draw from p. Invariant: kernel and reference compute the same 64 bits; only the
logarithms may differ in their last place between devices.
"""

import torch
from torch import Tensor

from offload.kernels.jit import jit, tl, triton

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB
_BLOCK = 1024  # tokens of one program


def keyed_gumbel_reference(
    seed: int, position: int, vocab_size: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the noise `gumbel_V` (float64) of one absolute position, in plain torch."""
    # made on the device: a copy might wait behind layers
    position_1 = torch.arange(position, position + 1, device=device)
    token_V = torch.arange(vocab_size, device=device)
    return -torch.log(-torch.log(uniform(row_keys(seed, position_1), token_V)))


def keyed_gumbel_kernel(
    seed: int, position: int, vocab_size: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Do what the reference does, in Triton: one launch instead of about 25."""
    gumbel_V = torch.empty(vocab_size, dtype=torch.float64, device=device)
    grid = (triton.cdiv(vocab_size, _BLOCK),)
    _fill[grid](gumbel_V, signed_seed_key(seed), position, vocab_size, BLOCK=_BLOCK)
    return gumbel_V


def signed_seed_key(seed: int) -> int:
    """Return the first half of a key, 64 bits as an int64."""
    return int(_mix(torch.tensor(_signed(seed & _MASK))))


def row_keys(seed: int, number_N: Tensor) -> Tensor:
    """Return keys (int64) of rows with these numbers, for example positions."""
    return _mix(number_N.long() ^ signed_seed_key(seed))


def uniform(key: Tensor, token_V: Tensor) -> Tensor:
    """Return 52 uniform bits in (0, 1), float64; with 53 bits 1 would be reached."""
    bits_V = _mix(_mix(token_V ^ key))
    return (_shift(bits_V, 12).to(torch.float64) + 0.5) * 2.0**-52


@jit
def mix_bits(value: tl.tensor) -> tl.tensor:
    """Apply the finaliser to uint64."""
    value = value + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@jit
def row_key(key_of_seed: tl.tensor, number: tl.tensor) -> tl.tensor:
    """Return the key that `row_keys` gives one row."""
    return mix_bits(number.to(tl.int64).to(tl.uint64) ^ key_of_seed.to(tl.uint64))


@jit
def log_uniform(key: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Return the log of `uniform` for a block of tokens."""
    bits = mix_bits(mix_bits(token.to(tl.uint64) ^ key))
    return tl.log(((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16)


@jit(do_not_specialize=["key_of_seed", "position"])
def _fill(
    gumbel: tl.tensor,
    key_of_seed: tl.tensor,
    position: tl.tensor,
    vocab_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    noise = -tl.log(-log_uniform(row_key(key_of_seed, position), token))
    tl.store(gumbel + token, noise, mask=token < vocab_size)


def _mix(value: Tensor) -> Tensor:
    """Apply the finaliser to int64 tensors, whose products wrap as unsigned ones do."""
    value = value + _signed(_STEP)
    value = (value ^ _shift(value, 30)) * _signed(_MIX_A)
    value = (value ^ _shift(value, 27)) * _signed(_MIX_B)
    return value ^ _shift(value, 31)


def _shift(value: Tensor, num_bits: int) -> Tensor:
    """Shift right logically; torch's own shift drags the sign along."""
    return (value >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
