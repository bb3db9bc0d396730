"""The type that quantised weights are expanded into, where nobody names one.

They are stored for GPUs, mostly with scales in float16. CPUs multiply float16 2 to 8 times slower than bfloat16, even
such as have instructions for both; in memory both take the same. What is packed is no other model than it was.
"""

from offload.checkpoint.safetensors import Checkpoint, compute_dtype_name
from offload.encoding.exponents import Exponents


def settled_dtype(target: Checkpoint, wish: str, *, is_on_cpu: bool) -> tuple[str, list[str]]:
    """The wish, or where there is none a type in place of float16; and what to tell the user."""
    codings = [entry.coded.coding for entry in target.tensors.values() if entry.coded is not None]
    is_rounded = not all(isinstance(one, Exponents) for one in codings)
    if wish != "auto" or not is_on_cpu or not is_rounded or compute_dtype_name(target, wish) != "float16":
        return wish, []
    return "bfloat16", ["computing in bfloat16: CPUs are slow with float16 (`dtype` float16 to have it)"]
