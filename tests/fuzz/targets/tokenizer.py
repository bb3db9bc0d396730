"""Tokenizers of several kinds with all their files, and chat templates: a prompt is encoded, tokens are decoded."""

import base64
import json
import random
from functools import partial
from pathlib import Path

from case import Target
from damage import BYTES, JSON, only, other, special, text
from model_files import generate, save_files
from reciting import TEMPLATE
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

_KEYS = ("tokenizer_class", "auto_map", "model_max_length", "chat_template", "added_tokens_decoder", "eos_token",
    "bos_token", "pad_token", "unk_token", "extra_special_tokens", "additional_special_tokens", "add_bos_token",
    "clean_up_tokenization_spaces", "padding_side", "truncation_side", "split_special_tokens", "backend",
    "add_prefix_space", "legacy", "use_default_system_prompt", "tokenizer_file", "vocab_file", "name_or_path",
    "model_input_names", "special_tokens_map_file", "is_local", "fix_mistral_regex", "x")  # fmt: skip
_PARTS = ("model", "model.vocab", "model.merges", "model.type", "model.unk_id", "model.byte_fallback", "normalizer",
    "pre_tokenizer", "decoder", "post_processor", "added_tokens", "truncation", "padding", "version")  # fmt: skip
_PATTERNS = ("(a+)+$", "(?:", "(.*)*x", "\\p{L}{1,10000000}", "")
_SPLITS = tuple(
    {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} for pattern in _PATTERNS
)
_NORMALIZERS = (*({"type": "Replace", "pattern": {"Regex": pattern}, "content": "a" * 99} for pattern in _PATTERNS),
    {"type": "Replace", "pattern": {"String": ""}, "content": "xx"}, {"type": "Prepend", "prepend": "x" * 10**6},
    {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(range(200))).decode()},
    {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\xff\xff\xff\x7f" * 9).decode()},
    {"type": "Precompiled", "precompiled_charsmap": ""})  # fmt: skip
_HOSTILE_PARTS = {"normalizer": _NORMALIZERS, "pre_tokenizer": _SPLITS, "decoder": _NORMALIZERS[:6],
    "truncation": ({"max_length": 0, "strategy": "LongestFirst", "stride": 2**63, "direction": "Right"},
        {"max_length": 2, "strategy": "LongestFirst", "stride": 5, "direction": "Right"}),
    "padding": ({"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<pad>"}, {"strategy": "BatchLongest", "direction": "Right",
        "pad_to_multiple_of": 0, "pad_id": 2**32 - 1, "pad_type_id": 0, "pad_token": "x"})}  # fmt: skip
# Each of them asks for too much: of time, of memory, of what is none of its business.
_HOSTILE = (
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10**10 }}", "{{ 10**10**9 }}", "{{ [0] * 10**10 }}", "{{ '%1000000000d' | format(1) }}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "{% include '/etc/passwd' %}", "{{ ''.__class__.__mro__ }}",
    "{{ raise_exception('a\\nb\\x1b[31m') }}", "{{ messages[9].x.y }}", "{{ 'a'.ljust(10**10) }}",
    "{{ lipsum(10**9) }}",
    "{% set x = ['x' * 1000] %}{% for i in range(60) %}{% set x = x + x %}{% endfor %}", "\ufffe", "{% if %}",
    "{{ strftime_now('%Y' * 10**7) }}", "{{ messages | tojson(indent=10**9) }}", "{% " * 5000, "",
)  # fmt: skip


def _put_hostile(path: Path, rng: random.Random) -> str:
    """A part of tokenizer.json that does as it says, and says too much."""
    part = rng.choice(sorted(_HOSTILE_PARTS))
    value = rng.choice(_HOSTILE_PARTS[part])
    path.write_text(json.dumps({**json.loads(path.read_text()), part: value}))
    return f"{part} {str(value)[:80]}"


def _save_unigram(folder: Path) -> None:
    """SentencePiece's kind, with a normaliser, bytes to fall back to, and what is put around a text."""
    save_files(folder)
    pieces = [(token, 0.0) for token in ("<pad>", "<s>", "</s>", "<unk>")]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(128)]
    pieces += [(word, -3.0) for word in ("\u2581Count", "\u2581a", ":", "C", "o", "u", "n", "t", "\u2581")]
    pieces += [(f"<unused{index}>", -20.0) for index in range(199 - len(pieces))]
    raw = Tokenizer(models.Unigram(pieces, unk_id=3, byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "\u2581")])
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace()])
    raw.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    raw.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    special_tokens = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=raw, **special_tokens).save_pretrained(folder)


def _save_vocabulary(folder: Path) -> None:
    """GPT-2's files, which transformers converts."""
    save_files(folder)
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (folder / "tokenizer.json").unlink()
    vocab["Co"], vocab["un"] = vocab.pop("<unused1>"), vocab.pop("<unused2>")
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\nC o\nu n\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _save_notes(folder: Path) -> None:
    """What older models have beside their vocabularies, and those that also see."""
    _save_vocabulary(folder)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>", "pad_token": {"content": "<pad>",
        "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}}))  # fmt: skip
    (folder / "added_tokens.json").write_text(json.dumps({"<pad>": 0, "</s>": 2}))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))


_NOTES = ("special_tokens_map.json", "added_tokens.json", "chat_template.json")
_SETTINGS = (only(*_KEYS), only(*_KEYS), *JSON)
_FILES = {"tokenizer.json": (only(*_PARTS), only(*_PARTS), _put_hostile, *JSON), "tokenizer_config.json": _SETTINGS}
TARGETS = [
    Target("tokenizer/bpe", save_files, _FILES, generate),
    Target("tokenizer/unigram", _save_unigram, _FILES, generate),
    Target("tokenizer/vocabulary", _save_vocabulary,
        {"vocab.json": JSON, "merges.txt": (text, special, *BYTES), "tokenizer_config.json": _SETTINGS}, generate),
    Target("tokenizer/notes", _save_notes, dict.fromkeys(_NOTES, (only(*_KEYS), *JSON)), generate),
    Target("tokenizer/template", partial(save_files, template=TEMPLATE),
        {"chat_template.jinja": (text, text, special, other(*_HOSTILE), *BYTES)}, generate),
]  # fmt: skip
