"""CRC-32, the number that zlib gives, at twice its speed where zlib has no instruction of the processor's own for it.

x^91639 + x^41678 + 1 is a multiple of CRC-32's polynomial, and so are its powers of two, whose exponents are as many
times as large. So a byte can be left out if it is added, by exclusive or, to two that come later: numpy does that at
the speed of a cache, and zlib has the rest to do (Russell, Chorba, arXiv 2412.16398). Invariant: no other number than
that of zlib comes out.
"""

import zlib

import numpy as np

_POWER_BYTES = 32 // 8  # of the 32nd power, whose steps are far longer than a call of numpy takes, and lie in a cache
_FAR, _NEAR = 91_639 * _POWER_BYTES, (91_639 - 41_678) * _POWER_BYTES
_BEGIN = 0xFF  # what CRC-32 adds to each of the first four bytes


def crc32_of_scratch(scratch: np.ndarray) -> int:
    """Of bytes (uint8), which are lost."""
    num_folded = len(scratch) - _FAR
    if num_folded <= 0:
        return zlib.crc32(scratch.data)
    scratch[:4] ^= _BEGIN
    for at in range(0, num_folded, _NEAR):
        folded = scratch[at : min(at + _NEAR, num_folded)]
        for step in (_NEAR, _FAR):
            scratch[at + step : at + step + len(folded)] ^= folded
    return zlib.crc32(scratch[num_folded:].data, 0xFFFF_FFFF)  # which takes back what zlib would begin with
