"""The type that quantised weights are expanded into, where nobody names one.

They are stored for GPUs, mostly with scales in float16. CPUs multiply float16 2 to 8 times slower than bfloat16, even
such as have instructions for both; in memory both take the same.
"""

import torch

from offload.checkpoint.safetensors import Checkpoint, compute_dtype_name


def computed_instead(target: Checkpoint, wish: str, place: torch.device | None) -> str | None:
    """What to compute in, on a CPU (`place` is None), in place of a float16 that nobody has asked for."""
    is_coded = any(entry.coded is not None for entry in target.tensors.values())
    if wish != "auto" or place is not None or not is_coded or compute_dtype_name(target, wish) != "float16":
        return None
    return "bfloat16"
