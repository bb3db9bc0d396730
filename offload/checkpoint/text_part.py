"""The tensors of a language model, wherever its files have them, by its own names.

- Checkpoints with other parts beside the language model, which lies under a prefix
  (`language_model.model.layers.0`, `model.language_model.layers.0`) or beside towers
  (`model.layers.0`, `visual.blocks.0`). Some have more layers, for multi-token prediction.
- Stacks of experts that transformers transposes where shapes ask for it: by the widths in the
  config alone, so that planning knows of it.
- Zamba2's few blocks of attention, which stand in many layers by turns and in files once. Here
  every layer that has one has its tensors, in the same bytes, and is read as any other is.

Invariant: what is left out is neither read nor counted in any size, and what is kept has the names
of the language model on its own.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from offload.checkpoint.small_files import ANOTHER_FOLDER, is_wrapper, of_text
from offload.checkpoint.tensors import Coded, Entries, TensorEntry, layer_name
from offload.encoding.base import ENCODINGS, Settings
from offload.encoding.floats import TransposedStack
from offload.errors import UserError
from offload.families.types import SHARED_LAYERS, TURNED_STACKS

_INNER = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(lm_head\.)?")
# tensors of a language model that lies beside the towers
_BARE = re.compile(r"^(?:model\.)?(?:layers|embed_tokens|norm|rotary_emb|lm_head)\.")
_HEAD = re.compile(r"^(?:model\.)?lm_head\.")
_MULTI_TOKEN = re.compile(r"(?:^|\.)mtp(?![a-z])")
# of files in Mistral's own form, by which they are told, and others that it has; where transformers
# renames by two tables, one after the other, here the outer one is applied
_MISTRAL = "tok_embeddings.weight"
_MISTRAL_NAMES = (
    (re.compile(r"^tok_embeddings\."), "model.embed_tokens."),
    (re.compile(r"^output\."), "lm_head."),
    (re.compile(r"^lerope\."), "model.rotary_emb."),
    (re.compile(r"^(layers|norm)\."), r"model.\1."),
    (re.compile(r"\.wo\."), ".o_proj."),
    (re.compile(r"\.(feed_forward|shared_experts)\.w1\."), r".\1.gate_proj."),
    (re.compile(r"\.(feed_forward|shared_experts)\.w2\."), r".\1.down_proj."),
    (re.compile(r"\.(feed_forward|shared_experts)\.w3\."), r".\1.up_proj."),
)
_EXTRA = "extra layers"
_OTHER = "other parts"
_KINDS = {
    _EXTRA: re.compile(rf"{_MULTI_TOKEN.pattern}|^(?:(?:pre|post)_projection|masked_embedding)\."),
    "audio": re.compile("audio|speech|sound"),
    "vision": re.compile("vis|vit|image|pixel|patch|multi_modal|mm_"),
}

_STACK = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
_HYBRID = "linear.weight"


class TextPart(NamedTuple):
    """The language model's tensors by its own names, and the bytes left out, by kind."""

    tensors: dict[str, TensorEntry]
    left_out: dict[str, int]
    extra: dict[str, TensorEntry]  # of what guesses further ahead


def text_part(where: str, config: Settings, tensors: Entries) -> TextPart:
    """Return the language model within a larger model. Raises `UserError` if there is none."""
    kept = dict[str, TensorEntry]()
    left_out = Counter[str]()
    extra = dict[str, TensorEntry]()
    num_layers = of_text(config).get("num_hidden_layers")
    is_around = is_wrapper(config)
    is_named = any(map(_INNER.match, tensors))
    is_mistral = is_around and _MISTRAL in tensors
    for name, entry in tensors.items():
        renamed = name
        for pattern, other in _MISTRAL_NAMES if is_mistral else ():
            renamed = pattern.sub(other, renamed)
        named = is_named and not is_mistral
        inner = _text_model_name(renamed, is_named=named) if is_around else name
        if inner is None or _is_for_multi_token_prediction(inner, num_layers):
            kinds = (kind for kind, pattern in _KINDS.items() if pattern.search(name))
            kind = next(kinds, _OTHER) if inner is None else _EXTRA
            left_out[kind] += entry.num_bytes
            if kind == _EXTRA:
                extra[inner or name] = entry
        elif inner in kept:
            complaint = f"{where}: {inner} of the language model is stored twice"
            raise UserError(f"{complaint}: save it with save_pretrained")
        else:
            kept[inner] = entry
    if is_around and tensors and not any(map(layer_name, kept)):
        present = " and ".join(left_out) or "nothing"
        raise UserError(
            f"{where}: no tensors of a language model, {present} alone: {ANOTHER_FOLDER}"
        )
    return TextPart(kept, dict(left_out), extra)


def _text_model_name(name: str, *, is_named: bool) -> str | None:
    """Return a tensor's name in the language model on its own; None for the parts around it."""
    match = _INNER.match(name)
    if match:
        return f"{match[1] or 'model.'}{name[match.end() :]}"
    return name if (_HEAD if is_named else _BARE).match(name) else None


def _is_for_multi_token_prediction(name: str, num_layers: Any) -> bool:
    """Return True if a tensor is of layers that predict further ahead, or beyond the last."""
    place = layer_name(name)
    # an encoder, whose layers are called blocks, may have more than the decoder
    if place is not None and place.stack.endswith("layers"):
        is_known = type(num_layers) is int and num_layers > 0
        if is_known and place.layer >= num_layers:
            return True
    return _MULTI_TOKEN.search(name) is not None


def with_turned_stacks(config: Settings, tensors: Entries) -> dict[str, TensorEntry]:
    """Return the tensors, of which stacks of plain numbers have the model's shapes."""
    text = of_text(config)
    hidden = text.get("hidden_size")
    width = text.get("moe_intermediate_size")
    is_known = config.get("model_type") in TURNED_STACKS
    if not is_known or type(hidden) is not int or type(width) is not int:
        return dict(tensors)
    wanted = {"gate_up_proj": (2 * width, hidden), "down_proj": (hidden, width)}
    return {name: _transposed_stack(name, entry, wanted) for name, entry in tensors.items()}


def _transposed_stack(
    name: str, entry: TensorEntry, wanted: Mapping[str, tuple[int, int]]
) -> TensorEntry:
    match = _STACK.search(name)
    if match is None or entry.coded is not None or entry.dtype not in ENCODINGS:
        return entry
    rows, columns = wanted[match[1]]
    if rows == columns or entry.shape[1:] != (columns, rows):
        return entry
    shape = (entry.shape[0], rows, columns)
    return entry._replace(shape=shape, coded=Coded(TransposedStack(entry.dtype)))


def with_shared_layers(config: Settings, tensors: Entries) -> dict[str, TensorEntry]:
    """Return the tensors, and those that layers share under the names of each of them."""
    num_blocks = config.get("num_mem_blocks", 1)
    block_name = SHARED_LAYERS.get(str(config.get("model_type")))
    if block_name is None or type(num_blocks) is not int:
        return dict(tensors)
    names = {name: place for name in tensors if (place := layer_name(name)) is not None}
    layers = sorted({place.layer for place in names.values() if place.inner == _HYBRID})
    turn = {layer: index % max(1, num_blocks) for index, layer in enumerate(layers)}
    sharing = defaultdict[int, list[int]](list)
    for layer in layers:
        sharing[turn[layer]].append(layer)
    shared = dict(tensors)
    for name, place in names.items():
        if place.inner.startswith(block_name):
            for layer in sharing.get(turn.get(place.layer, -1), ()):
                shared.setdefault(place.at(layer), tensors[name])
    return shared
