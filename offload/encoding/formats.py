"""The families of codings that are read, in the order in which the tensors of a weight are shown to them."""

from offload.encoding import (
    awq,
    bitsandbytes,
    bitsandbytes_bytes,
    compressed_integers,
    exponents,
    float8,
    gptq,
    mxfp4,
    nvfp4,
)
from offload.encoding.base import Format

FORMATS: tuple[Format, ...] = (
    *exponents.FORMATS,
    float8.FORMAT,
    nvfp4.FORMAT,
    compressed_integers.FORMAT,
    gptq.FORMAT,
    awq.FORMAT,
    mxfp4.FORMAT,
    bitsandbytes.FORMAT,
    bitsandbytes_bytes.FORMAT,
)
