"""The layers of a meta model: where they stand, what is left of them, how far back each one sees.

Between the matrices of a feed-forward, a prompt would hold three times its width for each of
thousands of rows, which a plan would have to keep free in every pass. So layers take rows there in
parts of as many as one product has at most on a CPU. Invariant: a row's result is that of all rows
at once, as far as products give a row the same bits whatever rows are beside it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from inspect import signature
from typing import Any
from weakref import WeakMethod

from torch import Tensor, nn
from transformers import PreTrainedModel

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.cuts import Section
from offload.errors import UserError
from offload.kernels.path_attention import AttentionChunk, Window
from offload.memory.sizes import INNER_ROWS

_MAX_WINDOW = 1 << 31
_MATRICES = ("gate_proj", "up_proj", "gate_up_proj")
_INSEPARABLE = {
    "is_encoder_decoder": "its encoder is run by the rank that has the prompt",
    "num_kv_shared_layers": "layers that share keys and values of others",
    "hidden_size_per_layer_input": "inputs of their own for every layer",
}


def layer_stacks(meta_model: PreTrainedModel) -> list[nn.ModuleList]:
    """Return the layers of the decoder, and of an encoder where there is one."""
    parts = [meta_model.get_decoder()]
    if meta_model.config.is_encoder_decoder:
        parts.append(meta_model.get_encoder())
    return [getattr(part, _stack_name(meta_model)) for part in parts]


def _stack_name(meta_model: PreTrainedModel) -> str:
    return "block" if meta_model.config.is_encoder_decoder else "layers"


@contextmanager
def cut_stack(meta_model: PreTrainedModel, kept: slice) -> Iterator[None]:
    """Leave the decoder these layers alone meanwhile; its config tells of their kinds."""
    decoder = meta_model.get_decoder()
    name = _stack_name(meta_model)
    layers = getattr(decoder, name)
    config = decoder.config
    kinds = getattr(config, "layer_types", None)
    try:
        setattr(decoder, name, layers[kept])
        _tell_kinds(config, kinds and kinds[kept])
        yield
    finally:
        setattr(decoder, name, layers)
        _tell_kinds(config, kinds)


def keep_section(checkpoint: Checkpoint, meta_model: PreTrainedModel, section: Section) -> None:
    """Leave the decoder these layers alone, for good, numbered from 0. Raises `UserError`."""
    config = meta_model.config
    decoder = meta_model.get_decoder()
    for name, what in _INSEPARABLE.items():
        if getattr(config, name, None):
            kind = f"{checkpoint.name}: model type {config.model_type}"
            rule = f"cannot be divided by layers ({what})"
            raise UserError(f"{kind} {rule}: let one rank have all of it")
    kept = slice(section.first, section.last)
    layers = decoder.layers[kept]
    kinds = getattr(config, "layer_types", None)
    for module in layers.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx -= section.first
    decoder.layers = layers
    config.num_hidden_layers = len(layers)
    _tell_kinds(config, kinds and kinds[kept])


def _tell_kinds(config: Any, kinds: list[str] | None) -> None:
    """Set the kinds of layers; families that compute them from something else ask their layers."""
    if kinds:
        with suppress(AttributeError):
            config.layer_types = kinds


def attention_windows(config: Any, num_layers: int) -> list[Window]:
    """Return how far back each layer sees. Raises `UserError` for what is no number."""
    window = _num_keys(config, "sliding_window")
    chunk = _num_keys(config, "attention_chunk_size")
    usual = "sliding_attention" if window else "full_attention"
    kinds = getattr(config, "layer_types", None) or [usual] * num_layers
    reach: dict[str, Window] = {
        "sliding_attention": window,
        "chunked_attention": AttentionChunk(chunk) if chunk else None,
    }
    if config.model_type == "minimax":  # calls them so whatever their window
        reach["full_attention"] = window
    return [reach.get(kind) for kind in kinds]


def _num_keys(config: Any, name: str) -> int | None:
    size = getattr(config, name, None) or None
    if size is not None and (type(size) is not int or not 0 < size < _MAX_WINDOW):
        rule = f"{name} in config.json must be a whole number or null"
        raise UserError(f"{rule}, got {size!r:.80}: fix it")
    return size


def take_rows_in_parts(layers: Iterable[nn.Module]) -> None:
    """Let the feed-forwards of these layers take wide passes in parts from now on.

    Only those that `checkpoint.sizes` knows by the names of their matrices.
    """
    for layer in layers:
        inner = getattr(layer, "mlp", None)
        if isinstance(inner, nn.Module) and _is_plain(inner):
            inner.forward = _in_parts(inner)


def _is_plain(inner: nn.Module) -> bool:
    """Return whether a feed-forward is made of matrices alone, and given nothing but rows."""
    children = dict(inner.named_children())
    has_matrices = "down_proj" in children and any(name in children for name in _MATRICES)
    others = [one for one in children.values() if type(one) is not nn.Linear]
    is_bare = not any(True for one in others for _ in one.parameters())
    return has_matrices and is_bare and len(signature(inner.forward).parameters) == 1


def _in_parts(inner: nn.Module) -> Callable[[Tensor], Tensor]:
    # weak, because a module that refers to itself would outlive its model
    whole_of = WeakMethod(inner.forward)

    def forward(hidden_states: Tensor) -> Tensor:
        whole = whole_of()
        num_rows = hidden_states.shape[-2]
        assert whole is not None, "its module is there"
        if num_rows <= INNER_ROWS:
            return whole(hidden_states)
        first = whole(hidden_states[..., :INNER_ROWS, :])
        out = first.new_empty(hidden_states.shape)
        out[..., :INNER_ROWS, :] = first
        for lo in range(INNER_ROWS, num_rows, INNER_ROWS):
            out[..., lo : lo + INNER_ROWS, :] = whole(hidden_states[..., lo : lo + INNER_ROWS, :])
        return out

    return forward
