"""Tiny targets with random draft heads beside them, and their scores by few lines of torch, all afresh.

The arithmetic follows speculators 0.9 (EAGLE-3), transformers 5.24 (DFlash, Gemma 4's assistant).
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
)

WIDTH, VOCAB, WORDS, LAYERS = 32, 64, 24, 8
HEADS, GROUPS, HEAD_DIM, INNER = 2, 1, 16, 48
SHAPE: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": HEADS,
                         "num_key_value_heads": GROUPS, "head_dim": HEAD_DIM, "vocab_size": VOCAB,
                         "rms_norm_eps": 1e-6, "eos_token_id": None, "pad_token_id": None, "bos_token_id": 1,
                         "max_position_embeddings": 256}  # fmt: skip
# what enters these layers
TAPS = [2, LAYERS // 2, LAYERS - 3]


@cache
def target() -> tuple[Path, Any]:
    """Return the folder of a tiny Llama, and the model."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **SHAPE)).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.25 + ("norm" in name))
    folder = Path(mkdtemp())
    model.save_pretrained(folder)
    return folder, model


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int = 1) -> dict[str, Tensor]:
    """Return random tensors by name; those of norms lie around one."""
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=source) * 0.25 + ("norm" in name) for name, shape in shapes.items()}


def layer_shapes(where: str, num_inputs: int, *, has_normed_heads: bool = False) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a decoder layer whose attention reads `num_inputs` numbers."""
    queries, keys = HEADS * HEAD_DIM, GROUPS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, num_inputs), "self_attn.k_proj": (keys, num_inputs),
        "self_attn.v_proj": (keys, num_inputs), "self_attn.o_proj": (WIDTH, queries), "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,), "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER)}  # fmt: skip
    if has_normed_heads:
        shapes |= {"self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,)}
    return {f"{where}.{name}.weight": shape for name, shape in shapes.items()}


# SpecForge's names and those of speculators, and flags of the latter
FORMS: dict[str, dict[str, Any]] = {
    "specforge": {},
    "speculators": {"norm_before_residual": True, "is_of_speculators": True},
    "before fc": {"norm_before_fc": True, "is_of_speculators": True},
    "3.1": {"fc_norm": True, "norm_output": True, "is_of_speculators": True},
    "own table": {"own_table": True},
    "all words": {"all_words": True},
}


@cache
def eagle3(form: str = "specforge") -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """Return the folder of a head, its tensors by SpecForge's names, and its flags."""
    flags = FORMS[form]
    num_words = VOCAB if flags.get("all_words") else WORDS
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (WIDTH, 3 * WIDTH), "norm.weight": (WIDTH,)}
    shapes |= layer_shapes("midlayer", 2 * WIDTH)
    shapes |= {"midlayer.hidden_norm.weight": (WIDTH,), "lm_head.weight": (num_words, WIDTH)}
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * WIDTH,)
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{turn}.weight": (WIDTH,) for turn in range(3)}
    if flags.get("own_table"):
        shapes["embed_tokens.weight"] = (VOCAB, WIDTH)
    tensors = random_weights(shapes)
    if num_words < VOCAB:
        id_W = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:num_words].sort().values
        tensors["d2t"] = id_W - torch.arange(num_words)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, id_W, True)
    layer = {"model_type": "llama", "num_hidden_layers": 1, **SHAPE}
    if flags.get("is_of_speculators"):
        named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        config = {"speculators_model_type": "eagle3", "transformer_layer_config": layer, "draft_vocab_size": WORDS,
                  "architectures": ["Eagle3DraftModel"], "eagle_aux_hidden_state_layer_ids": TAPS, **flags}  # fmt: skip
    else:
        named = tensors
        left = [number - 1 for number in TAPS]
        config = {**layer, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": num_words,
                  "eagle_config": {"eagle_aux_hidden_state_layer_ids": left}}  # fmt: skip
    return written(named, config), tensors, flags


def written(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    """Return a new folder with these."""
    folder = Path(mkdtemp())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def normed(state: Tensor, weight: Tensor) -> Tensor:
    """Return a root mean square norm."""
    return state * torch.rsqrt(state.square().mean(-1, keepdim=True) + 1e-6) * weight


def turned(states_HTK: Tensor, place_T: Tensor) -> Tensor:
    """Return heads turned by their positions."""
    frequency_K = 10_000 ** -(torch.arange(0, HEAD_DIM, 2, dtype=states_HTK.dtype) / HEAD_DIM)
    angle_TK = (place_T[:, None] * frequency_K).repeat(1, 2)
    first, second = states_HTK.chunk(2, -1)
    return states_HTK * angle_TK.cos() + torch.cat([-second, first], -1) * angle_TK.sin()


def heads(rows: Tensor, weight: Tensor) -> Tensor:
    """Return (H, T, K) of rows times a matrix."""
    return (rows @ weight.T).view(len(rows), -1, HEAD_DIM).transpose(0, 1)


def fed_forward(state: Tensor, get: Any) -> Tensor:
    """Return a state behind a layer's second half."""
    inner = normed(state, get("post_attention_layernorm"))
    gate = torch.nn.functional.silu(inner @ get("mlp.gate_proj").T)
    return state + (gate * (inner @ get("mlp.up_proj").T)) @ get("mlp.down_proj").T


@cache
def target_in_float64() -> Any:
    """Return the target, computing in float64."""
    return deepcopy(target()[1]).double()


@torch.no_grad()
def eagle3_scores(form: str, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
    """Return the scores (V) behind a path of guesses, below tokens of which the last has no state yet.

    They are computed in float64: in float32 they may be as far from the truth as what they judge.
    """
    _, stored, flags = eagle3(form)
    tensors = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in stored.items()}
    model = target_in_float64()
    hidden = model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    tapped_TW = torch.cat([hidden[layer][0] for layer in TAPS], -1)
    if flags.get("norm_before_fc"):
        tapped_TW = normed(tapped_TW, tensors["input_norm.weight"])
    if flags.get("fc_norm"):
        parts = enumerate(tapped_TW.chunk(3, -1))
        tapped_TW = torch.cat([normed(part, tensors[f"fc_norm.{turn}.weight"]) for turn, part in parts], -1)
    fed_TD = tapped_TW @ tensors["fc.weight"].T
    table = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight)

    def get(name: str) -> Tensor:
        return tensors[f"midlayer.{name}.weight"]

    token_T = torch.tensor(tokens[1:])
    for token in (*path, None):
        normed_TD = normed(fed_TD, get("hidden_norm"))
        both = torch.cat([normed(table[token_T], get("input_layernorm")), normed_TD], -1)
        place_T = torch.arange(len(token_T))
        query, key = (turned(heads(both, get(f"self_attn.{name}_proj")), place_T) for name in "qk")
        score_HTT = query @ key.transpose(1, 2) / HEAD_DIM**0.5
        weights = score_HTT.masked_fill(place_T[:, None] < place_T, -torch.inf).softmax(-1)
        mixed = (weights @ heads(both, get("self_attn.v_proj"))).transpose(0, 1).reshape(len(token_T), -1)
        state = normed_TD if flags.get("norm_before_residual") else fed_TD
        out_TD = fed_forward(state + mixed @ get("self_attn.o_proj").T, get)
        last_TD = normed(out_TD, tensors["norm.weight"])
        if token is not None:
            token_T = torch.cat([token_T, torch.tensor([token])])
            fed_TD = torch.cat([fed_TD, (last_TD if flags.get("norm_output") else out_TD)[-1:]])
    scores_W = tensors["lm_head.weight"] @ last_TD[-1]
    if "d2t" not in tensors:
        return scores_W
    none_V = torch.full((VOCAB,), -torch.inf, dtype=scores_W.dtype)
    return none_V.index_copy(0, tensors["d2t"] + torch.arange(WORDS), scores_W)


BLOCK, MASK, WINDOW = 4, 63, 6
# what leaves these layers
LEFT = [0, 4]


@cache
def dflash(form: str = "z-lab") -> tuple[Path, Any]:
    """Return the folder of a block, by z-lab's names, Muse's or speculators', and the library's model of it."""
    torch.manual_seed(4)
    kinds = ["full_attention", "sliding_attention"]
    sizes = {**SHAPE, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 2, "layer_types": kinds,
             "sliding_window": WINDOW, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}  # fmt: skip
    block = {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": LEFT}
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**sizes, **block)).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.25 + ("norm" in name))
    tensors = dict(model.state_dict())
    if form in CORRECTED:
        tensors |= corrections(form)
    if form == "muse":
        return written(tensors, {**sizes, **block, "model_type": "muse_glimmer_assistant"}), model
    renamed = (("encoder.fc", "fc"), ("encoder.output_norm_enc", "hidden_norm"))
    for old, new in renamed:
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    if form in ("speculators", "xpress"):
        entered = [layer + 1 for layer in (*LEFT, LAYERS - 1)]
        layer_config = {
            "transformer_layer_config": {**sizes, "model_type": "qwen3"},
            "speculators_model_type": {"speculators": "dflash"}.get(form, form),
        }
        return written(
            tensors, {**block, **layer_config, "target_layer_ids": None, "aux_hidden_state_layer_ids": entered}
        ), model
    if form in MARKOV:
        config = {**sizes, **block, "model_type": "qwen3", "architectures": ["Qwen3DSparkModel"], "markov_rank": RANK,
                  "markov_head_type": form, "enable_confidence_head": True, **MARKOV[form]}  # fmt: skip
        return written(tensors, config), model
    config = {**sizes, "model_type": "qwen3", "architectures": ["DFlashDraftModel"], "block_size": BLOCK,
              "dflash_config": {"mask_token_id": MASK, "target_layer_ids": LEFT}}  # fmt: skip
    if form == "dflash2":
        config |= {"architectures": ["DFlash2DraftModel"], "is_causal": False}
        config["dflash_config"] |= {"selector_rank": RANK, "selector_top_k": CANDIDATES,
                                    "conv_kernel_size": TAPS_OF_CONV, "conv_group_size": GROUP, **SCALES}  # fmt: skip
    return written(tensors, config), model


RANK = 8
# DSpark's forms of corrections; one says that its first row guesses nothing
MARKOV: dict[str, dict[str, Any]] = {"vanilla": {}, "gated": {"sample_from_anchor": False}, "rnn": {}}
CORRECTED = (*MARKOV, "dflash2", "xpress")
CANDIDATES, TAPS_OF_CONV, GROUP = 12, 3, 8
SCALES = {"input_embedding_scale": 1.5, "output_multiplier": 0.5, "final_logit_softcapping": 9.0}


def corrections(form: str) -> dict[str, Tensor]:
    """Return tensors of a head of this form; DSpark's scores fewer words than the target has."""
    if form == "dflash2":
        shapes = {"predecessor_codebook": (VOCAB, RANK), "successor_codebook": (VOCAB, RANK),
                  "hidden_projection.weight": (RANK, WIDTH)}  # fmt: skip
        shapes = {f"candidate_selector.{name}": shape for name, shape in shapes.items()}
        for half in (f"layers.{layer}.{name}" for layer in (0, 1) for name in ("attention_conv", "mlp_conv")):
            shapes |= {f"{half}.base_kernel": (2, TAPS_OF_CONV, WIDTH),
                       f"{half}.kernel_projection.weight": (2 * TAPS_OF_CONV * WIDTH // GROUP, WIDTH)}  # fmt: skip
        return random_weights(shapes, seed=9)
    if form == "xpress":
        shapes = {"token_embed": (VOCAB, RANK), "down_h": (RANK, WIDTH), "down_g": (RANK, WIDTH),
                  "in_proj": (RANK, 3 * RANK), "mlp_gate": (2 * RANK, RANK), "mlp_up": (2 * RANK, RANK),
                  "mlp_down": (RANK, 2 * RANK), "readout": (VOCAB, RANK)}  # fmt: skip
        shapes = {f"refiner_head.{name}.weight": shape for name, shape in shapes.items()}
        return {name: 2 * tensor for name, tensor in
                random_weights({**shapes, "refiner_head.mix_l": (RANK, BLOCK, BLOCK)}, seed=9).items()}  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"markov_w1.weight": (VOCAB, RANK), "markov_w2.weight": (WORDS, RANK)}
    if form == "gated":
        shapes |= {"gate_proj.weight": (RANK, WIDTH + RANK), "gate_proj.bias": (RANK,)}
    if form == "rnn":
        shapes["joint_proj.weight"] = (3 * RANK, 2 * RANK + WIDTH)
    scores = random_weights({"lm_head.weight": (WORDS, WIDTH)}, seed=8)
    named = {f"markov_head.{name}": 4 * tensor for name, tensor in random_weights(shapes, seed=7).items()}
    id_W = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:WORDS].sort().values
    confidence = {"confidence_head.proj.weight": torch.zeros(1, WIDTH + RANK)}
    return {**named, **scores, **confidence, "d2t": id_W - torch.arange(WORDS)}


def refined(rows_BD: Tensor, before: Sequence[int]) -> Tensor:
    """Return xPress's additions (B, V) to scores of rows, of which the first have these tokens before them."""
    tensors = {name.removeprefix("refiner_head."): tensor for name, tensor in corrections("xpress").items()}
    token_B = torch.tensor([*before, *[0] * len(rows_BD)])[: len(rows_BD)]
    inputs = rows_BD @ tensors["down_h.weight"].T, (rows_BD.mean(0) @ tensors["down_g.weight"].T).expand(BLOCK, -1)
    row_BR = torch.cat([*inputs, tensors["token_embed.weight"][token_B]], -1) @ tensors["in_proj.weight"].T
    row_BR = row_BR + torch.einsum("rkj,jr->kr", tensors["mix_l"].tril(), row_BR)
    gate_BI = torch.nn.functional.silu(row_BR @ tensors["mlp_gate.weight"].T)
    row_BR = row_BR + (gate_BI * (row_BR @ tensors["mlp_up.weight"].T)) @ tensors["mlp_down.weight"].T
    return row_BR @ tensors["readout.weight"].T


def selected(scores_V: Tensor, row_D: Tensor, before: int) -> Tensor:
    """Return DFlash 2's scores behind a token: those of candidates alone."""
    tensors = {name.removeprefix("candidate_selector."): tensor for name, tensor in corrections("dflash2").items()}
    asked_R = tensors["predecessor_codebook"][before] * (tensors["hidden_projection.weight"] @ row_D)
    word_C = scores_V.topk(CANDIDATES).indices
    return torch.full((VOCAB,), -torch.inf).index_copy(
        0, word_C, scores_V[word_C] + tensors["successor_codebook"][word_C] @ asked_R
    )


def convolved(half: str, turn: int, rows_BD: Tensor, given_BD: Tensor) -> Tensor:
    """Return a block's rows mixed with those before them, by kernels that rows given to the sublayer choose."""
    tensors = corrections("dflash2")
    kernels = (given_BD @ tensors[f"{half}.kernel_projection.weight"].T).view(BLOCK, 2, TAPS_OF_CONV, -1)
    factors_BCD = tensors[f"{half}.base_kernel"][turn] + kernels[:, turn].repeat_interleave(GROUP, -1)
    return torch.stack([
        sum(factors_BCD[row, tap] * rows_BD[row - tap] for tap in range(min(row + 1, TAPS_OF_CONV)))
        for row in range(BLOCK)])  # fmt: skip


def block_rows(form: str, context_TD: Tensor, block_BD: Tensor, is_near_BS: Tensor) -> Tensor:
    """Return the rows behind the norm of a block with convolutions, behind committed tokens."""
    tensors = dflash(form)[1].state_dict()
    place_S = torch.arange(len(context_TD) + BLOCK)
    for layer in (0, 1):

        def get(name: str, layer: int = layer) -> Tensor:
            return tensors[f"layers.{layer}.{name}.weight"]

        halves = [f"layers.{layer}.{name}" for name in ("attention_conv", "mlp_conv")]
        given_BD = normed(block_BD, get("input_layernorm"))
        rows_BD = convolved(halves[0], 0, given_BD, given_BD)
        both_SD = torch.cat([context_TD, rows_BD])
        query_HBK = turned(normed(heads(rows_BD, get("self_attn.q_proj")), get("self_attn.q_norm")), place_S[-BLOCK:])
        keys_HSK = turned(normed(heads(both_SD, get("self_attn.k_proj")), get("self_attn.k_norm")), place_S)
        score_HBS = query_HBK @ keys_HSK.transpose(1, 2) / HEAD_DIM**0.5
        score_HBS = score_HBS if not layer else score_HBS.masked_fill(~is_near_BS, -torch.inf)
        mixed_HBK = score_HBS.softmax(-1) @ heads(both_SD, get("self_attn.v_proj"))
        out_BD = mixed_HBK.transpose(0, 1).reshape(BLOCK, -1) @ get("self_attn.o_proj").T
        block_BD = block_BD + convolved(halves[0], 1, out_BD, given_BD)
        given_BD = normed(block_BD, get("post_attention_layernorm"))
        rows_BD = convolved(halves[1], 0, given_BD, given_BD)
        gate_BI = torch.nn.functional.silu(rows_BD @ get("mlp.gate_proj").T)
        out_BD = (gate_BI * (rows_BD @ get("mlp.up_proj").T)) @ get("mlp.down_proj").T
        block_BD = block_BD + convolved(halves[1], 1, out_BD, given_BD)
    return normed(block_BD, tensors["norm.weight"])


def corrected(form: str, rows_BD: Tensor, path: Sequence[int], first: int) -> Tensor:
    """Return the scores (V) of what follows a path below a token, of rows behind the norm."""
    tensors = {name.removeprefix("markov_head."): tensor for name, tensor in corrections(form).items()}
    state_R = torch.zeros(RANK)
    for row_D, token in zip(rows_BD, (first, *path), strict=False):
        added_R = tensors["markov_w1.weight"][token]
        if form == "gated":
            gate_R = tensors["gate_proj.weight"] @ torch.cat([row_D, added_R]) + tensors["gate_proj.bias"]
            added_R = gate_R.sigmoid() * added_R
        if form == "rnn":
            all_R = tensors["joint_proj.weight"] @ torch.cat([state_R, added_R, row_D])
            kept_R, new_R, out_R = all_R.view(3, RANK)
            state_R = kept_R.sigmoid() * state_R + (1 - kept_R.sigmoid()) * new_R.tanh()
            added_R = out_R.tanh()
        scores_W = tensors["lm_head.weight"] @ row_D + tensors["markov_w2.weight"] @ added_R
    none_V = torch.full((VOCAB,), -torch.inf)
    return none_V.index_copy(0, tensors["d2t"] + torch.arange(WORDS), scores_W)


@torch.no_grad()
def dflash_scores(form: str, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
    """Return the scores (V) of what follows a path of any guesses, see `eagle3_scores`."""
    model = target()[1]
    hidden = model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    block_1B = torch.tensor([[tokens[-1], *[MASK] * (BLOCK - 1)]])
    place_S = torch.arange(len(tokens) - 1 + BLOCK)
    apart_BS = place_S[-BLOCK:, None] - place_S
    # z-lab's windows end before the position that is a window away
    is_near_BS = apart_BS.abs() <= WINDOW - (form in ("z-lab", "dflash2"))
    if form in ("z-lab", "speculators", "xpress"):
        is_near_BS &= apart_BS >= 0
    tapped_TW = torch.cat([hidden[layer + 1] for layer in LEFT], -1)
    embedded_1BD = model.get_input_embeddings()(block_1B)
    if form == "dflash2":
        weights = dflash(form)[1].state_dict()
        context_TD = normed(tapped_TW[0] @ weights["encoder.fc.weight"].T, weights["encoder.output_norm_enc.weight"])
        rows_BD = block_rows(form, context_TD, embedded_1BD[0] * SCALES["input_embedding_scale"], is_near_BS)
        row_D = rows_BD[len(path) + 1]
        cap = SCALES["final_logit_softcapping"]
        scores_V = cap * torch.tanh(model.lm_head(row_D) * SCALES["output_multiplier"] / cap)
        return selected(scores_V, row_D, [tokens[-1], *path][-1])
    out = dflash(form)[1](
        noise_embeds=embedded_1BD,
        context_hidden_states=tapped_TW,
        attention_mask={"full_attention": None, "sliding_attention": is_near_BS[None, None]},
    )
    rows_BD = out.last_hidden_state[0]
    if form in MARKOV:
        first = int(MARKOV[form].get("sample_from_anchor") is False)
        return corrected(form, rows_BD[first : first + len(path) + 1], path, tokens[-1])
    added_V = refined(rows_BD, [*tokens[-2:], *path])[len(path) + 1] if form == "xpress" else 0
    scores_V = model.lm_head(rows_BD[len(path) + 1]) + added_V
    return scores_V


GEMMA: dict[str, Any] = {"vocab_size": VOCAB, "intermediate_size": INNER, "num_attention_heads": HEADS,
                         "num_key_value_heads": GROUPS, "head_dim": HEAD_DIM, "global_head_dim": HEAD_DIM,
                         "sliding_window": WINDOW, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1,
                         "max_position_embeddings": 256}  # fmt: skip
GEMMA_KINDS = ["sliding_attention", "full_attention"]


@cache
def gemma(num_shared: int = 0) -> tuple[Path, Any]:
    """Return the folder of a tiny Gemma 4, whose last layers may share keys, and the model."""
    torch.manual_seed(5)
    # transformers 5.24 runs no Gemma 4 whose layers share keys and have no inputs of their own
    inputs = 8 if num_shared else 0
    config = Gemma4TextConfig(hidden_size=WIDTH, num_hidden_layers=4, layer_types=GEMMA_KINDS * 2,
                              num_kv_shared_layers=num_shared, hidden_size_per_layer_input=inputs,
                              vocab_size_per_layer_input=VOCAB, **GEMMA)  # fmt: skip
    model = Gemma4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.25 + ("norm" in name))
    folder = Path(mkdtemp())
    model.save_pretrained(folder)
    return folder, model


@cache
def assistant(*, has_clusters: bool = False) -> tuple[Path, Any]:
    """Return the folder of an assistant of such a target, and the library's model of it."""
    torch.manual_seed(6)
    text = dict(GEMMA, hidden_size=16, num_hidden_layers=2, layer_types=GEMMA_KINDS, num_kv_shared_layers=2,
                hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)  # fmt: skip
    clusters = {"use_ordered_embeddings": has_clusters, "num_centroids": 16, "centroid_intermediate_top_k": 5}
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=WIDTH, **clusters)
    model = Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.25 + ("norm" in name))
        if has_clusters:
            model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    folder = Path(mkdtemp())
    model.save_pretrained(folder)
    return folder, model


@torch.no_grad()
def assistant_scores(num_shared: int, has_clusters: bool, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
    """Return the scores (V) behind a path of guesses, see `eagle3_scores`."""
    model = gemma(num_shared)[1]
    out = model.model(torch.tensor([tokens[:-1]]), return_shared_kv_states=True)
    keys = {kind: tuple(states[:, :, -WINDOW - 1 :] if kind == GEMMA_KINDS[0] else states for states in both)
            for kind, both in out.shared_kv_states.items()}  # fmt: skip
    hidden_11D = out.last_hidden_state[:, -1:]
    for token in (tokens[-1], *path):
        embedded_11D = model.get_input_embeddings()(torch.tensor([[token]]))
        given = torch.cat([embedded_11D, hidden_11D], -1)
        place = torch.tensor([[len(tokens) - 1]])
        result = assistant(has_clusters=has_clusters)[1](inputs_embeds=given, position_ids=place, shared_kv_states=keys)
        hidden_11D = result.last_hidden_state
    scores_V: Tensor = result.logits[0, -1]
    return scores_V
