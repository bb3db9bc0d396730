"""Every model type that the program has to know by its name, and what for.

Most run without a line here: transformers builds them, and their files tell their sizes. A mixture
that transformers has needs none; a type that cannot run is a line in `REFUSED`, with its true
reason. No torch, and nothing that computes.
"""

_NO_LAYERS = "its decoder has no layers[i] with rotary positions"
_NO_TEXT = "it does not write text"
_OTHER_ENCODERS = "of encoder-decoder models t5 and mt5 are known"
# By the type of the whole: it spares a user the seconds that importing takes. Building finds the
# same, and refuses many more.
REFUSED = {
    "bart": _OTHER_ENCODERS,
    "bloom": _NO_LAYERS,
    "clip": _NO_TEXT,
    "falcon": _NO_LAYERS,
    "gpt2": _NO_LAYERS,
    "opt": _NO_LAYERS,
    "rwkv": _NO_LAYERS,
    "umt5": _OTHER_ENCODERS,
}
# By the type of the text: these would be built, and then not compute what they are for.
MISCOMPUTED = {
    "deepseek_v4": "keys that stand for several tokens, made by a cache of its own as a text grows",
    "diffusion_gemma_text": "it takes noise away from whole passages instead of writing token by token",
    "ernie4_5_vl_moe_text": "experts for pictures in the layers of its text",
    "longcat_flash": "two attentions in each of its layers",
    "mllama_text_model": "layers that attend to pictures alone",
    "phi4_multimodal": "towers inside of its language model",
}
# By the type of the text: MTP layers in files of targets that run, which are not computed here.
UNREAD_MTP = {
    "hy_v4": "its layer has no hyper-connections, which all of the target's have",
    "mistral_large4": "nothing public says what its mtp_dspark tensors compute",
}
# What keeps layers from being shared among ranks as stages, by the name in the config.
INSEPARABLE = {
    "is_encoder_decoder": "its encoder is run by the rank that has the prompt",
    "num_kv_shared_layers": "layers that share keys and values of others",
    "hidden_size_per_layer_input": "inputs of their own for every layer",
}
# What families need of a config and transformers gives no value to.
NEEDED_OF_CONFIGS = (
    "layer_types",
    "mlp_layer_types",
    "head_dim",
    "num_key_value_heads",
    "num_experts_per_tok",
    "n_routed_experts",
    "num_experts",
    "vocabulary_map",
    "indexer_n_heads",
    "indexer_kv_heads",
    "indexer_head_dim",
    "indexer_budget",
    "indexer_compress_ratio",
)
# Stacks of experts that files may hold with their dimensions exchanged.
TURNED_STACKS = ("qwen3_vl_moe", "qwen3_vl_moe_text")
# Blocks of attention that stand in many layers by turns and in files once, by their name in a layer.
SHARED_LAYERS = {"zamba": "shared_transf.", "zamba2": "shared_transformer."}
# An encoder reads the prompt.
ENCODER_DECODERS = ("t5", "mt5")
# The config has the sizes of text at the top, beside `vision_config`.
SIZES_OUTSIDE = ("qwen2_vl", "qwen2_5_vl")
# One layer structure, except for biases and norms of heads: a config alone tells all tensors.
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
BIASED_QUERIES = ("qwen2",)
NORMED_HEADS = ("qwen3",)
# All that attention does is done head by head, so that ranks may have heads of their own.
BY_HEADS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
# Layers that add to their mask before they pass it on.
CALCULATE_WITH_MASKS = ("doge",)
# Layers of linear attention that an `output_gate` tells, with a cache that the model would make
# itself; their `full_attention` sees as far as the window.
LIGHTNING = ("minimax",)
# Attention's gates that are widened to float32 as soon as they are multiplied: one for each head,
# which is no whole vector of any processor.
WIDENED_GATES = {
    "bailing_hybrid": (".self_attn.g_proj",),
    "laguna": (".self_attn.g_proj",),
}
# Types that configs of before give, by what the config has that the type of today has.
BUILT_AS = {("mistral", "layer_types"): "ministral"}
