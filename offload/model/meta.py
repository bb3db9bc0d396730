"""Builds models without storage, and refuses those on which a token tree cannot be verified.

A tree needs a decoder with layers in `layers[i]`, which see positions through rotary embeddings, or
through recurrent states, and which keep keys and values, or a state that can be computed again
along an accepted path. Invariant: parameters have the names of a language model on its own, also if
the family is built here (`headed.py`), and none of the family's special rules is lost.
"""

import copy
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from offload.checkpoint.checkpoint import Checkpoint, unsupported
from offload.checkpoint.small_files import check_counts
from offload.errors import UserError, reason
from offload.families.types import (
    BUILT_AS,
    ENCODER_DECODERS,
    LIGHTNING,
    MISCOMPUTED,
    NEEDED_OF_CONFIGS,
    SHARED_LAYERS,
    WIDENED_GATES,
)
from offload.model import attention
from offload.model.experts import prepare_experts
from offload.model.kv_cache import KVCache
from offload.model.layer_stacks import cut_stack, layer_stacks
from offload.model.library import (
    ALLOWED_LAYER_TYPES,
    CACHE,
    CONFIG_MAPPING,
    EXPERTS,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    STATE_CACHE,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    CausalLMOutputWithPast,
    PreTrainedModel,
    build_without_storage,
    require_rows,
    version_error,
)
from offload.model.linear import replace_linears
from offload.model.mixers.indexed import follow_indices, selection_of
from offload.model.mixers.table import new_cache, replace_mixers
from offload.model.parts import BatchPart, causal, lay
from offload.model.path_attention import path_rows

# models around a language model, for any input
_WRITING = (AutoModelForImageTextToText, AutoModelForMultimodalLM)
_OUTPUT_FLAGS = {"return_dict": True, "output_hidden_states": False, "output_attentions": False}
# A checkpoint may name a hub kernel there, whose code transformers would fetch and run.
_NAMED_CODE = ("_attn_implementation", "_experts_implementation")
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "attention")
# `recurrent` is RecurrentGemma's name in transformers 5.17
_RECURRENT = ("linear_attention", "mamba", "conv", "hybrid", "recurrent")
_INDEXED = ("indexed_attention", "minimax_m3_sparse")
# names in older transformers, and in files that they wrote
_INDEXED_BEFORE = ("deepseek_sparse_attention", "qwen_sparse_attention")
_KIND_LISTS = ("layer_types", "layers_block_type")
_BY_ROW = ("mlp", "moe")  # layers that mix no rows


def build_meta_model(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """Return the checkpoint's model: parameters on the meta device, computed buffers real.

    Raises `UserError` for a model with code of its own, and one that trees cannot be verified on.
    """
    check_counts(checkpoint.name, checkpoint.config)
    _refuse_unknown_kinds(checkpoint)
    with _refusing(checkpoint):
        whole = _config(checkpoint.config)
        config = whole.get_text_config(decoder=True)
    if whole.is_encoder_decoder:
        return _encoder_decoder(checkpoint, whole, dtype)
    if config is not whole:
        _prepare_text_config(checkpoint, whole, config)
    _refuse_config(checkpoint, config)
    with _refusing(checkpoint, _missing(config)):
        is_known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        build = AutoModelForCausalLM.from_config if is_known else headed_model
        meta_model = _instantiate(build, config, dtype)
        decoder = meta_model.get_decoder()
    _replace_layers(checkpoint, meta_model, decoder, config)
    # a model that is no decoder is refused as such, not for its forward's name of a cache
    require_rows(decoder)
    tied = [name for pair in meta_model.all_tied_weights_keys.items() for name in pair]
    if config.model_type not in SHARED_LAYERS and any(".layers." in f".{name}" for name in tied):
        raise unsupported(checkpoint, "layers that share weights")
    with _refusing(checkpoint, _missing(config)):
        try_out(meta_model, dtype)
    attention.scale_by_position(decoder.layers)
    return meta_model


def _prepare_text_config(checkpoint: Checkpoint, whole: Any, config: Any) -> None:
    """Complete the config of a language model inside a larger model. Raises `UserError` for none."""
    mappings = [
        classes._model_mapping for classes in _WRITING if type(whole) in classes._model_mapping
    ]
    if not mappings:
        raise unsupported(checkpoint, "it does not write text")
    _ = mappings[0][type(whole)]  # this loads the module of its text model
    if hasattr(whole, "tie_word_embeddings"):  # some families only have it inside another model
        config.tie_word_embeddings = whole.tie_word_embeddings


def _refuse_config(checkpoint: Checkpoint, config: Any) -> None:
    """Raise `UserError` for models that the config shows to be unsupported."""
    if config.model_type in MISCOMPUTED:
        raise unsupported(checkpoint, MISCOMPUTED[config.model_type])
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise unsupported(checkpoint, "attention that looks ahead")
    if getattr(config, "ple_layer_ids", None):
        raise unsupported(checkpoint, "tables of n-grams in its layers")
    known = {*_ATTENTION, *_RECURRENT, *_INDEXED, *_BY_ROW}
    _refuse_kinds(checkpoint, set(_kinds_of(config)) - known)


def _replace_layers(
    checkpoint: Checkpoint, meta_model: PreTrainedModel, decoder: Any, config: Any
) -> None:
    """Replace mixers and indexers by modules that follow trees. Raises `UserError` without layers."""
    blocks = getattr(decoder, "layers", None)
    layers = blocks if isinstance(blocks, nn.ModuleList) else nn.ModuleList()
    with _refusing(checkpoint, _missing(config)):
        is_following = replace_mixers(layers, config)
    if is_following:
        with _refusing(checkpoint):
            is_choosing = follow_indices(layers, config)
        _refuse_states(checkpoint, config, is_following, is_choosing)
        if any(is_choosing):
            meta_model.set_attn_implementation(attention.NAME)
    # layers that a target carries have positions as the target's have, such as none
    has_positions = hasattr(decoder, "rotary_emb") or checkpoint.carried is not None
    if not any(is_following) and (not is_following or not has_positions):
        raise unsupported(checkpoint, "its decoder has no layers[i] with rotary positions")


def _config(settings: dict[str, Any]) -> Any:
    """Return `AutoConfig`'s reading of a config.json in a folder; GGUF files have none."""
    kind: Any = settings.get("model_type")
    kind = next((BUILT_AS[kind, key] for key in settings if (kind, key) in BUILT_AS), kind)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        has_code = "auto_map" in settings
        code = "it needs code of its own, which is not run"
        missing = f"transformers {transformers.__version__} lacks it, a newer one may have it"
        raise ValueError(code if has_code else missing)
    values = copy.deepcopy({**settings, **_OUTPUT_FLAGS, "model_type": kind})
    return CONFIG_MAPPING[kind].from_dict(values)


def _encoder_decoder(checkpoint: Checkpoint, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Build T5 alone: its decoder uses distances, which a tree's path has, too."""
    if config.model_type not in ENCODER_DECODERS:
        known = " and ".join(ENCODER_DECODERS)
        raise unsupported(checkpoint, f"of encoder-decoder models {known} are known")
    with _refusing(checkpoint):
        meta_model = _instantiate(AutoModelForSeq2SeqLM.from_config, config, dtype)
        # transformers 5.17 has none
        for part in (meta_model, meta_model.get_encoder(), meta_model.get_decoder()):
            part.set_attn_implementation(attention.BIASED)
        try_out(meta_model, dtype)
        return meta_model


def _instantiate(
    build: Callable[..., PreTrainedModel], config: Any, dtype: torch.dtype
) -> PreTrainedModel:
    """Return the library's model without storage, set up for layers that stream."""
    for flag, value in _OUTPUT_FLAGS.items():
        setattr(config, flag, value)
    for name in _NAMED_CODE:
        setattr(config, name, None)
    meta_model = build_without_storage(lambda: build(config, dtype=dtype, trust_remote_code=False))
    replace_linears(meta_model, WIDENED_GATES.get(config.model_type, ()))
    prepare_experts(meta_model)
    if meta_model.get_decoder() is meta_model and hasattr(meta_model, "model"):
        meta_model.base_model_prefix = "model"  # Llama 4 keeps the prefix of a model inside another
    _keep_in_float32(meta_model, meta_model._get_dtype_plan(dtype))
    # transformers up to 5.19 claims sdpa for soft-capped families, whose scores would not be
    # capped.
    is_capped = bool(getattr(config, "attn_logit_softcapping", None))
    if STATE_CACHE in signature(type(meta_model).forward).parameters:
        meta_model.register_forward_pre_hook(_hand_on_cache, with_kwargs=True)
    if config.model_type in LIGHTNING:
        # it refuses any cache except its own, and passes on the one it is given
        meta_model.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "use_cache": False}), with_kwargs=True
        )
    is_ours = meta_model._supports_sdpa and not is_capped
    meta_model.set_attn_implementation(attention.NAME if is_ours else "eager")
    return meta_model.eval().requires_grad_(False)


def _hand_on_cache(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Pass the cache on to Mamba, under its other name in older versions."""
    renamed = {CACHE: STATE_CACHE}
    return args, {renamed.get(key, key): value for key, value in kwargs.items()}


def _keep_in_float32(meta_model: PreTrainedModel, patterns: Iterable[str]) -> None:
    """Keep in float32 what a family never rounds (router biases), which `from_config` ignores."""
    kept = [re.compile(pattern.replace("*", ".*")) for pattern in patterns]
    for name, tensor in meta_model.state_dict(keep_vars=True).items():
        if any(pattern.search(name) for pattern in kept):
            tensor.data = tensor.data.float()


def try_out(
    meta_model: PreTrainedModel, dtype: torch.dtype
) -> tuple[KVCache | None, nn.ModuleList]:
    """Run layers of every kind without numbers: a config may ask for the impossible.

    Returns the filled cache, None if the pass needed numbers, and the layers of the cut copy, see
    `kinds_of`.
    """
    scales = (getattr(module, "scaling", None) for module in meta_model.modules())
    if any(isinstance(scale, complex) for scale in scales):
        raise ValueError("the scale of its attention is no real number")
    meta = torch.device("meta")
    rows = torch.zeros(1, 2, dtype=torch.long, device=meta)
    trial = _cut_copy(meta_model).to(meta)
    sees_TT = causal(2)
    filled = new_cache(layer_stacks(meta_model)[0], 2, None, lambda tensor: tensor.to(meta))
    part = BatchPart(rows[0], rows[0], sees_TT, filled)
    mask = torch.zeros(1, 1, 2, 2, dtype=dtype, device=meta)
    cache = lay([part], None)
    for selection in filter(None, map(selection_of, layer_stacks(trial)[0])):
        selection.begin(path_rows(0, sees_TT, _of_that_shape), cache)
    inputs = {"position_ids": rows, "use_cache": True, **cache.as_argument()}
    inputs["attention_mask"] = mask
    inputs = {"decoder_input_ids": rows} if meta_model.config.is_encoder_decoder else inputs
    try:
        with torch.inference_mode(), cache.running():
            logits = trial(input_ids=rows, **inputs).logits
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error).lower():  # code that reads numbers cannot be tried without them
            raise
        return None, layer_stacks(trial)[0]
    else:
        if logits.shape != (1, 2, meta_model.get_output_embeddings().weight.shape[0]):
            raise ValueError(f"its scores have shape {tuple(logits.shape)}")
    return filled, layer_stacks(trial)[0]


def _of_that_shape(query_HTK: Tensor, _: Tensor, value_GSV: Tensor, *__: Any) -> Tensor:
    return query_HTK.new_empty(*query_HTK.shape[1::-1], value_GSV.shape[2])


def kinds_of(meta_model: PreTrainedModel) -> list[int]:
    """Return for each layer of the decoder the first that has the same parameters."""
    kinds = [
        [(name, parameter.shape) for name, parameter in layer.named_parameters()]
        for layer in layer_stacks(meta_model)[0]
    ]
    return [*map(kinds.index, kinds)]


def _cut_copy(meta_model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy cut after the first layer of the last kind, with rotary embeddings of its own."""
    with cut_stack(meta_model, slice(max(kinds_of(meta_model)) + 1)):
        trial = copy.deepcopy(meta_model)
    # their fused products need types and processors that only the real layers have
    if getattr(trial.config, "_experts_implementation", None) is not None:
        trial.set_experts_implementation(EXPERTS)
    return trial


@contextmanager
def _refusing(checkpoint: Checkpoint, likely: str = "") -> Iterator[None]:
    """Turn transformers' exceptions about a config into `UserError`; `likely` may be the cause."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError):
            raise
        of_version = version_error(error)
        if of_version is not None:
            raise UserError(f"{checkpoint.name}: {of_version}") from None
        why = reason(error)
        if isinstance(error, StrictDataclassError):
            kind = checkpoint.config["model_type"]
            complaint = f"{checkpoint.name}: a value does not fit model type {kind} ({why})"
            raise UserError(f"{complaint}: mend config.json") from None
        if isinstance(error, KeyError):
            # a table of the library is asked for a key, or for what the config says
            is_value = f': "{error.args[0]}"' in json.dumps(checkpoint.config)
            unknown = f"transformers {transformers.__version__} does not know {why}"
            why = f"{unknown} of config.json" if is_value else f"config.json has no {why}"
        if likely and isinstance(error, (TypeError, AttributeError)):
            why = f"{likely}, which may be why transformers says: {why}"
        raise unsupported(checkpoint, why) from None


def _missing(config: Any) -> str:
    """Return the key without a value that made a family fail."""
    settings = config.to_dict()
    missing = [name for name in NEEDED_OF_CONFIGS if name in settings and settings[name] is None]
    return f"config.json has no {' and no '.join(missing)}" if missing else ""


def _refuse_unknown_kinds(checkpoint: Checkpoint) -> None:
    """Raise `UserError` for kinds of layers that transformers would refuse without naming them."""
    known = {*ALLOWED_LAYER_TYPES, *_ATTENTION, *_RECURRENT, *_INDEXED_BEFORE, *_BY_ROW}
    parts = (checkpoint.config, checkpoint.config.get("text_config"))
    lists = (part.get(name) for part in parts if isinstance(part, dict) for name in _KIND_LISTS)
    kinds = [kind for listed in lists if isinstance(listed, list) for kind in listed]
    unknown = (kind for kind in kinds if not isinstance(kind, str) or kind not in known)
    _refuse_kinds(checkpoint, {*map(str, unknown)})


def _refuse_states(
    checkpoint: Checkpoint, config: Any, is_following: list[bool], is_choosing: list[bool]
) -> None:
    """Raise `UserError` for layers with a state or an index of a kind that cannot follow trees."""
    kinds = _kinds_of(config)
    allowed = {*_ATTENTION, *_BY_ROW}
    if len(kinds) != len(is_following) and {*kinds} - allowed:
        counts = f"{len(kinds)} kinds of layers for {len(is_following)} layers"
        raise unsupported(checkpoint, counts)
    refused = set[str]()
    for kind, follows, chooses in zip(kinds, is_following, is_choosing, strict=False):
        if kind not in allowed and not (chooses if kind in _INDEXED else follows):
            refused.add(kind)
    _refuse_kinds(checkpoint, refused)


def _kinds_of(config: Any) -> list[str]:
    return list(next((kinds for name in _KIND_LISTS if (kinds := getattr(config, name, None))), ()))


def _refuse_kinds(checkpoint: Checkpoint, kinds: set[str]) -> None:
    is_old = _INDEXED[0] not in ALLOWED_LAYER_TYPES
    if is_old and kinds & {*_INDEXED, *_INDEXED_BEFORE}:
        raise too_old(checkpoint, "layers that choose by an index, which are made otherwise here")
    if kinds:
        described = f"layers of kind {', '.join(sorted(kinds))}"
        raise unsupported(
            checkpoint, f"{described}, whose state cannot be rolled back to a tree's path"
        )


def too_old(checkpoint: Checkpoint, reason: str, other_way: str = "") -> UserError:
    """Return the error that `what` needs a newer transformers, and the option that avoids it."""
    requirement = f"{checkpoint.name}: transformers {transformers.__version__} is too old for"
    kind = f"model type {checkpoint.config.get('model_type')}"
    return UserError(
        f"{requirement} {kind} ({reason}): pip install -U transformers, to 5.23 or newer{other_way}"
    )


def headed_model(config: Any, dtype: torch.dtype, **_: Any) -> PreTrainedModel:
    """Build a language model that transformers only has inside a multimodal model.

    Its decoder and forward pass are transformers' own; the head is one matrix after it. Raises
    `ValueError`.
    """
    decoder = _decoder_class(config)
    # In the decoder's own module, from whose source transformers learns what its families support.
    attributes = {"__module__": decoder.__module__, "config_class": type(config)}
    headed: Any = type(f"{decoder.__name__}WithHead", (_WithHead, decoder.__mro__[1]), attributes)
    return headed._from_config(config, dtype=dtype)


class _WithHead:
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  (what transformers calls it)

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.model = _decoder_class(config)(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[attr-defined]

    def forward(
        self, input_ids: Tensor, logits_to_keep: int = 0, **inputs: Any
    ) -> CausalLMOutputWithPast:
        """Return scores of the last `logits_to_keep` rows; 0 is all of them."""
        hidden_1TD = self.model(input_ids=input_ids, **inputs).last_hidden_state
        logits_1TV = self.lm_head(hidden_1TD[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=_scaled_scores(logits_1TV, self.model.config))


def _decoder_class(config: Any) -> Any:
    """Return the class of this config's decoder, listed or beside it. Raises `ValueError`.

    Some families only have it inside other models.
    """
    if not isinstance(getattr(config, "hidden_size", None), int):
        raise ValueError("it does not write text")
    if type(config) in MODEL_MAPPING:
        return MODEL_MAPPING[type(config)]
    home = type(config).__module__.replace(".configuration_", ".modeling_")
    classes = [
        value
        for name, value in vars(sys.modules.get(home, object)).items()
        if name.endswith("TextModel")
        and isinstance(value, type)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == home
        and type(config) in _configs_of(value)
    ]
    if len(classes) != 1:
        raise ValueError(f"transformers has no language model of type {config.model_type}")
    return classes[0]


def _configs_of(decoder: type[PreTrainedModel]) -> tuple[Any, Any]:
    """Return the classes of config that a decoder names, and that it is built from.

    PaddleOCR-VL's names the whole model's in transformers 5.17.
    """
    made_of = signature(decoder).parameters.get("config")
    return getattr(decoder, "config_class", None), made_of and made_of.annotation


def _scaled_scores(logits_1TV: Tensor, config: Any) -> Tensor:
    """Apply the whole model's changes to scores: Granite divides, Muse bounds."""
    if divisor := getattr(config, "logits_scaling", None):
        logits_1TV = logits_1TV / divisor
    if factor := getattr(config, "output_multiplier", None):
        logits_1TV = logits_1TV * factor
    if cap := getattr(config, "final_logit_softcapping", None):
        logits_1TV = torch.tanh(logits_1TV / cap) * cap
    return logits_1TV
