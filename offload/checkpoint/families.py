"""What is known of families before transformers is imported: what they call sizes and tensors.

- Refused families, and mixtures whose experts run one by one. That some families cannot be decoded
  with trees spares a user the seconds that importing takes; `model/meta.py` finds the same by
  building the model, and refuses many more.
- T5 and mT5: sizes under other names, and two stacks of layers.
- Checkpoints that hold other parts beside the language model, whose tensors are selected. It lies
  under a prefix (`language_model.model.layers.0`, `model.language_model.layers.0`), or beside the
  vision and audio towers (`model.layers.0`, `visual.blocks.0`). Some checkpoints carry additional
  layers for multi-token prediction.
- Stacks of experts that transformers transposes where shapes ask for it, and so does this: by the
  widths in the config alone, so that planning knows of it.
- Zamba2's few blocks of attention, which stand in many layers by turns; files hold each of them
  once. Here every layer that has one has its tensors, which lie in the same bytes: a layer is read
  as any other is, and its bytes are counted wherever it stands.

Invariants: a family is refused here only if building refuses it, too; what is left out is neither
read nor counted in any size, and what is kept has the names of the language model on its own; the
config of any other model is left unchanged.
"""

import copy
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from offload.checkpoint.tensors import (
    Coded,
    Entries,
    TensorEntry,
    check_counts,
    check_types,
    of_text,
)
from offload.encoding.base import ENCODINGS, Settings, Tensors, WordsAlone
from offload.errors import UserError, reason

if TYPE_CHECKING:
    from torch import Tensor

    from offload.kernels.expansion import Expansion


_NO_LAYERS = "its decoder has no layers[i] with rotary positions"
_NO_TEXT = "it does not write text"
REFUSED = {
    "bart": "of encoder-decoder models t5 and mt5 are known",
    "bloom": _NO_LAYERS,
    "clip": _NO_TEXT,
    "falcon": _NO_LAYERS,
    "gpt2": _NO_LAYERS,
    "opt": _NO_LAYERS,
    "rwkv": _NO_LAYERS,
    "umt5": "of encoder-decoder models t5 and mt5 are known",
}
# Model types whose experts run one by one, for their own rows; the others multiply every row with
# every expert.
_ONE_BY_ONE = """
afmoe aria_text axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1
dots3_note_text ernie4_5_moe exaone_moe flex_olmo flint gemma4_text glm4_moe glm4_moe_lite
glm4v_moe_text glm5_next_text glm_moe_dsa gpt_oss granitemoe granitemoe_swa granitemoehybrid
granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 jamba kimi_linear kolibri1 laguna lfm2_moe llama4_text
mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text mistral_large4_text mixtral nemotron_h
olmoe phimoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen3_omni_moe_text qwen3_vl_moe_text
qwen4_exp_text solar_open step3p5
"""
ON_DEMAND = frozenset(_ONE_BY_ONE.split())

_INNER = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(lm_head\.)?")
# tensors of a language model that lies beside the towers
_BARE = re.compile(r"^(?:model\.)?(?:layers|embed_tokens|norm|rotary_emb|lm_head)\.")
_HEAD = re.compile(r"^(?:model\.)?lm_head\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
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
    _EXTRA: _MULTI_TOKEN,
    "audio": re.compile("audio|speech|sound"),
    "vision": re.compile("vis|vit|image|pixel|patch|multi_modal|mm_"),
}
_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads",
          "num_key_value_heads", "head_dim", "max_position_embeddings")  # fmt: skip
# model types whose config has the sizes of text at the top, beside `vision_config`
_SIZES_OUTSIDE = ("qwen2_vl", "qwen2_5_vl")
_USE = "give the folder of a model that transformers has, or of its language model alone"

_TURNED = ("qwen3_vl_moe", "qwen3_vl_moe_text")
_STACK = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
SHARED_LAYERS = ("zamba2",)
_SHARED = re.compile(r"^(.*layers\.)(\d{1,9})(\.shared_transformer\..+)$")
_HYBRID = re.compile(r"^.*layers\.(\d{1,9})\.linear\.weight$")

ENCODER_DECODERS = ("t5", "mt5")
TRAINED_CONTEXT = 512  # of both stacks; positions are relative, so longer texts are allowed
_USUAL_NAMES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "head_dim": "d_kv",
    "intermediate_size": "d_ff",
}


class TextPart(NamedTuple):
    """The language model's tensors by its own names, and the bytes left out, by kind."""

    tensors: dict[str, TensorEntry]
    left_out: dict[str, int]


def is_wrapper(config: Settings) -> bool:
    """Return whether a config is of a model around a language model."""
    return isinstance(config.get("text_config"), dict) or config.get("model_type") in _SIZES_OUTSIDE


def text_part(where: str, config: Settings, tensors: Entries) -> TextPart:
    """Separate a language model from what is around it. Raises `UserError` where there is none."""
    kept = dict[str, TensorEntry]()
    left_out = Counter[str]()
    num_layers = of_text(config).get("num_hidden_layers")
    is_around = is_wrapper(config)
    is_named = any(map(_INNER.match, tensors))
    is_mistral = is_around and _MISTRAL in tensors
    for name, entry in tensors.items():
        renamed = name
        for pattern, other in _MISTRAL_NAMES if is_mistral else ():
            renamed = pattern.sub(other, renamed)
        named = is_named and not is_mistral
        own = _text_model_name(renamed, is_named=named) if is_around else name
        if own is None or _is_for_multi_token_prediction(own, num_layers):
            kinds = (kind for kind, pattern in _KINDS.items() if pattern.search(name))
            left_out[next(kinds, _OTHER) if own is None else _EXTRA] += entry.num_bytes
        elif own in kept:
            what = f"{where}: {own} of the language model is stored twice"
            raise UserError(f"{what}: save it with save_pretrained")
        else:
            kept[own] = entry
    if is_around and tensors and not any(map(_LAYER.search, kept)):
        found = " and ".join(left_out) or "nothing"
        raise UserError(f"{where}: no tensors of a language model, {found} alone: {_USE}")
    return TextPart(kept, dict(left_out))


def with_text_sizes(where: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with all sizes of the language model in `text_config`.

    Files often leave out the usual ones. Raises `UserError` where the config describes no language
    model, or its model type is not text.
    """
    check_types(where, config)
    inner = config.get("text_config")
    if inner is None or (isinstance(inner, dict) and all(key in inner for key in _SIZES)):
        return config
    kind = config.get("model_type", "unknown")
    rule = "text_config in config.json must describe a language model"
    if not isinstance(inner, dict) or not inner:
        raise UserError(f"{where}: {rule} (model type {kind}), got {inner!r:.80}: {_USE}")
    check_counts(where, config)
    # this import takes seconds, so it waits until it is needed
    from transformers import CONFIG_MAPPING

    try:
        known = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(config)).get_text_config(decoder=True)
    # transformers rejects a config with exceptions of any type
    except Exception as error:
        raise UserError(f"{where}: {rule} (model type {kind}; {reason(error)}): {_USE}") from None
    usual = {key: getattr(known, key, None) for key in _SIZES if key not in inner}
    given = {key: size for key, size in usual.items() if size is not None}
    return {**config, "text_config": {**inner, **given}}


def _text_model_name(name: str, *, is_named: bool) -> str | None:
    """Return a tensor's name in the language model on its own; None for the parts around it."""
    found = _INNER.match(name)
    if found:
        return f"{found[1] or 'model.'}{name[found.end() :]}"
    return name if (_HEAD if is_named else _BARE).match(name) else None


def _is_for_multi_token_prediction(name: str, num_layers: Any) -> bool:
    """Return whether a tensor is of layers that predict further ahead, or beyond the last."""
    found = _LAYER.search(name)
    is_beyond = found is not None and type(num_layers) is int and 0 < num_layers <= int(found[1])
    return bool(_MULTI_TOKEN.search(name)) or is_beyond


@dataclass(frozen=True, slots=True)
class Turned(WordsAlone):
    """Matrices of plain numbers whose rows are stored as columns.

    They are copied row by row when their module runs, as coded weights are expanded: a view would be
    multiplied with several times more slowly on a CPU.
    """

    kind: str  # the plain type, by the header's name
    is_transposed: bool = False  # in the model

    @property
    def name(self) -> str:
        return f"{self.kind}, columns before rows"

    @property
    def dtype(self) -> str:
        return ENCODINGS[self.kind].dtype

    @property
    def align_bytes(self) -> int:
        return ENCODINGS[self.kind].align_bytes

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of the numbers."""
        return ENCODINGS[self.kind].stored_bytes(shape)

    def expand(
        self, stored_B: "Tensor", companions: Tensors, out: "Tensor", expansion: "Expansion"
    ) -> None:
        """See `Coding`."""
        *stack, rows, columns = out.shape
        number = ENCODINGS[self.kind].decode(stored_B, (*stack, columns, rows))
        out.copy_(number.transpose(-1, -2))


def with_turned_stacks(config: Settings, tensors: Entries) -> dict[str, TensorEntry]:
    """Return the tensors, of which stacks of plain numbers have the model's shapes."""
    text = of_text(config)
    hidden = text.get("hidden_size")
    width = text.get("moe_intermediate_size")
    is_known = config.get("model_type") in _TURNED
    if not is_known or type(hidden) is not int or type(width) is not int:
        return dict(tensors)
    wanted = {"gate_up_proj": (2 * width, hidden), "down_proj": (hidden, width)}
    return {name: _turned(name, entry, wanted) for name, entry in tensors.items()}


def _turned(name: str, entry: TensorEntry, wanted: Mapping[str, tuple[int, int]]) -> TensorEntry:
    match = _STACK.search(name)
    if match is None or entry.coded is not None or entry.dtype not in ENCODINGS:
        return entry
    rows, columns = wanted[match[1]]
    if rows == columns or entry.shape[1:] != (columns, rows):
        return entry
    shape = (entry.shape[0], rows, columns)
    return entry._replace(shape=shape, coded=Coded(Turned(entry.dtype)))


def with_shared_layers(config: Settings, tensors: Entries) -> dict[str, TensorEntry]:
    """Return the tensors, and those that layers share under the names of each of them."""
    num_blocks = config.get("num_mem_blocks", 1)
    if config.get("model_type") not in SHARED_LAYERS or type(num_blocks) is not int:
        return dict(tensors)
    layers = sorted({int(match[1]) for match in map(_HYBRID.match, tensors) if match is not None})
    turn = {layer: index % max(1, num_blocks) for index, layer in enumerate(layers)}
    sharing = defaultdict[int, list[int]](list)
    for layer in layers:
        sharing[turn[layer]].append(layer)
    found = dict(tensors)
    for name, entry in tensors.items():
        match = _SHARED.match(name)
        if match is None:
            continue
        for layer in sharing.get(turn.get(int(match[2]), -1), ()):
            found.setdefault(f"{match[1]}{layer}{match[3]}", entry)
    return found


def has_encoder(config: dict[str, Any]) -> bool:
    """Return whether a config is that of a T5 whose encoder reads the prompt."""
    is_one = config.get("model_type") in ENCODER_DECODERS
    return is_one and config.get("is_encoder_decoder") is not False


def decoder_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the decoder's sizes under their usual names."""
    if not has_encoder(config):
        return config
    named = {usual: config.get(own) for usual, own in _USUAL_NAMES.items()}
    num_layers = config.get("num_layers")
    named |= {
        "num_hidden_layers": config.get("num_decoder_layers") or num_layers,
        "num_encoder_layers": num_layers,
    }
    return {**config, **named}
