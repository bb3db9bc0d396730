"""What targets share that read a model's folder: tiny ones of any kind, and the commands that read them."""

import json
import re
from pathlib import Path
from typing import Any

import small_t5
import torch
from shell import Outcome, shell
from tiny import VOCAB_SIZE, build, save, save_tokenizer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from offload.engine.tokenizer import load_tokenizer

torch.set_num_threads(1)
ENOUGH = ("--ram", "512MiB", "--context", "64", "--threads", "1", "--tree", "none", "--profile", "none", "--quiet")
_SIZES: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 16,
    "sliding_window": 24, "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12},
    "llama4_text": {"attention_chunk_size": 24, "intermediate_size_mlp": 96, "num_experts_per_tok": 1,
        "no_rope_layers": [1, 0]},
}  # fmt: skip


def config_of(family: str) -> PreTrainedConfig:
    """A small one of this model type."""
    usual = CONFIG_MAPPING[family]().to_dict()
    known = {key: value for key, value in _SIZES.items() if key in usual}
    return CONFIG_MAPPING[family](**{**known, **_OWN.get(family, {})})


def save_files(folder: Path, *, family: str = "llama", shards: bool = False, template: str | None = None) -> Path:
    """A model of two layers with its tokenizer."""
    save(build(config_of(family)), folder, max_shard_size="50KB" if shards else "1GB")
    save_tokenizer(folder, chat_template=template)
    return folder


def save_encoder_decoder(folder: Path) -> None:
    small_t5.save(small_t5.build("v1.1"), folder, "v1.1")
    save_tokenizer(folder)


def save_alike(folder: Path, *, family: str = "llama", shards: bool = False) -> None:
    """One that transformers loads whole, so that `generate_alike` really compares."""
    save_files(folder, family=family, shards=shards)
    assert _reference(folder) is not None, "nothing to compare with"


def keep_wanted(folder: Path, outcome: Outcome) -> None:
    """Write down what the sound files give, for `as_wanted`."""
    assert outcome.code == 0, outcome.err
    (folder / "wanted").write_text(outcome.out)


def as_wanted(folder: Path, outcome: Outcome) -> Outcome:
    """Files may be refused, but decide nothing: a command that ends well has written the same text."""
    assert outcome.code != 0 or outcome.out == (folder / "wanted").read_text(), f"another text: {outcome.out!r}"
    return outcome


def generate(model: Path, *others: object) -> Outcome:
    """Four tokens, greedily."""
    return sample(model, "--greedy", *others)


def sample(model: Path, *others: object) -> Outcome:
    """Four tokens as the model wishes them."""
    return shell("generate", "-m", model, "-p", "Count: a", "-n", 4, *ENOUGH, *others)


def generate_alike(model: Path) -> Outcome:
    """Generate in float32; what is accepted must be what transformers' own model of these files would have written.

    Nothing is compared where transformers does not load them whole, or where rounding would decide.
    """
    outcome = generate(model, "--dtype", "float32", "--json")
    if outcome.code == 0 and (reference := _reference(model)) is not None:
        said, prompt = json.loads(outcome.out), load_tokenizer(model)("Count: a")["input_ids"]
        ids = said["token_ids"]
        logits_TV = (
            reference(torch.tensor([[*prompt, *ids]]), return_dict=True).logits[0, len(prompt) - 1 : -1].double()
        )
        behind_T = logits_TV.max(-1).values - logits_TV[range(len(ids)), ids]
        assert float(behind_T.max()) <= 1e-3 * float(logits_TV.abs().max()), f"{ids}, transformers another: {behind_T}"
    return outcome


def _reference(model: Path) -> Any:
    """transformers' model, None where it has not all its weights from the files, or fails itself."""
    if max(map(int, re.findall(r"\d+", (model / "config.json").read_text()[:100_000])), default=0) > 1 << 20:
        return None  # it may take all memory
    try:
        with torch.inference_mode():
            model_read, info = AutoModelForCausalLM.from_pretrained(
                model, dtype=torch.float32, output_loading_info=True
            )
            model_read.eval()(torch.tensor([[1, 2]]))
    except Exception:
        return None
    return None if any(info.values()) else torch.inference_mode()(model_read)


def generate_with_draft(folder: Path) -> Outcome:
    """Four tokens with a static tree of the model in `draft`."""
    return sample(folder / "target", "-d", folder / "draft", "--tree", "4x2")


def plan(model: Path) -> Outcome:
    return shell("plan", "-m", model, "--ram", "512MiB", "--disk-speed", "1GB")
