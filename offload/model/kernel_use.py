"""The models' use of the kernels that were chosen for a run."""

import torch

from offload.kernels.registry import KernelSet
from offload.model.cuda_graphs import use_graphs
from offload.model.norms import set_norm_kernel
from offload.model.tree_model import TreeModel


def use_kernels(
    target: TreeModel, draft: TreeModel | None, kernels: KernelSet, device: torch.device
) -> str | None:
    """Let both models compute with these, and record the draft's small passes.

    Matrices at 4 bits use theirs only if they lie on the kernels' device. Return a line with the
    reason if a draft there cannot be recorded.
    """
    for model in filter(None, (target, draft)):
        model.set_attention_kernel(kernels.path_attention)
        set_norm_kernel(model.meta_model, kernels.rms_norm)
        if model.held is not None and model.torch_device.type == device.type:
            model.held.set_kernel(kernels.multiply_int4)
    if draft is None or draft.torch_device.type != "cuda":
        return None
    return use_graphs(draft)
