"""CRC-32 as zlib computes it, at the speed of memory where a processor multiplies without carries.

Bytes are a polynomial over bits, of which the sum is the remainder. A block of `_BLOCK_BYTES` adds
as much to it in place as its product with a power of x does that many bytes further on, so blocks
are moved onto those behind them until one is left, whose sum zlib computes. Bits are in zlib's
order: the highest bit of a number is the lowest power.
"""

import ctypes
import zlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from threading import Lock
from typing import Any

import numpy as np
import torch

from offload.kernels.machine_code import (
    EIGHT,
    Code,
    CompiledCode,
    call_of,
    compiled,
    processor_features,
)

_POLYNOMIAL = 0xEDB88320
_START = 0xFFFF_FFFF
_REGISTER_BYTES = 16
_NUM_REGISTERS = 4
_BLOCK_BYTES = _NUM_REGISTERS * _REGISTER_BYTES
_FOLD = "fold"
_LOCK = Lock()


def crc32(data: np.ndarray, before: int = 0) -> int:
    """Return the CRC-32 of bytes (uint8), which follow others with the CRC-32 `before`."""
    num_blocks = len(data) // _BLOCK_BYTES
    if num_blocks < 2 or not can_fold():
        return zlib.crc32(data.data, before)
    assert data.flags.c_contiguous, "bytes lie one behind the other"
    last = data[:_BLOCK_BYTES].copy()
    last[:4] ^= np.frombuffer((before ^ _START).to_bytes(4, "little"), np.uint8)
    with _LOCK:
        fold = _compiled().functions[_FOLD]
    call = call_of(0, (data.ctypes.data, last.ctypes.data, num_blocks))
    fold(ctypes.addressof(call))
    # what zlib begins with was added above, this start takes it back
    return zlib.crc32(data[num_blocks * _BLOCK_BYTES :].data, zlib.crc32(last.data, _START))


@cache
def can_fold() -> bool:
    """Return True if this processor multiplies without carries."""
    return bool(processor_features().get("pclmul"))


@cache
def _compiled() -> CompiledCode:
    code = _FoldingCode()
    code.write()
    return compiled(code.text(), {_FOLD: [ctypes.c_void_p]})


class _FoldingCode(Code):
    """Writes fold(call): data, a block that holds the first one and gets the last, and blocks."""

    def __init__(self) -> None:
        super().__init__(torch.float32, EIGHT)
        self._pair = self._ir.VectorType(self._index, 2)
        byte = self._ir.IntType(8)
        self._bytes = byte.as_pointer()
        kind = self._ir.FunctionType(self._pair, [self._pair, self._pair, byte])
        product = self._ir.Function(self._module, kind, "llvm.x86.pclmulqdq")
        self._halves_of = [byte(0x00), byte(0x11)]
        self._product: Callable[..., Any] = lambda *given: self._builder.call(product, given)

    def write(self) -> None:
        """Write the function; there are two blocks at least."""
        (call,) = self._begin(_FOLD, [self._index.as_pointer()]).args
        data, last, num_blocks = self._arguments(call, [self._bytes, self._bytes, self._index])
        # a register's first half lies 64 bits further from the end than its other half
        moved_bits = 8 * _BLOCK_BYTES
        powers = self._pair([_power(moved_bits + 32), _power(moved_bits - 32)])

        def block(nth: Any, before: Sequence[Any]) -> list[Any]:
            begin = self._at(data, self._times(nth, _BLOCK_BYTES))
            products = partial(self._moved, powers)
            return [
                self._builder.xor(moved, stored)
                for moved, stored in zip(map(products, before), self._block(begin), strict=True)
            ]

        for nth, register in enumerate(self._loop(1, num_blocks, 1, self._block(last), block)):
            self._store(register, self._at(last, nth * _REGISTER_BYTES), 1)
        self._builder.ret_void()

    def _block(self, begin: Any) -> list[Any]:
        places = range(0, _BLOCK_BYTES, _REGISTER_BYTES)
        return [self._load(self._at(begin, place), self._pair, 1) for place in places]

    def _moved(self, powers: Any, register: Any) -> Any:
        products = [self._product(register, powers, half) for half in self._halves_of]
        return self._builder.xor(*products)


def _power(exponent: int) -> int:
    """Return x to this power, modulo the polynomial, as a factor of 33 bits."""
    power = 1 << 31
    for _ in range(exponent):
        power = power >> 1 ^ (_POLYNOMIAL if power & 1 else 0)
    return power << 1
