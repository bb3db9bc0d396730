"""Draft heads with files of their own, as decoders beside a target: EAGLE-3's; `blocks` has others.

Such a head starts from hidden states inside the target, and uses the target's embedding table and
head where it has none. Its names are those of published files (sources: SpecForge, vLLM's
`llama_eagle3.py`, speculators 0.9, transformers 5.24 `muse_glimmer_assistant`); its config tells
which states it reads. Invariant: a head that does not fit the target is refused from headers alone.

Shape letters, in this file only: W words that a head scores.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from offload.checkpoint.carried import MIXER, shared_with
from offload.checkpoint.checkpoint import Carried, Checkpoint, compute_dtype_name
from offload.checkpoint.sizes import config_sizes
from offload.checkpoint.tensors import TensorEntry
from offload.encoding.base import Settings
from offload.errors import UserError

EAGLE3 = "eagle3"
DFLASH = "dflash"
ASSISTANT = "assistant"
OTHER_HEAD = "take a head that was made for this target, or lookup"
# what tokens before add to a block's scores, see `blocks`
CORRECTIONS = f"{MIXER}corrections."
_CORRECTING = re.compile(r"^(?:markov_head|candidate_selector|refiner_head)\.(\w+(?:\.\w+)?)$")
_IN_LAYER = re.compile(r"^(?:model\.)?(?:midlayer|layers\.(?P<layer>\d+))\.(?P<inner>.+)$")
_AROUND = {
    "fc": f"{MIXER}fc",
    "encoder.fc": f"{MIXER}fc",
    "hidden_norm": f"{MIXER}hidden_norm",
    "encoder.output_norm_enc": f"{MIXER}hidden_norm",
    "input_norm": f"{MIXER}input_norm",
    **{f"fc_norm.{turn}": f"{MIXER}fc_norm.{turn}" for turn in range(3)},
    "norm": "model.norm",
    "embed_tokens": "model.embed_tokens",
    "lm_head": "lm_head",
}
_STATES = "eagle_aux_hidden_state_layer_ids"
_WORDS = ("d2t", "t2d")
# whole numbers, little-endian, by numpy's names
WORD_TYPES = {"I64": "<i8", "I32": "<i4"}
# how sure a block is to be right: the exponent that is learnt here says so of any draft
_PASSED_OVER = re.compile(r"rotary_emb\.inv_freq$|^verifier_|^confidence_head\.")
# speculators' names of kinds
_SPECULATORS = {EAGLE3: EAGLE3, **dict.fromkeys((DFLASH, "dspark", "dflash2", "xpress"), DFLASH)}
OF_TYPE = {
    "muse_glimmer_assistant": DFLASH,
    "gemma4_assistant": ASSISTANT,
    "gemma4_unified_assistant": ASSISTANT,
}
_LAYER_KINDS = ("llama", "qwen2", "qwen3")
# forms that only a config shows and that cannot be read
_NOT_READ = {"medusa_num_heads": "Medusa", "hydra_num_heads": "Hydra"}
_LEFT_OUT = ("architectures", "auto_map", "quantization_config", "layer_types", "torch_dtype")


def head_kind(config: Settings) -> str | None:
    """Return the kind of head that a config describes; None for any other model."""
    named = config.get("architectures")
    architectures = " ".join(map(str, named)) if isinstance(named, list) else ""
    kind = config.get("speculators_model_type")
    if kind is not None:
        return _SPECULATORS.get(str(kind))
    if "dflash_config" in config or re.search("dflash|dspark|xpress", architectures, re.IGNORECASE):
        return DFLASH
    kind = OF_TYPE.get(str(config.get("model_type")))
    if kind is not None:
        return kind
    return EAGLE3 if "draft_vocab_size" in config or "Eagle3" in architectures else None


def refuse_other_heads(draft: Checkpoint) -> None:
    """Raise `UserError` for a head in a form that cannot be read, naming the form."""
    config = draft.config
    form = next((form for key, form in _NOT_READ.items() if key in config), None)
    kind = config.get("speculators_model_type")
    if kind is not None and head_kind(config) is None:
        form = f"speculators' {kind}"
    mixer = draft.tensors.get("fc.weight")
    if form is None and head_kind(config) is None and mixer is not None:
        form = "EAGLE-1, EAGLE-2 or HASS"
    if form is not None:
        requirement = f"{draft.name}: a head of the {form} form is not read"
        raise UserError(f"{requirement}: take an EAGLE-3 or DFlash head of this target, or lookup")


def eagle3_checkpoint(target: Checkpoint, draft: Checkpoint) -> Checkpoint:
    """Return an EAGLE-3 head as a decoder of one layer. Raises `UserError`."""
    check_kind(draft, EAGLE3)
    inner = draft.config.get("transformer_layer_config")
    config = inner if isinstance(inner, dict) else draft.config
    depth = config_sizes(target)["num_hidden_layers"]
    nested = draft.config.get("eagle_config")
    usual = [2, depth // 2, depth - 3]
    # SpecForge numbers the states by the layer that they leave, others by the one they enter
    layers = draft.config.get(_STATES)
    if isinstance(nested, dict) and nested.get(_STATES):
        layers = [number + 1 for number in layer_numbers(draft, nested[_STATES])]
    carried = Carried(
        frozenset(),
        is_fed_normed=draft.config.get("norm_output") is True,
        is_residual_normed=draft.config.get("norm_before_residual") is True,
        tapped=tapped_layers(draft, depth, layers or usual),
        has_normed=False,
    )
    return beside(target, draft, carried, {**config, "num_hidden_layers": 1})


def check_kind(draft: Checkpoint, wanted: str) -> None:
    """Raise `UserError` for a head of another kind than the user named."""
    refuse_other_heads(draft)
    kind = head_kind(draft.config)
    if kind is not None and kind != wanted:
        raise UserError(
            f"{draft.name}: `draft` {wanted} names such a head, got {kind}: name it {kind}"
        )


def layer_numbers(draft: Checkpoint, layers: Any) -> list[int]:
    """Return layer numbers. Raises `UserError` unless they are whole numbers."""
    if not isinstance(layers, list) or not all(type(number) is int for number in layers):
        requirement = f"{draft.name}: config.json must number the target's layers that it reads"
        raise UserError(f"{requirement}, got {layers!r:.80}: {OTHER_HEAD}")
    return layers


def tapped_layers(draft: Checkpoint, depth: int, layers: Any) -> tuple[int, ...]:
    """Return the target's layer numbers, rising. Raises `UserError` for any others."""
    numbers = layer_numbers(draft, layers)
    if numbers != sorted(set(numbers)) or any(not 0 <= number < depth for number in numbers):
        requirement = (
            f"{draft.name}: the layers that it reads must rise and be the target's, of {depth}"
        )
        raise UserError(f"{requirement}, got {numbers!r:.80}: {OTHER_HEAD}")
    return tuple(numbers)


def decoder_name(name: str) -> str | None:
    """Return the decoder's name of a tensor; None for a tensor that no such head has."""
    match = _IN_LAYER.match(name)
    if match is None:
        name = name.removeprefix("model.")
        module, _, leaf = name.rpartition(".")
        if module in _AROUND:
            return f"{_AROUND[module]}.{leaf}"
        part = _CORRECTING.match(name)
        return f"{CORRECTIONS}{part[1]}" if part else None
    if match["inner"].startswith("hidden_norm."):
        return f"{MIXER}{match['inner']}"
    return f"model.layers.{match['layer'] or 0}.{match['inner']}"


def beside(
    target: Checkpoint,
    draft: Checkpoint,
    carried: Carried,
    config: dict[str, Any],
    parts: Sequence[str] = (),
) -> Checkpoint:
    """Return a head that uses the target's table and head where it has none of its own.

    `parts` are tensors that such a head has beside the usual ones. Raises `UserError`.
    """
    files = {name: entry for name, entry in draft.tensors.items() if not _PASSED_OVER.search(name)}
    named = {name: decoder_name(name) for name in files if name not in _WORDS}
    tensors = {renamed: files[name] for name, renamed in named.items() if renamed is not None}
    needed = ["fc.weight", "norm.weight", "layers.0.self_attn.q_proj.weight", *parts]
    unread = [f"no {name}" for name in needed if decoder_name(name) not in tensors]
    unread += [name for name, renamed in named.items() if renamed is None] + [*draft.extra]
    kind = config.get("model_type")
    unread += [] if kind in _LAYER_KINDS else [f"layers of type {kind}"]
    if unread:
        requirement = f"{draft.name}: a head in a form that is not read"
        raise UserError(f"{requirement} ({unread[0]}): {OTHER_HEAD}")
    sizes = config_sizes(target)
    mixer = tensors[f"{MIXER}fc.weight"]
    shared = {name: entry for name, entry in shared_with(target).items() if name not in tensors}
    ids = _check_fit(target, draft, carried, {**files, **tensors})
    is_tied = "lm_head.weight" not in tensors and "lm_head.weight" not in shared
    own_config = {key: value for key, value in config.items() if key not in _LEFT_OUT}
    own_config |= {
        "vocab_size": sizes["vocab_size"],
        "hidden_size": mixer.shape[0],
        "tie_word_embeddings": is_tied,
    }
    if isinstance(kinds := config.get("layer_types"), list) and carried.block:
        own_config |= {"layer_types": kinds, "use_sliding_window": True}
    return joined(target, draft, own_config, tensors, carried._replace(ids=ids), shared)


def joined(
    target: Checkpoint,
    draft: Checkpoint,
    config: dict[str, Any],
    added: Mapping[str, TensorEntry],
    carried: Carried,
    shared: Mapping[str, TensorEntry],
) -> Checkpoint:
    """Return a decoder of its own tensors and the target's, whose files come after its own."""
    num_shards = len(draft.shards)
    theirs = {name: _behind(entry, num_shards) for name, entry in shared.items()}
    return replace(
        draft,
        config={**config, "dtype": compute_dtype_name(target, "auto")},
        tensors={**theirs, **added},
        shards=(*draft.shards, *target.shards),
        stamps=(*draft.stamps, *target.stamps),
        tokenizer=target.tokenizer_path,
        extra={},
        left_out={},
        layers=(),
        carried=carried._replace(
            shared=frozenset(theirs), target_width=config_sizes(target)["hidden_size"]
        ),
    )


def _check_fit(
    target: Checkpoint, draft: Checkpoint, carried: Carried, tensors: Mapping[str, TensorEntry]
) -> TensorEntry | None:
    """Return which words a head scores if not all. Raises `UserError` for a misfit."""
    sizes = config_sizes(target)
    width = sizes["hidden_size"]
    words = sizes["vocab_size"]
    mixer = tensors[f"{MIXER}fc.weight"]
    num_read = carried.num_taps * width
    complaint = f"{draft.name}: a head of another target"
    if len(mixer.shape) != 2 or mixer.shape[1] != num_read:
        states = f"{carried.num_taps} states of {target.name} have {num_read} numbers"
        raise UserError(f"{complaint} ({states}, fc takes {mixer.shape[-1:]}): {OTHER_HEAD}")
    is_wide = "model.embed_tokens.weight" in tensors and "lm_head.weight" in tensors
    if mixer.shape[0] != width and not is_wide:
        raise UserError(
            f"{complaint} (it is {mixer.shape[0]} wide, its table {width}): {OTHER_HEAD}"
        )
    known = tensors["t2d"].shape[0] if "t2d" in tensors else draft.config.get("vocab_size", words)
    if known != words:
        raise UserError(f"{complaint} (of {known} words, not {words}): {OTHER_HEAD}")
    if carried.block is not None and carried.block.mask >= words:
        raise UserError(
            f"{complaint} (its mask is word {carried.block.mask} of {words}): {OTHER_HEAD}"
        )
    head = tensors.get("lm_head.weight")
    ids = tensors.get("d2t")
    if head is None or (ids is None and head.shape[:1] == (words,)):
        return None
    requirement = (
        f"{draft.name}: a head of {head.shape[0]} words has d2t, which says of each what it adds"
    )
    if ids is None or ids.shape != head.shape[:1] or ids.dtype not in WORD_TYPES:
        got = "none" if ids is None else f"{ids.dtype} {list(ids.shape)}"
        raise UserError(f"{requirement}, got {got}: take a head that is whole")
    return ids


def _behind(entry: TensorEntry, num_shards: int) -> TensorEntry:
    """Return an entry whose files come after this many others."""
    coded = entry.coded
    if coded is not None:
        companions = tuple(
            (name, _behind(companion, num_shards)) for name, companion in coded.companions
        )
        coded = coded._replace(companions=companions)
    return entry._replace(shard=entry.shard + num_shards, coded=coded)
