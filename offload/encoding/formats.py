"""The formats that are read, in the order in which they are asked to recognise a weight."""

from offload.encoding import bitsandbytes, exponents, floats, integers
from offload.encoding.base import Format

FORMATS: tuple[Format, ...] = (
    *exponents.FORMATS,
    floats.FLOAT8,
    floats.NVFP4,
    integers.COMPRESSED_INTEGERS,
    integers.GPTQ,
    integers.AWQ,
    floats.MXFP4,
    bitsandbytes.BITSANDBYTES_4,
    bitsandbytes.BITSANDBYTES_8,
)
