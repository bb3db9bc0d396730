"""Heads that guess a block of tokens in one pass, as decoders beside a target, from headers alone.

DFlash by z-lab's names (z-lab/dflash at 1012959), as speculators write it (0.9, and at 261a82d), or
as Muse's assistant (transformers 5.24); DSpark (2607.05147); DFlash 2; xPress (2608.02438). They
differ in what the tokens before a position add to its scores (`drafting.corrections`), in
convolutions around their layers (`drafting.block_convolution`), and in who sees whom.

Invariant: a part of corrections that is not named here refuses the head.
"""

from math import isfinite

from offload.checkpoint.checkpoint import Block, Carried, Checkpoint
from offload.checkpoint.heads import (
    CORRECTIONS,
    DFLASH,
    OF_TYPE,
    OTHER_HEAD,
    beside,
    check_kind,
    decoder_name,
    layer_numbers,
    tapped_layers,
)
from offload.checkpoint.sizes import config_sizes
from offload.encoding.base import Settings
from offload.errors import UserError, require

_MOST_OF_BLOCK = 1024
_REFINER = (
    "token_embed",
    "down_h",
    "down_g",
    "in_proj",
    "mlp_gate",
    "mlp_up",
    "mlp_down",
    "readout",
)
# by the module in files: what a config states of it, and its parts
_CORRECTING = {
    "markov_head": ("markov_rank", ("markov_w1.weight", "markov_w2.weight")),
    "candidate_selector": (
        "selector_rank",
        ("predecessor_codebook", "successor_codebook", "hidden_projection.weight"),
    ),
    "refiner_head": ("xpress_rank", ("mix_l", *(f"{part}.weight" for part in _REFINER))),
}
_MARKOV_FORMS = {"vanilla": (), "gated": ("gate_proj.weight",), "rnn": ("joint_proj.weight",)}
_CONVOLUTIONS = ("attention_conv", "mlp_conv")
# of each layer's tensors one
_FIRST = "input_layernorm.weight"
_CONVOLVING = ("base_kernel", "kernel_projection.weight")


def dflash_checkpoint(target: Checkpoint, draft: Checkpoint) -> Checkpoint:
    """Return a block's head as a decoder. Raises `UserError`."""
    check_kind(draft, DFLASH)
    inner = draft.config.get("transformer_layer_config")
    config = dict(inner if isinstance(inner, dict) else draft.config)
    nested = draft.config.get("dflash_config")
    stated = {**draft.config, **(nested if isinstance(nested, dict) else {})}
    sizes = config_sizes(target)
    depth = sizes["num_hidden_layers"]
    layers = stated.get("target_layer_ids")
    mixer = draft.tensors.get("fc.weight")
    width, num_inputs = mixer.shape if mixer and len(mixer.shape) == 2 else (0, 0)
    if layers is None:
        # speculators number states by the layer they enter; one more may be named, for training
        # only
        num_read = num_inputs // sizes["hidden_size"]
        layers = layer_numbers(draft, stated.get("aux_hidden_state_layer_ids"))[:num_read]
    else:
        layers = [number + 1 for number in layer_numbers(draft, layers)]
    block = _block(draft, stated, sizes["vocab_size"], width)
    if str(config.get("model_type")) in OF_TYPE:
        config.setdefault("layer_types", ["sliding_attention"] * config.get("num_hidden_layers", 0))
    config["model_type"] = "qwen3"
    if type(window := config.get("sliding_window")) is int and not _is_of_z_lab(draft.config):
        # the position exactly a window away is seen as well
        config["sliding_window"] = window + 1
    carried = Carried(
        frozenset(),
        is_fed_normed=True,
        tapped=tapped_layers(draft, depth, [layer for layer in layers if layer != depth]),
        has_normed=depth in layers,
        block=block,
    )
    needed = _needed(draft, stated, block)
    for part, name, number in (
        ("predecessor_codebook", "selector_top_k", block.num_candidates),
        (_CONVOLVING[0], "conv_kernel_size and conv_group_size", block.convolution),
    ):
        is_stated = bool(number) or not any(need.endswith(part) for need in needed)
        require(is_stated, f"{draft.name}: a head with {part} states {name}", "none", OTHER_HEAD)
    made = beside(target, draft, carried, config, needed)
    known = {decoder_name(name) for name in needed} | {f"{CORRECTIONS}gate_proj.bias"}
    unknown = [name for name in made.tensors if name.startswith(CORRECTIONS) and name not in known]
    require(not unknown, f"{draft.name}: a head in a form that is not read", unknown, OTHER_HEAD)
    return made


def _is_of_z_lab(config: Settings) -> bool:
    names = f"{config.get('architectures')}".lower()
    return "dflash_config" in config or (
        "dflash" in names and "speculators_model_type" not in config
    )


def _block(draft: Checkpoint, stated: Settings, num_words: int, width: int) -> Block:
    """Return the block that a config describes. Raises `UserError`."""
    where = draft.name
    size = stated.get("block_size")
    mask = stated.get("mask_token_id")
    if type(size) is not int or type(mask) is not int or mask < 0 or not 1 < size <= _MOST_OF_BLOCK:
        states = f"a DFlash block states block_size, of 2 to {_MOST_OF_BLOCK}, and mask_token_id"
        got = f"{size!r:.40} and {mask!r:.40}"
        raise UserError(f"{where}: {states}, got {got}: {OTHER_HEAD}")
    # DSpark's blocks are anchored where nothing is said of it
    kind = f"{stated.get('speculators_model_type')}"
    is_of_dspark = "dspark" in f"{stated.get('architectures')} {kind}".lower()
    is_anchored = stated.get("sample_from_anchor", is_of_dspark)
    requirement = f"{where}: sample_from_anchor of a block is true or false"
    require(type(is_anchored) is bool, requirement, f"{is_anchored!r:.40}", OTHER_HEAD)
    is_causal = (False, False)
    if "speculators_model_type" in stated:
        is_causal = (False, stated.get("sliding_window_non_causal", kind == "dflash2") is not True)
    elif _is_of_z_lab(stated):
        said = stated.get("is_causal")
        is_causal = (False, True) if said is None else (said is True, said is True)
    num_candidates = _count(where, stated, "selector_top_k", num_words)
    num_taps = _count(where, stated, "conv_kernel_size", size)
    group = _count(where, stated, "conv_group_size", width)
    requirement = f"{where}: conv_group_size divides a width of {width}"
    require(not group or width % group == 0, requirement, group, OTHER_HEAD)
    convolution = (num_taps, width // group) if num_taps and group else None
    numbers = [
        _number(where, stated, name, usual)
        for name, usual in (
            ("input_embedding_scale", 1.0),
            ("output_multiplier", 1.0),
            ("final_logit_softcapping", 0.0),
        )
    ]
    return Block(size, mask, is_anchored, is_causal, num_candidates, convolution, *numbers)


def _count(where: str, stated: Settings, name: str, most: int) -> int:
    """Return a number of a config; 0 where it says none."""
    number = stated.get(name, 0)
    fits = type(number) is int and (1 <= number <= most or name not in stated)
    require(fits, f"{where}: {name} is a number, 1 to {most}", f"{number!r:.40}", OTHER_HEAD)
    return int(number)


def _number(where: str, stated: Settings, name: str, usual: float) -> float:
    number = stated.get(name)
    number = usual if number is None else number
    fits = type(number) in (int, float) and isfinite(number) and number >= 0
    require(fits, f"{where}: {name} is a number from 0", f"{number!r:.40}", OTHER_HEAD)
    return float(number)


def _needed(draft: Checkpoint, stated: Settings, block: Block) -> list[str]:
    """Return the tensors that a block's files have beside those of every block."""
    needed = list[str]()
    form = str(stated.get("markov_head_type") or "vanilla")
    for module, (rank, parts) in _CORRECTING.items():
        if stated.get(rank) or any(name.startswith(f"{module}.") for name in draft.tensors):
            of_form = _MARKOV_FORMS.get(form, (form,)) if module == "markov_head" else ()
            needed += [f"{module}.{part}" for part in (*parts, *of_form)]
    if block.convolution or any(name.endswith(_CONVOLVING[0]) for name in draft.tensors):
        layers = [name.removesuffix(_FIRST) for name in draft.tensors if name.endswith(_FIRST)]
        halves = [f"{layer}{name}" for layer in layers for name in _CONVOLUTIONS]
        needed += [f"{half}.{part}" for half in halves for part in _CONVOLVING]
    return needed
