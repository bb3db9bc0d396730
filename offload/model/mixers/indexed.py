"""Layers that select by an index which positions they attend to, over token trees.

An indexer is ours: it stands where transformers has its own and holds the same parameters, under
the names that checkpoints state, by which its make is recognised. It makes queries, weights of
their heads and index states of the rows, and leaves the selection to `selection.py`. Attention
stays the library's: what an indexer returns to it, and the mask that it is given, are placeholders
of one number, and `folded_attention` takes the selection in place of both.

Invariant: an indexer of another make, or of a family whose rotary positions of index keys are not
known, is refused.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from offload.model.library import (
    EARLIER_INDICES,
    HIDDEN,
    MASK,
    POSITIONS,
    QUERY_INPUT,
    ROTARY_TABLES,
    require_arguments,
)
from offload.model.mixers.selection import Pool, Selection, TopBlocks, TopK

# rows (T, H, K), cosines and sines (T, 1, R) -> rows with R of their K numbers rotated
Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]


def rotate_halves(rows_THK: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Rotate the first R numbers; number i is paired with i + R / 2."""
    width = cos_T1R.shape[-1]
    paired = rows_THK[..., :width]
    first, second = paired.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    rest = rows_THK[..., width:]
    return torch.cat([paired * cos_T1R + turned * sin_T1R, rest], dim=-1)


def rotate_pairs(rows_THK: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Rotate the first R numbers, neighbours in pairs; first ones come to lie before second ones."""
    width = cos_T1R.shape[-1]
    cos = cos_T1R[..., : width // 2]
    sin = sin_T1R[..., : width // 2]
    first = rows_THK[..., 0:width:2]
    second = rows_THK[..., 1:width:2]
    rest = rows_THK[..., width:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def rotate_last_halves(rows_THK: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Rotate the last R numbers as `rotate_halves` does."""
    num_before = rows_THK.shape[-1] - cos_T1R.shape[-1]
    rotated = rotate_halves(rows_THK[..., num_before:], cos_T1R, sin_T1R)
    return torch.cat([rows_THK[..., :num_before], rotated], dim=-1)


# by the type of the text model: neither tensor names nor config.json tell
ROTATIONS: Mapping[str, Rotate] = {
    "axk2": rotate_halves,
    "deepseek_v32": rotate_halves,
    "dots3_note_text": rotate_pairs,
    "glm_moe_dsa": rotate_pairs,
    "hy_v4": rotate_last_halves,
    "hy_v4_vl_text": rotate_last_halves,
    "mistral_large4_text": rotate_pairs,
}


class Indexer(nn.Module):
    """An indexer over the parameters of the one that it replaces; each make is a class.

    Args:
        replaced: the library's, whose children and parameters it takes over.
        config: of the text model.
        layer: its number.
        selection: of the model, which it writes to.
    """

    makes: ClassVar[list[type["Indexer"]]] = []
    names: ClassVar[frozenset[str]]  # of its children and parameters, by which it is recognised
    inputs: ClassVar[tuple[str, ...]]  # that the library's attention hands on to it
    top_k: TopK | TopBlocks
    state_width: int  # numbers of one position that the cache keeps

    def __init_subclass__(cls) -> None:
        cls.makes.append(cls)

    def __init__(self, replaced: nn.Module, config: Any, layer: int, selection: Selection) -> None:
        super().__init__()
        for name, child in replaced.named_children():
            self.add_module(name, child)
        for name, parameter in replaced.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self._signature = require_arguments(replaced, self.inputs)
        self._layer = layer
        self._selection = selection
        self.configure(config, layer)
        if self.top_k.num_keys < 1:
            raise ValueError("an index that chooses nothing")

    def configure(self, config: Any, layer: int) -> None:
        """Set `top_k`, `state_width` and other sizes from the config. Raises `ValueError`."""
        raise NotImplementedError

    def index(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return queries (T, H, K), weights (T, H) if heads have any, and index states (T, W)."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Select for the rows of the running pass, and return a placeholder for the selection."""
        inputs = self._signature.bind(*args, **kwargs).arguments
        self._selection.select(self.top_k, self._layer, *self.index(inputs))
        return placeholder(inputs[HIDDEN], torch.long)


def placeholder(beside: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor that the library may index, compare and add up in place of any mask."""
    return torch.zeros(1, 1, 1, dtype=dtype, device=beside.device)


class TokenIndexer(Indexer):
    """A key for each token, as in DeepSeek-V3.2 and the families that came from it."""

    names = frozenset({"wq_b", "wk", "k_norm", "weights_proj"})
    inputs: ClassVar[tuple[str, ...]] = (HIDDEN, QUERY_INPUT, ROTARY_TABLES)
    wq_b: nn.Linear
    wk: nn.Linear
    k_norm: nn.LayerNorm
    weights_proj: nn.Linear
    _rotate: Rotate | None

    def configure(self, config: Any, layer: int) -> None:
        """See `Indexer.configure`."""
        self.top_k = TopK(config.index_topk)
        self.state_width = config.index_head_dim
        if config.model_type not in ROTATIONS:
            raise ValueError("how it rotates the keys of its index is not known")
        # the name is the library's: ones stand for layers with rotary positions
        rotary_layers = getattr(config, "no_rope_layers", None)
        has_rotary = rotary_layers is None or bool(rotary_layers[layer])
        self._rotate = ROTATIONS[config.model_type] if has_rotary else None

    def index(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None, Tensor]:
        """See `Indexer.index`."""
        hidden_1TD = inputs[HIDDEN]
        key_TK = self._keys(hidden_1TD)
        query_THK = self._queries(inputs).unflatten(-1, (-1, key_TK.shape[-1]))[0]
        query_THK = self._scaled(query_THK, inputs)
        if self._rotate is not None:
            cos_T1R, sin_T1R = (table[0, :, None] for table in inputs[ROTARY_TABLES])
            query_THK = self._rotate(query_THK, cos_T1R, sin_T1R)
            key_TK = self._rotate(key_TK[:, None], cos_T1R, sin_T1R)[:, 0]
        return query_THK, self._weights(hidden_1TD), key_TK

    def _queries(self, inputs: Mapping[str, Any]) -> Tensor:
        return self.wq_b(inputs[QUERY_INPUT])

    def _scaled(self, query_THK: Tensor, _: Mapping[str, Any]) -> Tensor:
        return query_THK

    def _keys(self, hidden_1TD: Tensor) -> Tensor:
        """Return (T, K), normalised in the type of the norm."""
        normed = self.k_norm(self.wk(hidden_1TD).to(self.k_norm.weight.dtype))
        return normed.to(hidden_1TD.dtype)[0]

    def _weights(self, hidden_1TD: Tensor) -> Tensor:
        """Return (T, H); factors above zero that all heads have change no selection."""
        return self.weights_proj(hidden_1TD.to(self.weights_proj.weight.dtype)).float()[0]


class ScaledIndexer(TokenIndexer):
    """Queries come from hidden states, scaled by position, as in Mistral Large 4."""

    names = TokenIndexer.names | {"q_input_norm", "softmax_scaling"}
    inputs = (HIDDEN, POSITIONS, ROTARY_TABLES)
    q_input_norm: nn.LayerNorm
    softmax_scaling: Any

    def _queries(self, inputs: Mapping[str, Any]) -> Tensor:
        return self.wq_b(self.q_input_norm(inputs[HIDDEN]))

    def _scaled(self, query_THK: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Scale by the logarithm of the position, with a factor and a bias for each head."""
        scaling = self.softmax_scaling
        log_T = (inputs[POSITIONS][0] + 1).float().log().to(query_THK.dtype)
        scale_TH = scaling.scale.to(log_T.dtype) * log_T[:, None] + scaling.bias.to(log_T.dtype)
        return query_THK * scale_TH[..., None]


class GatedPoolIndexer(TokenIndexer):
    """A key for several tokens, weighted by gates that are learned, as in GLM-5.3-Flash.

    The states of a token are its key, and behind that its gate.
    """

    names = TokenIndexer.names | {"index_kpool_compress_ape", "index_kpool_compress_gate"}
    inputs = (HIDDEN, QUERY_INPUT)
    index_kpool_compress_ape: nn.Parameter
    index_kpool_compress_gate: nn.Parameter

    def configure(self, config: Any, _: int) -> None:
        """See `Indexer.configure`."""
        if not config.index_kpool_always_select_tail:
            raise ValueError("an index by which the first tokens of a text see nothing")
        size = config.index_kpool
        self.top_k = TopK(config.index_topk // size, Pool(size, self._pool_keys))
        self.state_width = 2 * config.index_head_dim
        self._rotate = None

    def index(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None, Tensor]:
        """See `Indexer.index`."""
        query_THK, weight_TH, key_TK = super().index(inputs)
        products = self._selection.products
        gate_TK = products.linear(inputs[HIDDEN], self.index_kpool_compress_gate)[0]
        return query_THK, weight_TH, torch.cat([key_TK, gate_TK], dim=-1)

    def _pool_keys(self, state_JRW: Tensor, _: Tensor) -> Tensor:
        key_JRK, gate_JRK = state_JRW.chunk(2, dim=-1)
        logit_JRK = gate_JRK.float() + self.index_kpool_compress_ape.float()
        product_JRK = logit_JRK.softmax(dim=1).to(key_JRK.dtype) * key_JRK
        return _sum_of_tokens(product_JRK.float()).to(key_JRK.dtype)


class MeanPoolIndexer(Indexer):
    """A key for several tokens: their mean, normalised and rotated, as in Qwen3.8-Flash-Next."""

    names = frozenset({"index_qk_proj", "q_layernorm", "k_layernorm"})
    inputs = (HIDDEN, ROTARY_TABLES)
    index_qk_proj: nn.Linear
    q_layernorm: nn.Module
    k_layernorm: nn.Module
    _tables: tuple[Tensor, Tensor]

    def configure(self, config: Any, _: int) -> None:
        """See `Indexer.configure`."""
        size = config.indexer_compress_ratio
        self.state_width = config.indexer_head_dim
        self._num_heads = config.indexer_n_heads
        self.top_k = TopK(config.indexer_budget // size, Pool(size, self._pool_keys))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """See `Indexer.forward`; here the library combines two masks."""
        return super().forward(*args, **kwargs).bool()

    def index(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None, Tensor]:
        """See `Indexer.index`; the tables have the rows' positions behind all positions."""
        hidden_1TD = inputs[HIDDEN]
        num_rows = hidden_1TD.shape[1]
        row_THK = self.index_qk_proj(hidden_1TD)[0].unflatten(-1, (-1, self.state_width))
        query_THK, key_TGK = row_THK.tensor_split([self._num_heads], dim=1)
        cos_T1R, sin_T1R = (table[0, -num_rows:, None] for table in inputs[ROTARY_TABLES])
        cos_PR, sin_PR = (table[0, :-num_rows] for table in inputs[ROTARY_TABLES])
        self._tables = cos_PR, sin_PR
        query_THK = rotate_halves(self.q_layernorm(query_THK), cos_T1R, sin_T1R)
        return query_THK, None, key_TGK.flatten(1)

    def _pool_keys(self, state_JRK: Tensor, first_J: Tensor) -> Tensor:
        """Rotate as at the first token of the pool."""
        mean_JK = _sum_of_tokens(state_JRK.float()) / state_JRK.shape[1]
        key_J1K = self.k_layernorm(mean_JK.to(state_JRK.dtype))[:, None]
        cos_J1R, sin_J1R = (table[first_J, None] for table in self._tables)
        return rotate_halves(key_J1K, cos_J1R, sin_J1R)[:, 0]


class BlockIndexer(Indexer):
    """Blocks of positions for each group of heads, as in MiniMax-M3."""

    names = frozenset({"q_proj", "k_proj", "q_norm", "k_norm"})
    inputs = (HIDDEN, ROTARY_TABLES)
    q_proj: nn.Linear
    k_proj: nn.Linear
    q_norm: nn.Module
    k_norm: nn.Module

    def configure(self, config: Any, _: int) -> None:
        """See `Indexer.configure`."""
        if config.index_n_heads != config.num_key_value_heads:
            raise ValueError("an index with another number of heads than its keys and values")
        num_last = config.index_local_blocks
        if num_last > config.index_topk_blocks:
            raise ValueError("an index of fewer blocks than are always seen")
        self.top_k = TopBlocks(config.index_topk_blocks, config.index_block_size, num_last)
        self.state_width = config.index_head_dim

    def index(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None, Tensor]:
        """See `Indexer.index`."""
        width = self.state_width
        query_THK = self.q_norm(self.q_proj(inputs[HIDDEN])[0].unflatten(-1, (-1, width)))
        key_T1K = self.k_norm(self.k_proj(inputs[HIDDEN])[0])[:, None]
        cos_T1R, sin_T1R = (table[0, :, None, :width] for table in inputs[ROTARY_TABLES])
        key_T1K = rotate_halves(key_T1K, cos_T1R, sin_T1R)
        return rotate_halves(query_THK, cos_T1R, sin_T1R), None, key_T1K[:, 0]


def _sum_of_tokens(state_JRK: Tensor) -> Tensor:
    """Add up (J, R, K) over the tokens of each pool one after another, however many pools there are."""
    sum_JK = state_JRK[:, 0]
    for place in range(1, state_JRK.shape[1]):
        sum_JK = sum_JK + state_JRK[:, place]
    return sum_JK


def follow_indices(layers: nn.ModuleList, config: Any) -> list[bool]:
    """Replace these layers' indexers by ours; return True for each layer that selects keys.

    Raises `ValueError` where that could not be what the family computes.
    """
    selection = Selection()
    kinds = getattr(config, "indexer_types", None) or ["full"] * len(layers)
    selects = list[bool]()
    for index, (layer, kind) in enumerate(zip(layers, kinds, strict=False)):
        attention: Any = getattr(layer, "self_attn", None)
        indexer = getattr(attention, "indexer", None)
        make = _make_of(indexer)
        is_shared = hasattr(attention, "indexer") and indexer is None and kind == "shared"
        if indexer is not None and make is not None:
            attention.indexer = make(indexer, config, index, selection)
        elif is_shared and not any(selects):
            raise ValueError("its first layers share an index that none has made")
        selects.append(make is not None or is_shared)
        if selects[-1]:
            attention.selection = selection
    return selects


def _make_of(indexer: nn.Module | None) -> type[Indexer] | None:
    """Return our class for a library's indexer, by the names in it; None for an unknown one."""
    if indexer is None:
        return None
    names = {name for name, _ in indexer.named_children()}
    names |= {name for name, _ in indexer.named_parameters(recurse=False)}
    return next((make for make in Indexer.makes if make.names == names), None)


def selection_of(layer: nn.Module) -> Selection | None:
    """Return the selection of the layer's model; None where the layer attends to all it sees."""
    return getattr(getattr(layer, "self_attn", None), "selection", None)


def with_placeholders(hidden_1TD: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a layer that selects, without a mask or an earlier layer's indices.

    A layer that shares a selection takes the last one of the pass, or everything where none has
    been made, as when earlier layers are cut off.
    """
    kwargs = {**kwargs, MASK: hidden_1TD.new_zeros(1, 1, 1, 1)}
    if EARLIER_INDICES in kwargs and kwargs[EARLIER_INDICES] is None:
        kwargs[EARLIER_INDICES] = placeholder(hidden_1TD, torch.long)
    return kwargs
