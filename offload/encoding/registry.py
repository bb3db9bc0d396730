"""The encodings that are read, by the names that headers give them, and the types that are computed in."""

from collections.abc import Mapping

from offload.encoding.base import Encoding
from offload.encoding.plain import Plain

_PLAIN = (Plain("BF16", "bfloat16", 2), Plain("F16", "float16", 2), Plain("F32", "float32", 4))
_PARTS = (Plain("F64", "float64", 8), Plain("I64", "int64", 8), Plain("I32", "int32", 4), Plain("I16", "int16", 2),
          Plain("I8", "int8", 1), Plain("U8", "uint8", 1), Plain("BOOL", "bool", 1), Plain("U64", "uint64", 8),
          Plain("U32", "uint32", 4), Plain("U16", "uint16", 2), Plain("F8_E4M3", "float8_e4m3fn", 1),
          Plain("F8_E5M2", "float8_e5m2", 1), Plain("F8_E8M0", "float8_e8m0fnu", 1))  # fmt: skip
ENCODINGS: Mapping[str, Encoding] = {one.name: one for one in _PLAIN}  # of weights that are computed with as they are
PLAIN_OF: Mapping[str, Encoding] = {one.dtype: one for one in _PLAIN}  # by the type that is computed in
STORED: Mapping[str, Encoding] = {one.name: one for one in (*_PLAIN, *_PARTS)}  # also of words and companions
