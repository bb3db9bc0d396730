"""Gumbel noise that is a function of (seed, position, token): the same on any device, in any order, for any tree.

A counter-based hash (two rounds of the SplitMix64 finaliser, constants from Steele, Lea and Flood 2014) of the three
keys gives 52 uniform bits per token, -log(-log u) makes them Gumbel. argmax(log p + G) is then a draw from p (the
Gumbel-max trick), and whoever knows the key can repeat the draw.
"""

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_STEP, _MIX_A, _MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def keyed_gumbel(seed: int, position: int, vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Noise `gumbel_V` (float64) for one absolute position."""
    key = _mix_int(_mix_int(seed & _MASK) ^ (position & _MASK))
    token_V = torch.arange(vocab_size, dtype=torch.int64, device=device)
    bits_V = _mix(_mix(token_V ^ _signed(key)))
    uniform_V = (_shift(bits_V, 12).to(torch.float64) + 0.5) * 2.0**-52  # in (0, 1): with 53 bits 1 would be reached
    return -torch.log(-torch.log(uniform_V))


def _mix_int(value: int) -> int:
    value = (value + _STEP) & _MASK
    value = ((value ^ (value >> 30)) * _MIX_A) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_B) & _MASK
    return value ^ (value >> 31)


def _mix(value: Tensor) -> Tensor:
    """The finaliser on int64 tensors, whose products wrap as unsigned ones do."""
    value = value + _signed(_STEP)
    value = (value ^ _shift(value, 30)) * _signed(_MIX_A)
    value = (value ^ _shift(value, 27)) * _signed(_MIX_B)
    return value ^ _shift(value, 31)


def _shift(value: Tensor, num_bits: int) -> Tensor:
    """Logical right shift: torch's own one drags the sign along."""
    return (value >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
