"""Families known by name before transformers is imported: refused ones, and some mixtures.

That some cannot be decoded with trees spares a user the seconds that importing takes.
`model/meta.py` finds the same by building the model, and refuses many more. Invariant: a family is
refused here only if that refuses it, too.
"""

from offload.checkpoint.safetensors import Checkpoint, unsupported

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


def require_family(checkpoint: Checkpoint) -> None:
    """Raise `UserError` for a model of a family that is refused."""
    why = REFUSED.get(str(checkpoint.config.get("model_type")))
    if why is not None:
        raise unsupported(checkpoint.directory, checkpoint.config, why)
