"""Tiny random checkpoints of every family, drafts that agree with them often but not always, and models that recite."""

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from plans import plan_memory
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from offload.checkpoint.open import open_checkpoint

VOCAB_SIZE = 199
LINE_BYTES = 64  # of a processor's cache
Pair = tuple[Path, Path]  # folders of a target and of its draft
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_SLIDING = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}
_EXPERTS = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, rope_parameters=_LLAMA3_ROPE),
    "llama-tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "qwen3-sliding": lambda: Qwen3Config(**SIZES, head_dim=16, **_SLIDING),
    "mistral-sliding": lambda: MistralConfig(**SIZES, sliding_window=24),
    "phi3": lambda: Phi3Config(**SIZES, sliding_window=24),
    "gemma2": lambda: Gemma2Config(**SIZES, head_dim=16, sliding_window=24),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=24),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SIZES, head_dim=16, **_EXPERTS),
}


def build(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random model with logits peaked enough that greedy text is not one token for ever."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.12)
        else:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def save(model: PreTrainedModel, directory: Path, *, max_shard_size: str = "150KB") -> Path:
    """Write a checkpoint; small shards make layers straddle files."""
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def displaced(directory: Path, behind: int, line: int = LINE_BYTES) -> Path:
    """Return the files, with data that begin `behind` bytes, a multiple of 8, behind where a line of a cache does."""
    for path in directory.glob("*.safetensors"):
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = raw[8 : 8 + size].rstrip()
        header += b" " * (-(8 + len(header) - behind) % line)
        path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size :])
    return directory


def save_pair(config: PreTrainedConfig, directory: Path, *, noise: float = 0.006, seed: int = 0) -> Pair:
    """A target, and as its draft the same model with noise on every matrix: right often, wrong often enough."""
    model = build(config, seed)
    target = save(model, directory / "target")
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data += noise * torch.randn_like(parameter)
    return target, save(model, directory / "draft")


def streaming_ram(target: Path, draft: Path | None = None, *, num_slots: int = 3, **options: Any) -> int:
    """A budget with room for these slots and no more; without a draft the model is its own."""
    files = (open_checkpoint(target), open_checkpoint(draft or target))
    usual = {"dtype": "auto", "context": 256, "num_nodes": 9, "experts": "layers"}
    roomy = plan_memory(files, ram=1 << 40, **(usual | options))
    return roomy.fixed_bytes + num_slots * max(roomy.layer_bytes) + 100


def random_ids(num_tokens: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


def finished(run: Any) -> Any:
    """Read a run to its end, and return its result."""
    for _ in run:
        pass
    return run.result()


def advance(decoder: Any, runs: Sequence[Any]) -> list[str]:
    """One pass for all of these runs: the piece of text that each has gained by it."""
    for error in filter(None, decoder.step_all(runs)):
        raise error
    return [run.take().text for run in runs]


def save_tokenizer(
    directory: Path, pieces: Sequence[str | bytes] = (), *, chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """Byte-level and with `VOCAB_SIZE` entries: text is encoded byte by byte; longer `pieces` are only ever decoded."""
    byte_to_char = bytes_to_unicode()
    singles = [10, *range(32, 127), *range(0x80, 0xC0), 0xC3, 0xE2, 0xE6, 0xF0]  # ASCII, and bytes of some longer UTF-8
    wanted = [bytes([byte]) for byte in singles] + [p.encode() if isinstance(p, str) else p for p in pieces]
    tokens = ["<pad>", "<s>", "</s>", *dict.fromkeys("".join(byte_to_char[b] for b in piece) for piece in wanted)]
    tokens += [f"<unused{index}>" for index in range(VOCAB_SIZE - len(tokens))]
    assert len(tokens) == VOCAB_SIZE, f"{len(tokens)} entries, at most {VOCAB_SIZE}"
    raw = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=chat_template, **special)
    tokenizer.save_pretrained(directory)
    return tokenizer


def save_reciter(
    directory: Path, pieces: Sequence[str | bytes], *others: Sequence[str], ends: bool = False, **options: str
) -> Path:
    """A model with a tokenizer that greedily writes pieces[1], pieces[2], ... after a prompt that ends in pieces[0].

    Then it ends, or begins again with pieces[0]. The pieces must differ, because only the last token decides. It
    writes the others in the same way, each to an end.
    """
    tokenizer = save_tokenizer(directory, [*pieces, *chain.from_iterable(others)], **options)
    config = FAMILIES["llama"]()
    config.eos_token_id, config.max_position_embeddings = tokenizer.eos_token_id, 1 << 16
    model = build(config)
    byte_to_char = bytes_to_unicode()

    def ids_of(pieces: Sequence[str | bytes]) -> list[int]:
        names = ["".join(byte_to_char[b] for b in (p.encode() if isinstance(p, str) else p)) for p in pieces]
        ids: list[int] = tokenizer.convert_tokens_to_ids(names)
        return ids

    ids = ids_of(pieces)
    chains = [[*ids, tokenizer.eos_token_id if ends else ids[0]]]
    chains += [[*ids_of(other), tokenizer.eos_token_id] for other in others]
    model.lm_head.weight.data.zero_()
    model.model.norm.weight.data.fill_(1)
    for layer in model.model.layers:
        for writer in (layer.self_attn.o_proj, layer.mlp.down_proj):
            writer.weight.data.zero_()
            writer.weight.data[0, 0] = 1e-9  # adds nothing; a matrix of zeros would be told of as damage
    for token, follower in chain.from_iterable(map(pairwise, chains)):
        model.lm_head.weight.data[follower] += model.model.embed_tokens.weight.data[token]
    return save(model, directory)
