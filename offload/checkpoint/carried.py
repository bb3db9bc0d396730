"""MTP layers that lie in a target's files, as a checkpoint of its own: a decoder of those layers.

Such a layer takes the embedding of the next token and the target's hidden state of this one, and
guesses the token after next. Families name its parts in a few ways, which `_LAYOUTS` lists; the
names are those of published files (sources: transformers 5.24 `conversion_mapping.py`; vLLM's
`*_mtp.py`). The embedding table and the head are the target's.

Invariant: a tensor of the draft has the bytes of the file; nothing is renamed that is not listed.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from offload.checkpoint.checkpoint import Carried, Checkpoint
from offload.checkpoint.small_files import is_wrapper, of_text
from offload.checkpoint.tensors import TensorEntry, with_codings
from offload.errors import UserError, require

# of the draft: what mixes an embedding with a hidden state
MIXER = "model.mixer."
_MIXER_PARTS = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "fc": "eh_proj",
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "emb_norm": "enorm",
    "linear_proj": "eh_proj",
}
_NORMS = frozenset({"shared_head.norm", "final_layernorm"})
# repeated from the target
_REPEATED = re.compile(r"^(?:shared_head\.head|embed_tokens)\.")
_EXPERTS = re.compile(r"^mlp\.experts\.|^block_sparse_moe\.|^moe\.")


class _Layout(NamedTuple):
    """Where a family has its MTP layers: `depth` and `part` are groups of the pattern."""

    name: re.Pattern[str]
    is_fed_normed: bool
    is_hidden_first: bool = False


# The first that any tensor matches is that of the file. Fed normed: the layout of Qwen; bare:
# DeepSeek's, whose norm is the head's (vLLM `deepseek_mtp.py`, `qwen3_next_mtp.py`).
_LAYOUTS = (
    _Layout(re.compile(r"^model\.mtp_layers\.(?P<depth>\d+)\.(?P<part>.+)$"), False, True),
    _Layout(re.compile(r"^model\.mtp\.layers\.(?P<depth>\d+)\.(?P<part>.+)$"), False),
    _Layout(
        re.compile(
            r"^(?:model\.)?mtp_(?P<kind>block|emb_norm|hidden_norm|linear_proj)\.(?P<depth>\d+)\.(?P<part>.+)$"
        ),
        False,
    ),
    _Layout(re.compile(r"^mtp\.(?:layers\.(?P<depth>\d+)\.)?(?P<part>.+)$"), True),
    _Layout(re.compile(r"^model\.layers\.(?P<layer>\d+)\.(?P<part>.+)$"), False),
)
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")
_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")


def has_mtp(target: Checkpoint) -> bool:
    """Return True if the files have MTP layers in a form that is read."""
    try:
        mtp_checkpoint(target, "")
    except UserError:
        return False
    return True


def mtp_checkpoint(target: Checkpoint, value: str = "") -> Checkpoint:
    """Return the target's MTP layers as a decoder. Raises `UserError` where none are read.

    Of several depths the first serves all: it is applied again for deeper guesses.
    """
    require(not value, "`draft` mtp has no value", repr(value), "give mtp alone")
    where = target.name
    text = of_text(target.config)
    num_layers = text.get("num_hidden_layers", 0)
    stated = next((text[name] for name in _COUNTS if isinstance(text.get(name), int)), 0)
    extra = with_codings(where, target.config, dict(target.extra))
    tensors, layout = _by_own_names(extra, num_layers)
    if not tensors:
        rule = f"{where}: `draft` mtp needs MTP layers in the files"
        got = f"config.json states {stated} and no tensor is of them" if stated else "none"
        raise UserError(f"{rule}, got {got}: take lookup, or name a small draft")
    missing = [
        name for name in ("enorm", "hnorm", "eh_proj") if f"{MIXER}{name}.weight" not in tensors
    ]
    missing += [] if "model.norm.weight" in tensors else ["norm"]
    if missing or not any(name.startswith("model.layers.0.") for name in tensors):
        names = ", ".join(missing) or "its block"
        known = f"{where}: its MTP layer is in a form that is not read (no {names})"
        raise UserError(f"{known}: take lookup, or name a small draft")
    shared = shared_with(target)
    config = _config(target.config, tensors)
    carried = Carried(
        frozenset(shared),
        layout.is_fed_normed,
        layout.is_hidden_first,
        target_width=text.get("hidden_size", 0),
    )
    return replace(
        target,
        config=config,
        tensors={**shared, **tensors},
        extra={},
        left_out={},
        carried=carried,
        layers=(),
    )


def shared_with(target: Checkpoint) -> dict[str, TensorEntry]:
    """Return the target's table and head, which such a draft has as well."""
    return {
        name: entry
        for name, entry in target.tensors.items()
        if name.endswith("embed_tokens.weight") or name.startswith("lm_head.")
    }


def _by_own_names(
    extra: Mapping[str, TensorEntry], num_layers: int
) -> tuple[dict[str, TensorEntry], _Layout]:
    """Return the first depth's tensors by the names of a decoder, and the layout of the file."""
    for layout in _LAYOUTS:
        named = dict[str, TensorEntry]()
        for name, entry in extra.items():
            match = layout.name.match(name)
            renamed = match and _own_name(match.groupdict(), num_layers)
            if renamed:
                named[renamed] = entry
        if named:
            return named, layout
    return {}, _LAYOUTS[-1]


def _own_name(groups: Mapping[str, str | None], num_layers: int) -> str | None:
    """Return the draft's name of a tensor of the first depth; None for others."""
    part = groups["part"] or ""
    layer = groups.get("layer")
    depth = int(layer) - num_layers if layer is not None else int(groups.get("depth") or 0)
    if depth or _REPEATED.match(part):
        return None
    kind = groups.get("kind")
    if kind is not None and kind != "block":
        part = f"{kind.replace('hidden_norm', 'hnorm')}.{part}"
    module, _, leaf = part.rpartition(".")
    if module in _MIXER_PARTS:
        return f"{MIXER}{_MIXER_PARTS[module]}.{leaf}"
    # a block may have a norm of that name
    is_last = module in _NORMS or (module == "norm" and groups.get("depth", "") is None)
    return f"model.norm.{leaf}" if is_last else f"model.layers.0.{part}"


def _config(config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Return the config of a decoder of one such layer: of the kind that its tensors show."""
    text = dict(of_text(dict(config)))
    inner = [name.removeprefix("model.layers.0.") for name in tensors]
    is_mixture = any(map(_EXPERTS.match, inner))
    text |= {"num_hidden_layers": 1, **{name: 0 for name in _COUNTS if name in text}}
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and kinds:
        last_full = "full_attention" if "full_attention" in kinds else kinds[-1]
        text["layer_types"] = [last_full]
    if isinstance(text.get("mlp_layer_types"), list):
        text["mlp_layer_types"] = ["sparse" if is_mixture else "dense"]
    text.pop("layers_block_type", None)
    if "first_k_dense_replace" in text:
        text["first_k_dense_replace"] = 0 if is_mixture else 1
    if "mlp_only_layers" in text or "decoder_sparse_step" in text:
        text |= {"mlp_only_layers": [] if is_mixture else [0], "decoder_sparse_step": 1}
    if "full_attention_interval" in text:
        text["full_attention_interval"] = 1
    if not is_wrapper(dict(config)):
        return text
    return {**config, "text_config": text}
