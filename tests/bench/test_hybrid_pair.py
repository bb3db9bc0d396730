"""The hybrid and its twin: they begin as the dense model but for their mixers, and learn from the same windows.

Why: the comparison of acceptance rests on two models that differ in nothing else, and on a draft for each that learnt
from it alone. Models are tiny, texts patterns.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_llama import SIZES, save_small
from transformers import LlamaForCausalLM

from offload.bench.harness.setting import Setting
from offload.bench.harness.tables import Screen
from offload.bench.pairs import hybrid_pair as make
from offload.bench.pairs import training
from offload.bench.pairs.hybrid_pair import HYBRID, TWIN, Recipe, begun, hybrid_pair, setting_of
from offload.bench.pairs.training import Course
from offload.stats import Stats
from offload.trees.topology import DEFAULT_ACCEPTANCE, best_first

IDS = torch.arange(6000) % 7 + torch.arange(6000) // 500


@pytest.fixture
def dense(tmp_path: Path) -> LlamaForCausalLM:
    folder = save_small(tmp_path / "dense", num_hidden_layers=5)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def test_all_but_mixers_is_taken_over(dense: LlamaForCausalLM) -> None:
    """Norms count what they multiply by, and Qwen 3.5 stores one less."""
    hidden = torch.randn(1, 9, SIZES["hidden_size"], generator=torch.Generator().manual_seed(3))
    tokens = torch.arange(9)[None]
    hybrid, twin = begun(HYBRID, dense, 0), begun(TWIN, dense, 0)
    for model in (hybrid, twin):
        inner: Any = model.model
        assert torch.equal(inner.embed_tokens(tokens), dense.model.embed_tokens(tokens))
        assert model.lm_head.weight is inner.embed_tokens.weight
        for own, old in zip(inner.layers, dense.model.layers, strict=True):
            torch.testing.assert_close(own.mlp(hidden), old.mlp(hidden))
            for norm in ("input_layernorm", "post_attention_layernorm"):
                torch.testing.assert_close(getattr(own, norm)(hidden), getattr(old, norm)(hidden))
        torch.testing.assert_close(inner.norm(hidden), dense.model.norm(hidden))
    kinds = [hasattr(layer, "self_attn") for layer in hybrid.model.layers]
    assert kinds == [False, False, False, True, False]
    assert all(hasattr(layer, "self_attn") for layer in twin.model.layers)
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in (hybrid, twin)]
    assert abs(sizes[0] / sizes[1] - 1) < 0.2
    assert not torch.equal(hybrid(tokens).logits, begun(HYBRID, dense, 1)(tokens).logits), "mixers begin at random"


def test_both_learn_from_the_same_windows_until_each_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged, cache = tmp_path / "packaged", tmp_path / "cache"
    save_small(packaged / "target", num_hidden_layers=4)
    save_small(packaged / "draft", num_hidden_layers=1)
    for companion in training.COMPANIONS:
        (packaged / "target" / companion).write_text("{}")
    monkeypatch.setattr(training, "PAIR", packaged)
    monkeypatch.setattr(training, "cache_folder", lambda: cache)
    monkeypatch.setattr(training, "library_ids", lambda held_out: IDS[:1000] if held_out else IDS)
    recipe = Recipe(Course(9, 1e-3), hybrid_steps=2, twin_steps=3, draft=Course(2, 1e-3))
    seen: dict[str, list[list[int]]] = {}
    taught: list[tuple[str, list[int]]] = []
    own, own_draft = make.next_token_loss, make.draft_loss

    def loss(model: Any, tokens_BS: torch.Tensor) -> torch.Tensor:
        seen.setdefault(model.config.model_type, []).append(tokens_BS.flatten().tolist())
        return own(model, tokens_BS)

    def of_a_draft(target: Any, draft: Any, tokens_BS: torch.Tensor) -> torch.Tensor:
        assert draft.config.num_hidden_layers == 1
        weight = target.lm_head.weight
        assert torch.equal(weight, weight.bfloat16().float()), "it learns from what is stored"
        taught.append((target.config.model_type, tokens_BS.flatten().tolist()))
        return own_draft(target, draft, tokens_BS)

    monkeypatch.setattr(make, "next_token_loss", loss)
    monkeypatch.setattr(make, "draft_loss", of_a_draft)
    pair = hybrid_pair(recipe, Screen(is_quiet=True))
    # behind the steps come held-out texts
    hybrid, twin = seen["qwen3_5_text"], seen["qwen3"]
    assert hybrid[:2] == twin[:2] and hybrid[0] != hybrid[1] and (len(hybrid), len(twin)) == (3, 4)
    assert [name for name, _ in taught] == ["qwen3_5_text"] * 2 + ["qwen3"] * 2
    assert [windows for _, windows in taught] == hybrid[:2] * 2
    made = ["figures.json", "hybrid", "hybrid-draft", "twin", "twin-draft"]
    assert sorted(path.name for path in pair.iterdir()) == made
    assert {*json.loads((pair / "figures.json").read_text())} == {HYBRID, TWIN}
    assert load_file(pair / HYBRID / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    monkeypatch.setattr(make, "teach", lambda *_, **__: pytest.fail("it trained again"))
    assert hybrid_pair(recipe, Screen(is_quiet=True)) == pair
    setting = setting_of(pair, HYBRID)
    assert setting.target == setting.origin and setting.draft == pair / "hybrid-draft"


@pytest.mark.parametrize("temperature", make.TEMPERATURES)
def test_a_draft_that_is_the_target_agrees_in_every_figure_without_trees(tmp_path: Path, temperature: float) -> None:
    model, other = save_small(tmp_path / "model"), save_small(tmp_path / "other", seed=5)
    for folder in (model, other):
        (folder / "tokenizer.json").unlink()
    setting = Setting(model, model, model, 1 << 30)
    prompts = torch.arange(24).view(2, 12) % SIZES["vocab_size"]
    figures, written = make.texts_of(setting, prompts, temperature, 20)
    yields = [stats.tokens_per_sweep for stats in figures]
    setting.prove(written)
    found = make.without_trees(setting, written)
    overlap, first, by_ranks, entropy = found.values()
    assert [len(values) for values in (yields, *found.values())] == [2] * 5
    assert overlap == pytest.approx([1, 1]) and first == [1, 1]
    # as many guesses as the tree is deep, and one token more in a pass
    most = 1 + best_first(DEFAULT_ACCEPTANCE, 64, 16).depth
    assert by_ranks == [len(run.new_ids) / -(-len(run.new_ids) // most) for run in written]
    assert (min(entropy) > 0) == (temperature > 0)
    strange = make.without_trees(setting._replace(draft=other), written)
    assert all(max(strange[name]) < min(found[name]) for name in [*found][:3])


def test_the_command_ends_with_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It did not, for want of a ceiling, after forty minutes."""
    (tmp_path / make.FIGURES).write_text(json.dumps({HYBRID: 4.4, TWIN: 4.5}))
    yields = {HYBRID: [3, 5], TWIN: [4, 6]}
    figures = {
        name: [Stats(num_sweeps=1, accepted_per_sweep=[each], num_new_tokens=each) for each in its]
        for name, its in yields.items()
    }
    monkeypatch.setattr(make, "hybrid_pair", lambda recipe, screen: tmp_path)
    monkeypatch.setattr(make, "library_ids", lambda held_out: IDS)
    monkeypatch.setattr(make, "texts_of", lambda setting, *_: (figures[setting.target.name], []))
    monkeypatch.setattr(make, "without_trees", lambda *_: {"overlap": [0.5, 0.5], "entropy": [0.0, 0.0]})
    monkeypatch.setattr(Setting, "prove", lambda self, written: None)
    make.main(quick=True, rows_file=None, json_file=tmp_path / "found.json", seed=[0, 1])
    found = json.loads((tmp_path / "found.json").read_text())
    ratios = {row["row"]: row["ratio"] for row in found["rows"]}
    whole = [f"{make.PASSES}, T = {at}" for at in make.TEMPERATURES]
    assert [ratios[f"{one}{end}"] for one in whole for end in ("", ", all trainings")] == [0.8] * 4
    assert ratios["overlap, T = 0.8"] == 1 and ratios["entropy, T = 0.0"] is None
    assert found["ceiling"] == {"tokens_per_sweep": 17} and found["settings"]["losses"]["1"][TWIN] == 4.5
