"""The encodings that are read, by the names that headers give them, and the types that are computed in."""

from collections.abc import Mapping

from offload.encoding.base import Encoding
from offload.encoding.plain import Plain

_PLAIN = (Plain("BF16", "bfloat16", 2), Plain("F16", "float16", 2), Plain("F32", "float32", 4))
ENCODINGS: Mapping[str, Encoding] = {one.name: one for one in _PLAIN}
PLAIN_OF: Mapping[str, Encoding] = {one.dtype: one for one in _PLAIN}  # by the type that is computed in
