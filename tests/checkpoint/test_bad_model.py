"""Models that cannot be run: drafts of strangers, architectures without a way back, code in a checkpoint."""

import json
from pathlib import Path

import pytest
from refusals import BOTH, ENOUGH, assert_refused, config, drop, generate, header
from shell import shell
from tiny import FAMILIES, VOCAB_SIZE, build, save, save_reciter, save_tokenizer

from offload.checkpoint.safetensors import open_checkpoint

pytestmark = pytest.mark.usefixtures("_instant_link")


@pytest.mark.usefixtures("_no_weights")
def test_draft_with_another_vocabulary_is_refused(sound: Path, tmp_path: Path) -> None:
    stranger = save_reciter(tmp_path / "stranger", [":", " un", " deux"])
    outcome = generate(sound, "-d", stranger, "-p", "Count:")
    assert_refused(outcome, "the draft must share the target's vocabulary", "stranger", "target's family")


@pytest.mark.usefixtures("_no_weights")
def test_draft_of_another_width_is_refused(sound: Path, tmp_path: Path) -> None:
    """Without tokenizers to compare, the widths decide."""
    settings = FAMILIES["llama"]()
    settings.vocab_size = VOCAB_SIZE + 1
    draft = save(build(settings), tmp_path / "wide")
    outcome = generate(sound, "-d", draft, "-p", "Count:")
    assert_refused(outcome, "share the target's vocabulary", f"{VOCAB_SIZE + 1} entries", f"against {VOCAB_SIZE}")


def test_broken_draft_is_refused(sound: Path, broken: Path) -> None:
    drop("*-00002-of-*")(broken)
    for command in BOTH:
        assert_refused(shell(*command, "-m", sound, "-d", broken, "--ram", "1GiB"), "model-00002-of-", "missing")


_SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
STRANGERS = {
    "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 4},
    "bart": {"hidden_size": 64, "num_hidden_layers": 4},
    "bert": _SIZES,
    "mamba": _SIZES,
    "falcon_h1": _SIZES,
    "recurrent_gemma": _SIZES,
    "qwen3_next": {**_SIZES, "layer_types": [*["linear_attention"] * 3, "full_attention"]},
    "rwkv": _SIZES,
    "never_heard_of": _SIZES,
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_unsupported_architecture_is_refused(kind: str, broken: Path) -> None:
    (broken / "config.json").write_text(json.dumps({"model_type": kind, **STRANGERS[kind]}))
    assert_refused(generate(broken, "-p", "Count:"), f"model type {kind}")


def test_linear_attention_is_refused_for_its_state(broken: Path) -> None:
    (broken / "config.json").write_text(json.dumps({"model_type": "qwen3_next", **STRANGERS["qwen3_next"]}))
    outcome = generate(broken, "-p", "Count:")
    assert_refused(outcome, "linear_attention", "state cannot be rolled back", "Llama, Qwen")


def test_expert_without_a_partner_is_refused(tmp_path: Path) -> None:
    """Tensors that transformers fuses: every expert must bring both halves."""
    directory = save(build(FAMILIES["mixtral"]()), tmp_path / "experts", max_shard_size="1GB")
    save_tokenizer(directory)
    names = open_checkpoint(directory).tensors
    lost = next(name for name in sorted(names) if ".2.w1." in name)
    header(lambda content: content.update(spare=content.pop(lost)))(directory)
    assert_refused(generate(directory, "-p", "Count:"), "experts", "download the checkpoint again")


# Code that a checkpoint brings along

SPY = """
from pathlib import Path
Path({was_run!r}).touch()
from transformers import LlamaConfig as Config, LlamaForCausalLM as Model, PreTrainedTokenizerFast as Tokenizer
"""


def bring_code(directory: Path) -> None:
    (directory / "spy.py").write_text(SPY.format(was_run=str(directory / "was_run")))  # it is copied before it is run
    config(model_type="spy", auto_map={"AutoConfig": "spy.Config", "AutoModelForCausalLM": "spy.Model"})(directory)
    path = directory / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), "auto_map": {"AutoTokenizer": [None, "spy.Tokenizer"]}}
    path.write_text(json.dumps({**settings, "tokenizer_class": "Tokenizer"}))


def test_code_of_a_checkpoint_is_never_run(broken: Path) -> None:
    """Nobody is asked: the question would show, and consent on stdin changes nothing."""
    bring_code(broken)
    outcome = shell("generate", "-m", broken, "-p", "Count:", *ENOUGH, stdin=b"y\ny\n")
    assert_refused(outcome, "model type spy is not supported")
    assert not list(broken.parent.rglob("was_run"))


def test_code_of_a_tokenizer_is_never_run(broken: Path) -> None:
    bring_code(broken)
    config(model_type="llama", auto_map=...)(broken)
    generate(broken, "-p", "Count:")
    assert not list(broken.parent.rglob("was_run"))
