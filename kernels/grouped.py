"""Zero points and scales of grouped columns, in plain torch, for the references of integers."""

import torch
from torch import Tensor


def scale_groups(
    code_RK: Tensor, zero_RG: Tensor | None, scale_RG: Tensor, group: int | Tensor
) -> Tensor:
    """Return (code - zero point) x scale; `code_RK` (float32) is changed in place.

    Zero points (None: none) and scales are of any type. `group` is how many columns share a scale,
    the last group maybe fewer; or the index (K,) of each column's scale.
    """
    num_columns = code_RK.shape[1]
    num_groups = scale_RG.shape[1]
    if isinstance(group, int) and num_columns == num_groups * group:
        grouped = code_RK.unflatten(1, (num_groups, group))
        if zero_RG is not None:
            grouped.sub_(zero_RG.float()[..., None])
        grouped.mul_(scale_RG.float()[..., None])
        return code_RK
    index_K = (
        group
        if isinstance(group, Tensor)
        else torch.arange(num_columns, device=code_RK.device) // group
    )
    if zero_RG is not None:
        code_RK.sub_(zero_RG.float().index_select(1, index_K))
    return code_RK.mul_(scale_RG.float().index_select(1, index_K))
