"""The families of codings that are read, in the order in which the tensors of a weight are shown to them."""

from offload.encoding import exponents, float8
from offload.encoding.base import Format

FORMATS: tuple[Format, ...] = (*exponents.FORMATS, float8.FORMAT)
