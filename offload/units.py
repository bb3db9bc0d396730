"""Sizes, rates, counts and times as people read them, and the legend of shape suffixes.

A tensor's name ends in one letter per dimension: `logits_NV`, `parent_N`, `key_GSK`.

    N  tree nodes (the root included)      A  accepted nodes         P  committed positions (prefix)
    T  rows of one forward pass            S  cache slots            D  model width
    H  query heads                         G  key/value heads        K  head width
    F  feed-forward width                  V  vocabulary             B  bytes of a flat buffer
    U  rows behind the committed ones      W  nodes run together     L  layers
    C  a chunk of rows, or candidates      K  also ranks, children   R  rows of a block
    M  matches in a corpus

Counts are named `num_...`; sizes, times and rates carry their unit: `slot_bytes`, `stall_s`,
`link_bytes_per_s`.
"""

import re
from typing import Self

from offload.errors import UserError, require

_UNITS = {"": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _UNITS |= {_prefix: 1000**_power, f"{_prefix}i": 1024**_power}


class ByteSize(int):
    """Bytes as a person gave them; they are printed in powers of two or of ten, as given.

    Attributes:
        is_decimal: whether they were given as `8GB` or `8G`, and not as `8GiB`.
    """

    is_decimal = False
    _KIND = ("a size", "such as 8GiB, 1.2GB or 512MiB")

    @classmethod
    def parse(cls, given: str | int, flag: str) -> Self:
        """Return a size from `512MiB`, `1.2GB`, `4G` or a number of bytes. Raises `UserError`."""
        if isinstance(given, cls):
            return given
        match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d*)?)\s*([kmgt]i?|)b?\s*", str(given).lower())
        if match is None:
            kind, such = cls._KIND
            raise UserError(f"{flag} must be {kind}, got {str(given)!r:.80}: {such}")
        size = cls(float(match[1]) * _UNITS[match[2]])
        require(size > 0, f"{flag} must be more than zero", given, "try 4GiB")
        size.is_decimal = len(match[2]) == 1
        return size

    def __str__(self) -> str:
        return format_bytes(int(self), is_decimal=self.is_decimal)

    def __deepcopy__(self, memo: object) -> Self:
        return self


class Rate(ByteSize):
    """Bytes per second."""

    _KIND = ("bytes per second", "such as 3GB or 400MB/s")

    @classmethod
    def parse(cls, given: str | int, flag: str) -> Self:
        """Return a rate from what is a size, with or without `/s`. Raises `UserError`."""
        return super().parse(given.removesuffix("/s") if isinstance(given, str) else given, flag)

    def __str__(self) -> str:
        return f"{super().__str__()}/s"


def parse_cache_size(given: str | int, flag: str) -> str | ByteSize:
    """Return a size, or `auto` and `none` as they are. Raises `UserError`."""
    return given if given in ("auto", "none") else ByteSize.parse(given, flag)


def parse_size(given: str | int, flag: str) -> int:
    """Return the bytes of `512MiB`, `1.2GB`, `4G` (decimal) or a number. Raises `UserError`."""
    return int(ByteSize.parse(given, flag))


def parse_rate(given: str | int | None, flag: str) -> int | None:
    """Return bytes per second of `400MB` or `400MB/s`; None stays None. Raises `UserError`."""
    return None if given is None else int(Rate.parse(given, flag))


def is_decimal(*sizes: str | int | None) -> bool:
    """Return True if any of these sizes is written in powers of ten: `8GB` or `8G`, not `8GiB`."""
    return any(
        size.is_decimal
        if isinstance(size, ByteSize)
        else re.search(r"[kmgt]b?\s*$", str(size).lower())
        for size in sizes
    )


def format_bytes(num_bytes: float, *, is_decimal: bool = False) -> str:
    """Return `1.59 GiB`, `25.1 MiB`: three digits, in binary units or in `GB` and `MB`."""
    base, infix = (1000, "") if is_decimal else (1024, "i")
    for prefix, power in zip("TGMK", (4, 3, 2, 1), strict=True):
        amount = num_bytes / base**power
        if abs(amount) >= 1:
            return f"{amount:{'.3g' if amount < 999.5 else '.0f'}} {prefix}{infix}B"
    return f"{num_bytes:.0f} B"


def plural(count: int, noun: str) -> str:
    """Return `1 token`, `2 tokens`, `1,234 tokens`, `2 passes`."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{'' if count == 1 else ending}"


def duration(seconds: float) -> str:
    """Return `7 s`, `1:05`, `2 h 05 min`: as exact as a person wants to know it, and never nothing."""
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02}"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def rounded_up(value: int, multiple: int) -> int:
    """Return the least multiple that is not below a value."""
    return -(-value // multiple) * multiple
