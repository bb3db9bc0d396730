"""MTP layers in a target's files, presented as a draft checkpoint: a decoder of those layers.

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
from offload.families.types import UNREAD_MTP

# draft tensors that mix an embedding with a hidden state
MIXER = "model.mixer."
DEEPER = f"{MIXER}deeper."
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
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
    "hidden_norm": "hnorm",
}
_NORMS = frozenset({"shared_head.norm", "final_layernorm"})
_BLOCK_PARTS = {"pre_mlp_layernorm": "post_attention_layernorm"}
_TABLES = ("embed_tokens.weight", "model.embeddings.weight", "backbone.embeddings.weight")
# tensors that files repeat from the target
_REPEATED = re.compile(r"^(?:shared_head\.head|embed_tokens)\.")
_EXPERTS = re.compile(r"^mlp\.experts\.|^block_sparse_moe\.|^moe\.")


class _Layout(NamedTuple):
    """Where a family has its MTP layers: `depth` and `part` are groups of the pattern."""

    name: re.Pattern[str]
    is_hidden_first: bool = False
    has_one_mixer: bool = False  # one mixer and one norm for all depths
    has_targets_norm: bool = False  # the norm behind a depth is the target's last one
    kind: str | None = None  # the layers' kind of attention, by `layer_types`


# The first that any tensor matches is that of the file. MiMo-V2's layers see a window (vLLM
# `mimo_v2_mtp.py`). Ernie's start behind the target's last norm and end in it (FastDeploy at
# 0667220, `ernie4_5_mtp.py`); vLLM at 028aedf leaves out the second.
_LAYOUTS = (
    _Layout(re.compile(r"^model\.mtp_layers\.(?P<depth>\d{1,6})\.(?P<part>.+)$"), True),
    _Layout(
        re.compile(r"^model\.mtp\.layers\.(?P<depth>\d{1,6})\.(?P<part>.+)$"),
        kind="sliding_attention",
    ),
    _Layout(
        re.compile(
            r"^(?:model\.)?mtp_(?P<kind>block|emb_norm|hidden_norm|linear_proj)\.(?P<depth>\d{1,6})\.(?P<part>.+)$"
        ),
        has_targets_norm=True,
    ),
    _Layout(
        re.compile(r"^mtp\.(?:layers\.(?P<depth>\d{1,6})\.)?(?P<part>.+)$"), has_one_mixer=True
    ),
    _Layout(re.compile(r"^model\.layers\.(?P<layer>\d{1,6})\.(?P<part>.+)$")),
)
# What is fed on is normed, but where the norm is the head's: DeepSeek's form (vLLM
# `deepseek_mtp.py` beside `qwen3_next_mtp.py`, `mimo_mtp.py`, `hy_v3_mtp.py`).
_NORM_OF_HEAD = ".shared_head.norm."
# of Nemotron: a depth is several layers of one mixer each (vLLM `nemotron_h_mtp.py`)
_SUBLAYER = re.compile(r"^mtp\.layers\.\d{1,6}\.mixer\.")
_KIND_OF_SUBLAYER = {"q_proj": "full_attention", "experts": "moe", "up_proj": "mlp"}
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")
_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")


def has_mtp(target: Checkpoint) -> bool:
    """Return True if the files have MTP layers in a form that this program reads."""
    try:
        mtp_checkpoint(target, "")
    except UserError:
        return False
    return True


def mtp_checkpoint(target: Checkpoint, value: str = "") -> Checkpoint:
    """Return the target's MTP layers as a decoder. Raises `UserError` where none are read.

    It has a layer for each depth; the last one is applied again for deeper guesses.
    """
    require(not value, "`draft` mtp has no value", repr(value), "give mtp alone")
    where = target.name
    text = of_text(target.config)
    num_layers = text.get("num_hidden_layers", 0)
    stated = next((text[name] for name in _COUNTS if isinstance(text.get(name), int)), 0)
    extra = with_codings(where, target.config, dict(target.extra))
    tensors, layout = _by_own_names(extra, num_layers)
    why = UNREAD_MTP.get(str(text.get("model_type")).removesuffix("_text"))
    if why or not tensors:
        requirement = f"{where}: `draft` mtp needs MTP layers in the files"
        got = f"config.json states {stated} and no tensor is of them" if stated else "none"
        if extra:
            got = f"layers in a form that is not read ({why or min(extra)})"
        raise UserError(f"{requirement}, got {got}: take lookup, or name a small draft")
    shared = shared_with(target)
    if str(text.get("model_type")).startswith("nemotron_h") and any(map(_SUBLAYER.match, extra)):
        num_depths = 1
        tensors, config = _of_sublayers(where, target.config, tensors)
    else:
        norm = target.tensors.get("model.norm.weight")
        if layout.has_targets_norm and norm is not None:
            depths = {_depth_of(name) for name in tensors}
            tensors |= {around_layer(depth, "norm.weight"): norm for depth in depths}
            # of the first layer it is the target's itself
            shared |= {name: norm for name in tensors if name == "model.norm.weight"}
        if layout.has_one_mixer:
            tensors = _with_mixer_of_each(tensors)
        num_depths = _check_depths(where, tensors, stated)
        config = _config(target.config, tensors, num_depths, layout.kind)
    carried = Carried(
        frozenset(shared),
        not any(_NORM_OF_HEAD in name for name in extra),
        layout.is_hidden_first,
        num_depths=num_depths,
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


def _check_depths(where: str, tensors: Mapping[str, TensorEntry], stated: int) -> int:
    """Return the number of depths. Raises `UserError` for a depth that lacks tensors."""
    layers = [int(match[1]) for match in map(_LAYER.match, tensors) if match is not None]
    num_depths = max(1 + max(layers, default=0), stated)
    for depth in range(num_depths):
        parts = [f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "norm")]
        missing = [part for part in parts if around_layer(depth, part) not in tensors]
        missing += [] if depth in layers else ["its block."]
        if missing:
            names = ", ".join(part.rpartition(".")[0] for part in missing)
            known = f"{where}: its MTP layer is in a form that is not read (no {names})"
            if depth:
                known = f"{where}: MTP layer {depth} of {num_depths} is not whole (no {names})"
            raise UserError(f"{known}: take lookup, or name a small draft")
    return num_depths


def _with_mixer_of_each(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors of layers that have one mixer and one norm, as if each had its own."""
    layers = {match[1] for match in map(_LAYER.match, tensors) if match is not None}
    around = {name: entry for name, entry in tensors.items() if not _LAYER.match(name)}
    repeated = {
        around_layer(depth, name.removeprefix(MIXER).removeprefix("model.")): entry
        for depth in range(1, len(layers))
        for name, entry in around.items()
    }
    return {**tensors, **repeated}


def _of_sublayers(
    where: str, config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]
) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
    """Return Nemotron's layers of one mixer each, which make one depth, and a config of these."""
    last = re.compile(rf"^{re.escape(DEEPER)}\d+\.norm\.")
    named = {last.sub("model.norm.", name): entry for name, entry in tensors.items()}
    kind_of = dict[int, str]()
    for name in named:
        match = _LAYER.match(name)
        kinds = [kind for part, kind in _KIND_OF_SUBLAYER.items() if f".mixer.{part}." in name]
        if match is not None and kinds:
            kind_of.setdefault(int(match[1]), kinds[0])
    first = {name: entry for name, entry in named.items() if _depth_of(name) == 0}
    _check_depths(where, first, 1)
    others = [name for name in named if name.startswith(DEEPER)]
    if others or sorted(kind_of) != [*range(len(kind_of))]:
        known = f"{where}: its MTP layers are in a form that is not read (several depths of mixers)"
        raise UserError(f"{known}: take lookup, or name a small draft")
    whole = dict(config)
    text = {name: value for name, value in of_text(whole).items() if "pattern" not in name}
    text |= {"layers_block_type": [kind_of[layer] for layer in sorted(kind_of)]}
    text |= {"num_hidden_layers": len(kind_of), **{name: 0 for name in _COUNTS if name in text}}
    tensors = {name.replace("model.norm.", "model.norm_f."): named[name] for name in named}
    return tensors, {**whole, "text_config": text} if is_wrapper(whole) else text


def _depth_of(name: str) -> int:
    match = _LAYER.match(name)
    return 0 if match is None else int(match[1])


def around_layer(depth: int, part: str) -> str:
    """Return the draft's name of a part before or after the layer of a depth."""
    if depth:
        return f"{DEEPER}{depth - 1}.{part}"
    return f"model.{part}" if part.startswith("norm.") else f"{MIXER}{part}"


def shared_with(target: Checkpoint) -> dict[str, TensorEntry]:
    """Return the target's embedding table and head, which the draft uses as well."""
    return {
        name: entry
        for name, entry in target.tensors.items()
        if name.endswith(_TABLES) or name.startswith("lm_head.")
    }


def _by_own_names(
    extra: Mapping[str, TensorEntry], num_layers: int
) -> tuple[dict[str, TensorEntry], _Layout]:
    """Return the layers' tensors by a decoder's names, and the layout of the file."""
    for layout in _LAYOUTS:
        named = dict[str, TensorEntry]()
        for name, entry in extra.items():
            match = layout.name.match(name)
            renamed = match and _own_name(match.groupdict(), num_layers, layout)
            if renamed:
                named[renamed] = entry
        if named:
            return named, layout
    return {}, _LAYOUTS[-1]


def _own_name(groups: Mapping[str, str | None], num_layers: int, layout: _Layout) -> str | None:
    """Return the draft's name of a tensor; None where the draft has no such tensor."""
    part = groups["part"] or ""
    layer = groups.get("layer")
    depth = int(layer) - num_layers if layer is not None else int(groups.get("depth") or 0)
    if depth < 0 or _REPEATED.match(part):
        return None
    kind = groups.get("kind")
    if kind is not None and kind != "block":
        part = f"{kind}.{part}"
    module, _, leaf = part.rpartition(".")
    if module in _MIXER_PARTS:
        return around_layer(depth, f"{_MIXER_PARTS[module]}.{leaf}")
    # a block may have a norm of that name
    if module in _NORMS or (module == "norm" and groups.get("depth", "") is None):
        return around_layer(depth, f"norm.{leaf}")
    if module in _BLOCK_PARTS:
        part = f"{_BLOCK_PARTS[module]}.{leaf}"
    return f"model.layers.{depth}.{part}"


def _config(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorEntry],
    num_depths: int,
    kind: str | None,
) -> dict[str, Any]:
    """Return a decoder config for the kind of layer that the tensors show."""
    text = dict(of_text(dict(config)))
    num_layers = text.get("num_hidden_layers", 0)
    inner = [_LAYER.sub("", name) for name in tensors]
    is_mixture = any(map(_EXPERTS.match, inner))
    text |= {"num_hidden_layers": num_depths, **{name: 0 for name in _COUNTS if name in text}}
    kinds = text.get("layer_types")
    if kind is not None:
        text["layer_types"] = [kind] * num_depths
    elif isinstance(kinds, list) and kinds:
        last_full = "full_attention" if "full_attention" in kinds else kinds[-1]
        # some files list settings of MTP layers after those of all others
        behind = text.get("mtp_layer_types") or kinds[num_layers : num_layers + num_depths]
        text["layer_types"] = behind if len(behind) == num_depths else [last_full] * num_depths
    if kind is not None or isinstance(text.get("mlp_layer_types"), list):
        text["mlp_layer_types"] = ["sparse" if is_mixture else "dense"] * num_depths
    text.pop("layers_block_type", None)
    first_sparse = 0 if is_mixture else num_depths
    by_number = {
        "first_k_dense_replace": first_sparse,
        "moe_layer_start_index": first_sparse,
        "moe_layer_end_index": num_depths - 1,
        "moe_layer_interval": 1,
        "full_attention_interval": 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [*range(first_sparse)],
    }
    if "decoder_sparse_step" in text:
        text.setdefault("mlp_only_layers", [])
    text |= {name: value for name, value in by_number.items() if name in text}
    if not is_wrapper(dict(config)):
        return text
    return {**config, "text_config": text}
