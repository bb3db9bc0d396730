"""The layout of 16-bit weights stored without loss in 12 or 11 bits, see `expand_exponents`.

Sign and mantissa are kept; the exponent is stored as the distance from a top. Nearly all weights of
a tensor share fifteen consecutive exponents, so a distance takes 4 bits and needs no table; the
largest distance marks an escape, whose exponent stands in a list. Where seven suffice, it takes 3
bits. float16 is turned into words of the same fields first, which pays where it stems from
bfloat16; its mantissas are int8.

Weights lie in blocks of 1024, each of eight runs of 128. A plane of b bits has b x 128 bytes for a
block: run r is in the bytes of part r % b, b x (r // b) bits up, so that neighbours are loaded
together. A distance of 4 bits is one plane; of 3 bits, a plane of its 2 low bits and one of its
high bit. Escapes are listed by chunks of 65536 weights: first the low bytes of all places within a
chunk, then the high bytes, then the exponents. No torch, which planning does without.
"""

from typing import Any

BLOCK = 1024  # weights
RUN = 128  # weights
CHUNK = 65_536  # weights


def word_of_half(bits: Any) -> Any:
    """Move the lowest three bits of float16 (torch or numpy, int16) in front of the exponent.

    The exponent then has eight bits. In a number that was bfloat16 the three bits are zero, unless
    it became subnormal: all other weights have exponents above 31.
    """
    return bits & -32768 | (bits & 7) << 12 | bits >> 3 & 4095
