"""Models in GGUF files, end to end: what is written is what transformers writes from the weights they stand for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import CURRENT, MODELS, Written, write_gguf
from matrix import matrix
from passes import text_scores
from plans import model_shape, plan_memory
from shell import shell
from test_tiny import prompts
from tiny import VOCAB_SIZE, save, save_tokenizer
from torch import Tensor

import offload
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.open import open_headers
from offload.engine.build import resident_model
from offload.engine.tokenizer import load_tokenizer
from offload.errors import UserError
from offload.model.tree_model import TreeModel

TOKEN_T = torch.tensor(prompts()[1])


def own_logits(checkpoint: Checkpoint) -> Tensor:
    model = resident_model(checkpoint, "float32")
    logits_TV = text_scores(model, TOKEN_T)
    model.close()
    return logits_TV


@torch.no_grad()
def wanted_logits(written: Written) -> Tensor:
    return written.model(TOKEN_T[None]).logits[0]


def is_close(first: Tensor, other: Tensor) -> bool:
    return torch.allclose(first, other, rtol=1e-4, atol=1e-4)


ALWAYS = {("llama", "Q8_0"), ("gemma3", "Q8_0")}  # rows and norms that a file has in another form
TRIED = [(name, kind) for name in MODELS for kind in ("Q4_K", "Q8_0")]
TRIED += [(name, kind) for name in ("llama", "gemma3") for kind in ("Q5_K", "Q6_K", "Q5_0", "F16")]  # stored changed


@pytest.mark.parametrize(
    ("name", "kind"), [pytest.param(*trial, marks=[pytest.mark.always] if trial in ALWAYS else []) for trial in TRIED]
)
def test_logits_are_those_of_the_expanded_weights(name: str, kind: str, tmp_path: Path) -> None:
    written = write_gguf(MODELS[name](), tmp_path / "m.gguf", kind)
    assert is_close(own_logits(open_headers(written.path)), wanted_logits(written))


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "Q8_0") for name in MODELS), ("mistral", "Q6_K"), ("mistral", "F16")]
)
def test_norms_and_biases_may_be_of_any_kind(name: str, kind: str, tmp_path: Path) -> None:
    """`generate` takes what `plan` and `verify` do."""
    config = MODELS[name]()
    config.attention_bias = name == "llama"  # whose biases have heads
    written = write_gguf(config, tmp_path / "m.gguf", "Q4_K", vectors=kind)
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "config.json").write_text(json.dumps(config.to_dict()))
    checkpoint = open_headers(written.path, tmp_path / "original")
    assert all(entry.dtype == kind for entry in checkpoint.tensors.values() if len(entry.shape) == 1)
    assert is_close(own_logits(checkpoint), wanted_logits(written))
    flags = ("--config", tmp_path / "original")
    for command in (
        ("verify", written.path),
        ("plan", "-m", written.path, "--ram", "1GiB", "--disk-speed", "2GB", *flags),
    ):
        done = shell(*command)
        assert done.code == 0, done.err


# the others need a config of their own
ALONE = ("qwen3moe", "mixtral")


def written_with_config(name: str, kind: str, folder: Path, **options: Any) -> Written:
    """A file, with the config of its model in the folder."""
    config = CURRENT[name]()
    config.eos_token_id = None
    options = {"seed": 2 if name == "qwen35" else 0, **options}
    written = write_gguf(config, folder / "m.gguf", kind, says={"tokenizer.ggml.eos_token_id": None}, **options)
    if name not in ALONE:
        (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return written


@matrix("name", CURRENT, always=["qwen35moe", "qwen3moe"], daily=2)
def test_logits_of_current_families(name: str, tmp_path: Path) -> None:
    written = written_with_config(name, "Q8_0", tmp_path)
    assert is_close(own_logits(open_headers(written.path)), wanted_logits(written))


@pytest.mark.parametrize("name", ["deepseek2", "qwen35moe"])
def test_gate_and_up_of_experts_may_be_one_stack(name: str, tmp_path: Path) -> None:
    written = written_with_config(name, "Q8_0", tmp_path, fuses=True)
    checkpoint = open_headers(written.path)
    assert any(name.endswith("experts.gate_up_proj") for name in checkpoint.tensors)
    assert is_close(own_logits(checkpoint), wanted_logits(written))


@matrix("kind", ["IQ4_XS", "IQ4_NL", "MXFP4", "Q2_K", "Q3_K", "Q5_K", "BF16"], always=["MXFP4"], daily=1)
def test_logits_of_mixtures_of_any_kind(kind: str, tmp_path: Path) -> None:
    """In several parts of a file."""
    written = written_with_config("qwen3moe", kind, tmp_path, max_tensors=9)
    assert is_close(own_logits(open_headers(written.path)), wanted_logits(written))


# As files of today are mixed: kinds go by tensor and by layer, and experts' gate and up need not be of one.
MIXES: dict[str, tuple[str, dict[str, str]]] = {
    "qwen3moe": ("Q4_K", {"attn_v": "Q6_K", "ffn_up_exps": "IQ4_XS", "ffn_down_exps": "Q5_K", "1.ffn_up_exps": "F16",
                          "2.ffn_gate_exps": "Q8_0", "output": "BF16"}),
    "gpt-oss-moe": ("Q8_0", {f"ffn_{part}_exps": "MXFP4" for part in ("gate", "up", "down")}
                    | {"1.ffn_up_exps": "Q5_1", "token_embd": "Q4_K"}),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXES)
def test_kinds_may_go_by_tensor_and_layer(name: str, tmp_path: Path) -> None:
    kind, mix = MIXES[name]
    written = written_with_config(name, kind, tmp_path, mix=mix, max_tensors=9)
    checkpoint = open_headers(written.path)
    assert len(checkpoint.shards) > 2 and {*mix.values()} <= {tensor.dtype for tensor in checkpoint.tensors.values()}
    assert is_close(own_logits(checkpoint), wanted_logits(written))
    wanted = greedy(written, prompts()[1], 12)
    options: dict[str, Any] = {"ram": "1GiB", "context": 128, "threads": 1, "dtype": "float32", "experts": "demand"}
    with offload.load(written.path, written.path, tree="16x8", **options) as decoder:
        assert decoder.generate(prompts()[1], max_new_tokens=12).token_ids == wanted


@matrix("name", [family for family in CURRENT if "moe" in family or family == "mixtral"], always=["qwen3moe"], daily=1)
def test_experts_of_a_file_come_one_by_one(name: str, tmp_path: Path) -> None:
    written = written_with_config(name, "Q4_0", tmp_path)
    wanted = greedy(written, prompts()[1], 16)
    options: dict[str, Any] = {"ram": "1GiB", "context": 128, "threads": 1, "dtype": "float32"}
    for experts in ("demand", "layers"):
        with offload.load(written.path, written.path, experts=experts, tree="16x8", **options) as decoder:
            assert decoder.plan.has_experts == (experts == "demand")
            assert decoder.generate(prompts()[1], max_new_tokens=16).token_ids == wanted


@matrix("name", CURRENT, always=["qwen35moe"], daily=2)
def test_no_more_is_expanded_at_once_than_was_planned(name: str, tmp_path: Path) -> None:
    checkpoint = open_headers(written_with_config(name, "Q4_0", tmp_path).path)
    shape = model_shape(checkpoint, "float32")
    for planned in filter(None, (shape, shape.experts)):
        model = TreeModel(checkpoint, "float32", on_demand=planned is not shape)
        assert 0 < model._expanded.scratch_bytes <= planned.scratch_bytes


@pytest.mark.parametrize("name", ["qwen35", "deepseek2", "gpt-oss-moe"])
def test_rules_that_no_file_states_need_a_config(name: str, tmp_path: Path) -> None:
    written = write_gguf(CURRENT[name](), tmp_path / "m.gguf", "Q8_0")
    with pytest.raises(UserError, match="give `config`, the folder or hub id of the original model"):
        open_headers(written.path)


def greedy(written: Written, prompt: list[int], num_tokens: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            ids.append(int(written.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_streamed_text_with_a_draft_in_safetensors(tmp_path: Path) -> None:
    """The target's layers are streamed as they are stored; the draft is the model with noise."""
    config = MODELS["llama"]()
    config.eos_token_id = None
    written = write_gguf(config, tmp_path / "m.gguf", "Q4_K", says={"tokenizer.ggml.eos_token_id": None})
    wanted = greedy(written, prompts()[1], 16)
    for weight in written.model.parameters():
        weight.data += 0.002 * torch.randn_like(weight)
    draft = save(written.model, tmp_path / "draft")
    files = open_headers(written.path), open_headers(draft)
    roomy = plan_memory(files, ram=1 << 40, dtype="float32", context=128, num_nodes=16)
    ram = roomy.fixed_bytes + 2 * max(roomy.layer_bytes) + 100
    options: dict[str, Any] = {"ram": ram, "context": 128, "tree": "16x8", "threads": 1, "dtype": "float32"}
    with offload.load(written.path, draft, **options) as decoder:
        assert decoder.plan.num_resident == 0, "all layers are streamed"
        for tree in ("none", "16x8"):
            assert decoder.generate(prompts()[1], max_new_tokens=16, tree=tree).token_ids == wanted, tree


def vocabulary(folder: Path) -> dict[str, Any]:
    """What a file says of the tiny tokenizer, and that tokenizer in a folder."""
    tokenizer = save_tokenizer(folder, chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}:")
    tokens = [tokenizer.convert_ids_to_tokens(index) for index in range(VOCAB_SIZE)]
    kinds = [3 if index < 3 else 5 if token.startswith("<unused") else 1 for index, token in enumerate(tokens)]
    said = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": kinds, "add_bos_token": False}
    named = {f"tokenizer.ggml.{key}": value for key, value in said.items()}
    tokens[2] = "<|endoftext|>"  # as in all of Qwen's
    tokens[-2:] = "<p", "p>"  # which the merges make; of one alone transformers 5.17 takes the letters for several
    return {**named, "tokenizer.ggml.merges": ["< p", "p >"], "tokenizer.chat_template": tokenizer.chat_template}


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file that has its own tokenizer and chat template, and the original's folder."""
    folder = tmp_path_factory.mktemp("talking")
    says = vocabulary(folder / "original")
    config = MODELS["qwen3"]()
    write_gguf(config, folder / "m.gguf", "Q4_K", says=says)
    (folder / "original" / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


ENOUGH = ("--ram", "1GiB", "--context", "128", "--threads", "1", "-n", "4")


def test_the_tokenizer_of_the_file(talking: Path) -> None:
    tokenizer, original = load_tokenizer(talking / "m.gguf"), load_tokenizer(talking / "original")
    assert tokenizer("a one")["input_ids"] == original("a one")["input_ids"]
    assert tokenizer.chat_template == original.chat_template and tokenizer.eos_token_id == 2


def test_commands_take_files(talking: Path) -> None:
    plain = shell("generate", "-m", talking / "m.gguf", "-p", "a one", *ENOUGH)
    assert plain.code == 0 and plain.out, plain.err
    for model in (talking, talking / "m.gguf"):
        named = shell("generate", "-m", model, "--config", talking / "original", "-p", "a one", *ENOUGH)
        assert (named.code, named.out) == (0, plain.out), named.err
    drafted = shell("generate", "-m", talking / "m.gguf", "-d", talking / "m.gguf", "-p", "a one", *ENOUGH)
    assert (drafted.code, drafted.out) == (0, plain.out), drafted.err
    planned = shell("plan", "-m", talking / "m.gguf", "--ram", "1GiB", "--disk-speed", "2GB", "--json")
    assert json.loads(planned.out)["models"]["target"]["num_parameters"] > 2e6
    said = shell("chat", "-m", talking / "m.gguf", *ENOUGH, "--quiet", stdin=b"a one\n")
    assert said.code == 0 and said.out, said.err


def test_without_the_package_one_line_says_what_to_do(talking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.checkpoint.gguf.find_spec", lambda name: None)
    outcome = shell("generate", "-m", talking / "m.gguf", "-p", "a one", *ENOUGH)
    assert outcome.code == 2 and "pip install gguf, or give --config" in outcome.err and outcome.err.count("\n") == 1
    named = shell("generate", "-m", talking / "m.gguf", "--config", talking / "original", "-p", "a one", *ENOUGH)
    assert named.code == 0, named.err
