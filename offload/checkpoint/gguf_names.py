"""What llama.cpp calls the tensors of a model, and how it stores them.

Experts lie in stacks of one tensor for each of their matrices; here each expert has names of its
own, as in safetensors, so that all that knows experts knows these. Invariant: every tensor of a
file has one known meaning, or the file is refused.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from offload.checkpoint.layout import slice_of
from offload.checkpoint.safetensors import damaged
from offload.checkpoint.small_files import first_size
from offload.checkpoint.tensors import MOST_EXPERTS, ROWS, Coded, Entries, TensorEntry
from offload.encoding.base import Settings
from offload.encoding.gguf import BLOCKS, GgufBlocks, Tiles
from offload.errors import UserError

Named = Iterator[tuple[str, TensorEntry]]
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)(?:\.(weight|bias|scale))?")
_EXTRA = re.compile(r"blk\.(\d+)\.nextn\.")
FACTORS = "rope_freqs.weight"
_OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
          "output.weight": "lm_head.weight"}  # fmt: skip
_PROJECTIONS = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
                "attn_output": "self_attn.o_proj"}  # fmt: skip
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_PARTS = {**_PROJECTIONS, **_NORMS, **_DENSE}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_NORMS = {"ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
                "post_ffw_norm": "post_feedforward_layernorm"}  # fmt: skip
_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_EXPERTS = {"ffn_gate_exps": "mlp.experts.{}.gate_proj", "ffn_up_exps": "mlp.experts.{}.up_proj",
            "ffn_down_exps": "mlp.experts.{}.down_proj"}  # fmt: skip
_FUSED_EXPERTS = {"ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj"}
_MIXTRAL_EXPERTS = {"ffn_gate_exps": "block_sparse_moe.experts.{}.w1", "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
                    "ffn_down_exps": "block_sparse_moe.experts.{}.w2"}  # fmt: skip
_SHARED_EXPERTS = {
    f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}
_LATENT = {"attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
           "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
           "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj"}  # fmt: skip
_RECURRENT = {"attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
              "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b",
              "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm",
              "ssm_out": "linear_attn.out_proj", "post_attention_norm": "post_attention_layernorm"}  # fmt: skip
_RECURRENT_VECTORS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
_GEMMA4 = {"inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
           "post_norm": "post_per_layer_input_norm", "ffn_gate_inp": "router.proj",
           "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_1": "post_feedforward_layernorm_1",
           "post_ffw_norm_2": "post_feedforward_layernorm_2"}  # fmt: skip
_GEMMA4_OUTER = {"per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
                 "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
                 "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight"}  # fmt: skip
_GEMMA4_OTHERS = {"layer_output_scale.weight": "layer_scalar", "ffn_gate_inp.scale": "router.scale",
                  "ffn_down_exps.scale": "router.per_expert_scale",
                  "ffn_gate_up_exps.weight": "experts.gate_up_proj",
                  "ffn_down_exps.weight": "experts.down_proj"}  # fmt: skip


_EXPERT_KEYS = frozenset({"expert_feed_forward_length", "expert_shared_feed_forward_length"})
_GEMMA_KEYS = frozenset({"attention.sliding_window_pattern", "rope.freq_base_swa", "final_logit_softcapping",
                         "attn_logit_softcapping"})  # fmt: skip
_OSS_OTHERS = {"attn_sinks.weight": "self_attn.sinks", "ffn_gate_inp.bias": "mlp.router.bias",
               "ffn_down_exps.weight": "mlp.experts.down_proj",
               "ffn_down_exps.bias": "mlp.experts.down_proj_bias"}  # fmt: skip
_OSS_WOVEN = ("ffn_gate_exps", "ffn_up_exps")  # the even rows of one matrix, and the odd ones


class Architecture(NamedTuple):
    """How llama.cpp stores the models of some types."""

    model_types: tuple[str, ...]
    # GGUF's names of a layer's tensors -> Hugging Face's, without the last part, which is the same
    parts: Mapping[str, str]
    has_interleaved_heads: bool = False  # the rows of query and key projections
    added: int = 0  # what the writer has added to the weights of norms
    # keys of a file beyond those of all; None: rules that no file states are in llama.cpp's code,
    # so that a config is needed
    keys: frozenset[str] | None = None
    states_few_sizes: bool = False  # the others are told otherwise than a config tells them
    experts: Mapping[str, str] = {}  # stacks, with the place of an expert's number
    others: Mapping[str, str] = {}  # of layers, by their whole names
    outer: Mapping[str, str] = {}
    ignored: tuple[str, ...] = ()  # what the config tells as well
    # stacks whose rows alternate in one matrix of an expert, and its name
    woven: tuple[str, ...] = ()
    weave: str = ""


ARCHITECTURES = {
    "llama": Architecture(
        ("llama", "mistral", "mistral3", "mixtral"),
        {**_PARTS, "ffn_gate_inp": "block_sparse_moe.gate"},
        has_interleaved_heads=True,
        keys=_EXPERT_KEYS,
        experts=_MIXTRAL_EXPERTS,
        ignored=(FACTORS,),
    ),
    "qwen2": Architecture(("qwen2",), _PARTS, keys=frozenset()),
    "qwen3": Architecture(("qwen3",), {**_PARTS, **_HEAD_NORMS}, keys=frozenset()),
    "gemma3": Architecture(
        ("gemma3_text", "gemma3"),
        {**_PARTS, **_HEAD_NORMS, **_GEMMA_NORMS},
        added=1,
        keys=_GEMMA_KEYS,
    ),
    "qwen3moe": Architecture(
        ("qwen3_moe",),
        {**_PARTS, **_HEAD_NORMS, **_ROUTER},
        keys=_EXPERT_KEYS,
        experts=_EXPERTS,
    ),
    "granite": Architecture(("granite",), _PARTS, has_interleaved_heads=True),
    "phi3": Architecture(
        ("phi3",),
        {**_PARTS, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        states_few_sizes=True,
        ignored=("rope_factors_long.weight", "rope_factors_short.weight"),
    ),
    "glm4moe": Architecture(
        ("glm4_moe",),
        {
            **_PARTS,
            **_HEAD_NORMS,
            **_ROUTER,
            **_SHARED_EXPERTS,
            "post_attention_norm": "post_attention_layernorm",
        },
        states_few_sizes=True,
        experts=_EXPERTS,
        others={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    ),
    "deepseek2": Architecture(
        ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"),
        {**_PARTS, **_LATENT, **_ROUTER, **_SHARED_EXPERTS},
        states_few_sizes=True,
        experts=_EXPERTS,
        others={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias", **_FUSED_EXPERTS},
        ignored=(FACTORS,),
    ),
    "qwen35": Architecture(
        ("qwen3_5", "qwen3_5_text"),
        {**_PARTS, **_HEAD_NORMS, **_RECURRENT},
        added=1,
        states_few_sizes=True,
        others=_RECURRENT_VECTORS,
    ),
    "qwen35moe": Architecture(
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        {
            **_PARTS,
            **_HEAD_NORMS,
            **_RECURRENT,
            **_ROUTER,
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            **{f"ffn_{p}_shexp": f"mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")},
        },
        added=1,
        states_few_sizes=True,
        experts=_EXPERTS,
        others={**_RECURRENT_VECTORS, **_FUSED_EXPERTS},
    ),
    "gemma4": Architecture(
        ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
        {**_PARTS, **_HEAD_NORMS, **_GEMMA_NORMS, **_GEMMA4},
        states_few_sizes=True,
        others=_GEMMA4_OTHERS,
        outer=_GEMMA4_OUTER,
        ignored=(FACTORS,),
    ),
    "gpt-oss": Architecture(
        ("gpt_oss",),
        {
            **_PROJECTIONS,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        others=_OSS_OTHERS,
        woven=_OSS_WOVEN,
        weave="mlp.experts.{}.gate_up_proj",
    ),
}


def tensors_of(
    where: str, kind: str, stored: Entries, stated: Settings, config: Settings
) -> dict[str, TensorEntry]:
    """Return the tensors by Hugging Face's names.

    `stated` is what the file says of the model, `config` is that of its text. Raises `UserError`
    for an unknown tensor.
    """
    found = dict[str, TensorEntry]()
    reader = _Reader(where, kind, stored, stated, config)
    for own, entry in stored.items():
        for name, one in reader.read(own, entry):
            if name in found:
                raise damaged(f"{where}: {own:.80} is there twice")
            found[name] = one
    return found


class _Reader:
    """What is the same for all tensors of a file."""

    def __init__(
        self, where: str, kind: str, stored: Entries, stated: Settings, config: Settings
    ) -> None:
        self._where = where
        self._kind = kind
        self._architecture = ARCHITECTURES[kind]
        self._num_layers = stated.get("num_hidden_layers", 1 << 32)
        num_heads = stated.get("num_attention_heads", 0)
        self._heads = {"attn_q": num_heads, "attn_k": stated.get("num_key_value_heads", num_heads)}
        self._config = config
        # layers whose gate and up projections are of several kinds, which then are all expanded
        coded = (name for name, entry in stored.items() if entry.dtype in BLOCKS)
        matches = (re.match(r"blk\.(\d+)\.ffn_(gate|up)_exps", name) for name in coded)
        self._kinds = {int(match[1]) for match in matches if match is not None}

    def read(self, own: str, entry: TensorEntry) -> Named:
        """Yield what becomes of a tensor; nothing of those that have no place in the model."""
        architecture = self._architecture
        outer = {**_OUTER, **architecture.outer}
        match = _BLOCK.fullmatch(own)
        extra = _EXTRA.match(own) or match
        # layers that guess further ahead
        if own in architecture.ignored or (extra and int(extra[1]) >= self._num_layers):
            return
        if own in outer:
            yield outer[own], self._changed("", outer[own], entry)
            return
        layer, part, end = match.groups() if match else (0, "", None)
        prefix = f"model.layers.{int(layer)}." if match else ""
        ends = ("weight", "bias") if part in _PROJECTIONS else ("weight",)
        short = part if end is None else f"{part}.{end}"
        if short in architecture.others:
            name = prefix + architecture.others[short]
            yield name, self._changed(part, name, entry)
        elif part in architecture.experts and end == "weight":
            yield from self._experts(prefix + architecture.experts[part], int(layer), entry)
        elif part in architecture.woven and end in ("weight", "bias"):
            name = prefix + architecture.weave + ("_bias" if end == "bias" else "")
            yield from self._woven(name, architecture.woven.index(part), entry)
        elif part in ("attn_k_b", "attn_v_b") and "attn_kv_b" in architecture.parts:
            yield from self._heads_of_latent(prefix, part, entry)
        elif part in architecture.parts and end in ends:
            name = f"{prefix}{architecture.parts[part]}.{end}"
            yield name, self._changed(part, name, entry)
        else:
            what = f"{self._where}: {own:.80} is not known of architecture {self._kind}"
            raise UserError(f"{what}: take the model in safetensors")

    def _experts(self, name: str, layer: int, stack: TensorEntry) -> Named:
        if stack.dtype in BLOCKS or layer in self._kinds:
            stack = stack._replace(coded=Coded(GgufBlocks(stack.dtype)))
        for expert, one in enumerate(self._slices(name, stack)):
            yield f"{name.format(expert)}.weight", one

    def _woven(self, name: str, turn: int, stack: TensorEntry) -> Named:
        """Yield the rows of each expert, which alternate with those of other stacks."""
        coding = GgufBlocks(stack.dtype, is_transposed=len(stack.shape) == 3)
        coded = Coded(coding, turn=turn, num_woven=len(self._architecture.woven))
        stack = stack._replace(coded=coded)
        for expert, one in enumerate(self._slices(name, stack, least_dims=2)):
            yield f"{name.format(expert)}{ROWS}{turn}", one

    def _heads_of_latent(self, prefix: str, part: str, stack: TensorEntry) -> Named:
        """Yield the rows of each head's keys, which are stored as columns, or values."""
        is_keys = part == "attn_k_b"
        stack = stack._replace(coded=Coded(GgufBlocks(stack.dtype, is_flipped=is_keys)))
        for head, one in enumerate(self._slices(part, stack)):
            shape = one.shape[::-1] if is_keys else one.shape
            name = f"{prefix}self_attn.kv_b_proj.weight{ROWS}{2 * head + (not is_keys)}"
            yield name, one._replace(shape=shape)

    def _slices(self, name: str, stack: TensorEntry, least_dims: int = 3) -> Iterator[TensorEntry]:
        """Yield the parts along a stack's first dimension."""
        num_parts = stack.shape[0]
        is_stack = least_dims <= len(stack.shape) <= 3 and 0 < num_parts <= MOST_EXPERTS
        if not is_stack or stack.num_bytes % num_parts:
            raise damaged(f"{self._where}: {name} has shape {list(stack.shape)}")
        yield from (slice_of(stack, index, num_parts) for index in range(num_parts))

    def _changed(self, part: str, name: str, entry: TensorEntry) -> TensorEntry:
        """Return a tensor with the coding that makes of it what the model has."""
        architecture = self._architecture
        is_norm = name.endswith("norm.weight") and part != "ssm_norm"
        added = architecture.added if is_norm else 0
        interleaved = self._heads.get(part, 0) if architecture.has_interleaved_heads else 0
        if interleaved and entry.shape[0] % (2 * interleaved):
            what = f"{name} has {entry.shape[0]} rows for {interleaved} heads"
            raise damaged(f"{self._where}: {what}")
        tiles = self._tiles(part, name, entry.shape)
        is_exponential = part == "ssm_a"
        # gpt-oss multiplies with experts' matrices from the other side
        is_transposed = bool(architecture.woven) and name.endswith("experts.down_proj")
        is_changed = added or interleaved or tiles or is_exponential or is_transposed
        if entry.dtype in BLOCKS or is_changed:
            order = (interleaved, added, tiles, is_exponential)
            coding = GgufBlocks(entry.dtype, *order, is_transposed=is_transposed)
            entry = entry._replace(coded=Coded(coding))
        if part == "ssm_conv1d" and len(entry.shape) == 2:  # a convolution has a dimension more
            entry = entry._replace(shape=(entry.shape[0], 1, entry.shape[1]))
        return entry

    def _tiles(self, part: str, name: str, shape: tuple[int, ...]) -> Tiles | None:
        """Return the order of value heads in recurrent layers; None where it is the model's."""
        if "linear_attn." not in name or part == "ssm_norm":
            return None
        num_groups, num_heads, key_width, value_width = (
            first_size(self._config, f"linear_{what}")
            for what in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        )
        first = 2 * num_groups * key_width if part in ("attn_qkv", "ssm_conv1d") else 0
        is_columns = part == "ssm_out"
        width = 1 if part in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt") else value_width
        is_even = bool(num_groups) and num_heads % num_groups == 0
        if not is_even or shape[is_columns:][:1] != (first + num_heads * width,):
            raise damaged(f"{self._where}: {name} has shape {list(shape)}, not that of its config")
        if num_heads == num_groups:
            return None
        return Tiles(num_groups, num_heads // num_groups, first, is_columns)
