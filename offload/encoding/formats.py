"""The families of codings that are read, in the order in which the tensors of a weight are shown to
them.
"""

from offload.encoding import bitsandbytes, exponents
from offload.encoding import bitsandbytes as bitsandbytes_bytes
from offload.encoding import floats as float8
from offload.encoding import floats as mxfp4
from offload.encoding import floats as nvfp4
from offload.encoding import integers as awq
from offload.encoding import integers as compressed_integers
from offload.encoding import integers as gptq
from offload.encoding.base import Format

FORMATS: tuple[Format, ...] = (
    *exponents.FORMATS,
    float8.FLOAT8,
    nvfp4.NVFP4,
    compressed_integers.COMPRESSED_INTEGERS,
    gptq.GPTQ,
    awq.AWQ,
    mxfp4.MXFP4,
    bitsandbytes.BITSANDBYTES_4,
    bitsandbytes_bytes.BITSANDBYTES_8,
)
