"""What llama.cpp calls the models of some types, and the tensors of their layers."""

from collections.abc import Mapping
from typing import NamedTuple

FACTORS = "rope_freqs.weight"
PROJECTIONS = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
                "attn_output": "self_attn.o_proj"}  # fmt: skip
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_PARTS = {**PROJECTIONS, **_NORMS, **_DENSE}
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
            **PROJECTIONS,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        others=_OSS_OTHERS,
        woven=_OSS_WOVEN,
        weave="mlp.experts.{}.gate_up_proj",
    ),
}

# The type of a config that is made of a header alone, where it is not called like the architecture.
CONFIG_TYPES = {"gemma3": "gemma3_text"}
MIXTURE_TYPES = {"llama": "mixtral", "qwen3moe": "qwen3_moe"}
WINDOWED_TYPES = {"llama": "mistral"}
