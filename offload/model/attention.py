"""Attention of token trees: masks from ancestors, and a function that folds grouped queries.

Query heads that share a key/value head become rows of one, so keys and values are read once and
never repeated. The function is registered with transformers under `NAME`; families that change the
scores (soft caps, sinks) keep their own eager one and get the same additive masks. Instead of a
mask the function also takes `PathRows`, which say what rows see by position on their paths, and
with them all that a family may do to its scores.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import UserError
from offload.families.types import CALCULATE_WITH_MASKS, LIGHTNING
from offload.kernels.path_attention import AttentionChunk, PathRows, ScoreTerms, Window, first_seen
from offload.model import wide_products
from offload.model.library import AttentionInterface
from offload.model.parts import BatchMask

NAME = "offload_tree"
BIASED = "offload_tree_biased"
_MAX_WINDOW = 1 << 31
# bytes of a mask repeated for the heads of a group
_MAX_MASK_BYTES = 64 << 20
# bytes of one that is kept for the next layer: a draft's passes of a few rows
_MAX_KEPT_BYTES = 1 << 20
# families that use one of these keep their own eager attention
_SCORE_TERMS = ("softcap", "s_aux", "position_bias")


def is_for_rows(config: Any) -> bool:
    """Return True if a model's layers pass their mask to our attention function untouched."""
    return config._attn_implementation == NAME and config.model_type not in CALCULATE_WITH_MASKS


def windows_of(config: Any, num_layers: int) -> list[Window]:
    """Return the width of each layer's window. Raises `UserError` unless it is a number."""
    window = _num_keys(config, "sliding_window")
    chunk = _num_keys(config, "attention_chunk_size")
    usual = "sliding_attention" if window else "full_attention"
    kinds = getattr(config, "layer_types", None) or [usual] * num_layers
    reach: dict[str, Window] = {
        "sliding_attention": window,
        "chunked_attention": AttentionChunk(chunk) if chunk else None,
    }
    if config.model_type in LIGHTNING:  # the library uses this kind whatever the window
        reach["full_attention"] = window
    return [reach.get(kind) for kind in kinds]


def _num_keys(config: Any, name: str) -> int | None:
    size = getattr(config, name, None) or None
    if size is not None and (type(size) is not int or not 0 < size < _MAX_WINDOW):
        requirement = f"{name} in config.json must be a whole number or null"
        raise UserError(f"{requirement}, got {size!r:.80}: fix it")
    return size


def tree_mask(
    num_prefix: int, position_U: Tensor, ancestor_TU: Tensor, window: Window, dtype: torch.dtype
) -> Tensor:
    """Return an additive mask (1, 1, T, P + U): a row sees the prefix, its ancestors and itself.

    Args:
        num_prefix: P, committed positions 0..P-1.
        position_U: absolute positions of the uncommitted rows, the last T of which this pass runs.
        ancestor_TU: bool; whether an uncommitted row lies on the path to a row, itself included.
        window: number of positions that a row sees back.
        dtype: of the scores.
    """
    num_rows = len(ancestor_TU)
    seen_TS = torch.cat([ancestor_TU.new_ones(num_rows, num_prefix), ancestor_TU], dim=1)
    if window is not None:
        position_S = torch.cat([torch.arange(num_prefix, device=position_U.device), position_U])
        seen_TS &= position_S >= first_seen(window, position_U[-num_rows:, None])
    mask = torch.zeros(seen_TS.shape, dtype=dtype, device=seen_TS.device)
    return mask.masked_fill_(seen_TS.logical_not_(), torch.finfo(dtype).min)[None, None]


def folded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | PathRows | BatchMask | tuple[PathRows, ...] | None,
    *,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attend (1, H, T, K) queries to (1, G, S, K) keys; the result is (1, T, H, K).

    Raises `UserError` if another argument of transformers would change the scores.
    """
    # a layer that selects the keys of its rows gets a placeholder in place of a mask
    selection: Any = getattr(module, "selection", None)
    if isinstance(attention_mask, Tensor) and selection is not None:
        attention_mask = selection.selected
    if isinstance(attention_mask, BatchMask):
        attend = partial(folded_attention, module, scaling=scaling, **settings)
        return attention_mask.attend(attend, query, key, value), None
    if isinstance(attention_mask, tuple):
        # the heads of a group have different rows
        groups = [states.chunk(len(attention_mask), 1) for states in (query, key, value)]
        attend = partial(folded_attention, module, scaling=scaling, **settings)
        parts = [attend(*states)[0] for states in zip(*groups, attention_mask, strict=True)]
        return torch.cat(parts, 2), None
    if isinstance(attention_mask, PathRows):
        if settings.get("position_bias") is not None:
            complaint = "attention in path order does not support position_bias"
            raise UserError(f"{complaint}: choose another model")
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        terms = ScoreTerms(scale, settings.get("softcap"), settings.get("s_aux"))
        given = (query[0], key[0], value[0])
        states = (state if state.stride(2) == 1 else state.contiguous() for state in given)
        return attention_mask.attend(*states, attention_mask, terms)[None].contiguous(), None
    wanted = [name for name in _SCORE_TERMS if settings.get(name) is not None]
    if wanted:
        complaint = f"token trees do not support attention with {' and '.join(wanted)}"
        raise UserError(f"{complaint}: choose another model")
    num_batch, num_heads, num_rows, head_dim = query.shape
    group = num_heads // key.shape[1]
    # head g * group + i becomes the rows i * T + t
    folded = query.reshape(num_batch, key.shape[1], group * num_rows, head_dim)
    parts = [
        wide_products.attend(rows, key, value, attn_mask=mask, scale=scaling)
        for rows, mask in _parts(folded, attention_mask, group)
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return out.reshape(num_batch, num_heads, num_rows, -1).transpose(1, 2).contiguous(), None


def _parts(
    folded: Tensor, mask: Tensor | None, group: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield folded rows with their masks, in parts if a single mask would be too large."""
    if mask is None or group == 1 or mask.shape[1] != 1:
        yield folded, _folded_mask(mask, group)
        return
    num_rows = mask.shape[2]
    num_heads = max(1, min(group, _MAX_MASK_BYTES // (mask.nbytes or 1)))
    for rows in folded.split(num_heads * num_rows, dim=2):
        yield rows, _folded_mask(mask, rows.shape[2] // num_rows)


def _folded_mask(mask: Tensor | None, group: int) -> Tensor | None:
    """Return the mask of folded queries: repeated if it is the same for all heads, else folded too."""
    if mask is None or group == 1:
        return mask
    if mask.shape[1] == 1:
        is_small = mask.device.type == "cpu" and group * mask.nbytes <= _MAX_KEPT_BYTES
        return _repeated(mask, group) if is_small else mask.repeat(1, 1, group, 1)
    return mask.reshape(mask.shape[0], mask.shape[1] // group, group * mask.shape[2], mask.shape[3])


@lru_cache(maxsize=2)
def _repeated(mask: Tensor, group: int) -> Tensor:
    """Return the mask of all heads of a group, for which each layer of a pass asks; it is in host memory."""
    return mask.repeat(1, 1, group, 1)


def biased_attention(
    module: nn.Module, *given: Any, position_bias: Tensor, **settings: Any
) -> tuple[Tensor, None]:
    """Attend like `folded_attention`, with a `position_bias` (1, H, T, S)."""
    query, key, value, mask = given
    mask = position_bias if mask is None else position_bias + mask
    return folded_attention(module, query, key, value, mask, **settings)


def scale_by_position(layers: Iterable[nn.Module]) -> None:
    """Make layers with an attention temperature by position scale queries by `position_ids`.

    These are Llama 4's layers without rotary positions. transformers takes a row's index as its
    position, which is wrong for rows of a tree; for rows in order the results are equal.
    """
    for layer in layers:
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", None) and not attention.use_rope:
            attention.attn_temperature_tuning = False
            tuning = _Tuning(attention.floor_scale, attention.attn_scale)
            layer.register_forward_pre_hook(tuning.hear, with_kwargs=True)
            attention.q_proj.register_forward_hook(tuning.scale)


class _Tuning:
    """Scales the queries of one layer by the positions of the pass."""

    def __init__(self, floor_scale: float, attn_scale: float) -> None:
        self._floor_scale = floor_scale
        self._attn_scale = attn_scale
        self._position_1T = torch.empty(1, 0)

    def hear(self, _: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        """Note the positions of the coming rows."""
        self._position_1T = kwargs["position_ids"]

    def scale(self, _: nn.Module, __: Any, query_1TQ: Tensor) -> Tensor:
        """Scale the projection's output: a layer without rotary positions does nothing in between."""
        nth_1T = torch.floor((self._position_1T.float() + 1.0) / self._floor_scale)
        scale_1T = torch.log1p(nth_1T) * self._attn_scale
        return (query_1TQ * (scale_1T + 1.0)[..., None]).to(query_1TQ.dtype)


AttentionInterface.register(NAME, folded_attention)
AttentionInterface.register(BIASED, biased_attention)
