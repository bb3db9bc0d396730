"""A copy verifies in its own passes what lookup and a scout guess: the same trees and texts, in fewer passes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plans import model_shape, plan_memory
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, VOCAB_SIZE, Pair, build, save

import offload
from offload import Request
from offload.checkpoint.open import open_checkpoint
from offload.datastore.index import Trie
from offload.drafting import dynamic
from offload.drafting.base import DraftText
from offload.drafting.draft_model import Draft
from offload.drafting.lookup import Guesses, SourceWeights, TrieGuesses
from offload.drafting.model_drafter import ModelDrafter
from offload.drafting.scouting import TieredDrafter
from offload.drafting.tiers import Standing, guesses_behind
from offload.engine.build import resident_model
from offload.engine.decoder import Decoder
from offload.engine.generation import Generation
from offload.engine.scheduler import write_all
from offload.errors import UserError
from offload.model.quantised_draft import HeldWeights
from offload.planning.draft_kinds import files_of
from offload.sampling_options import Sampling
from offload.trees.topology import DynamicShape

PROMPT = [3, 4, 5, 6, 7, 8, 9, 10] * 6


@pytest.fixture(autouse=True)
def same_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the trial still: a busy machine may find either way of multiplying faster, and their results differ."""
    monkeypatch.setattr(HeldWeights, "_rows_without_scratch", lambda *_: 128)


def chain_of(*tokens: int) -> Trie:
    """Return the trie of one continuation."""
    size = len(tokens)
    return Trie(np.arange(-1, size - 1), np.array(tokens), np.ones(size, dtype=np.int64), 1)


def guesses_of(*tokens: int) -> Guesses:
    weights = SourceWeights()
    for _ in range(200):
        weights.learn("lookup", 8, 1.0, 0.0)
        weights.learn("lookup", 9, 1.0, 0.0)
    return Guesses([TrieGuesses("lookup", 8, chain_of(*tokens))], weights)


def test_the_likeliest_guesses_stand_behind_what_was_picked_parents_first() -> None:
    guesses = guesses_of(5, 6, 7, 8)
    picked = [Standing(0.9, 0, guesses.root, 4), Standing(0.5, 2, guesses.follow(guesses.root, 5), 3)]
    joined = guesses_behind(guesses, picked, 6, 64)
    assert len(joined) == 4, "no more rows than a pass has room for"
    nodes = [*picked, *joined]
    for place, node in enumerate(joined, 2):
        assert node.parent is not None and node.parent < place
        above = nodes[node.parent]
        assert node.depth == above.depth + 1 and node.chance <= above.chance
    assert joined[0].token == 5 and joined[0].parent == 0
    assert not guesses_behind(guesses, picked, 2, 64), "the pass is full"
    assert not guesses_behind(guesses, picked, 8, 1), "what lies at the depth of the tree has no child"
    unlikely = [Standing(1.0, 0, guesses.follow(guesses.root, 9), 4), Standing(0.01, 2, guesses.root, 3)]
    assert not guesses_behind(guesses, unlikely, 8, 64), "such a row would be in vain"


def opened(target: Path, draft: str | None, **options: Any) -> Decoder:
    tree = "none" if draft is None else "dynamic:32x31"
    settings = {"tree": tree, "lookup": False, "profile": "none", "context": 256, "dtype": "float32"}
    return offload.load(str(target), draft, **{**settings, **options})


def passes_of(target: Path, draft: str | None, temperature: float, **options: Any) -> tuple[list[int], int, float]:
    """Return the ids of a text, the passes of what drafted, and the tokens that it brought."""
    num_passes = 0
    with opened(target, draft, **options) as decoder:
        propose = decoder.drafter.propose

        def counted(*args: Any) -> Any:
            nonlocal num_passes
            trees = propose(*args)
            num_passes += len(decoder.drafter.widths)
            return trees

        decoder.drafter.propose = counted  # type: ignore[method-assign]
        generation = decoder.generate(PROMPT, max_new_tokens=64, temperature=temperature, seed=5)
        return generation.token_ids, num_passes, generation.stats.tokens_per_sweep


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_no_draft_and_of_the_copy_alone_in_fewer_passes(
    temperature: float, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, small = pair
    alone, _, _ = passes_of(target, None, temperature)
    copied, many, tokens = passes_of(target, "self:int4", temperature)
    scouted, few, scouted_tokens = passes_of(target, f"self:int4+{small}", temperature)
    tiered, fewer, longer = passes_of(target, "self:int4", temperature, lookup=True)
    # guesses are scored once, before the tree grows, and stand in no tier
    monkeypatch.setattr(dynamic, "ROWS_OF_PASS", 0)
    joined, passes, _ = passes_of(target, "self:int4", temperature, lookup=True)
    assert alone == copied == scouted == tiered == joined
    assert min(longer, scouted_tokens) > 0.9 * tokens
    assert few < 0.8 * many
    if not temperature:
        assert fewer <= passes


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_any_tree_memory_and_number_of_texts_gives_the_text_of_no_draft(
    temperature: float, pair: Pair, tmp_path: Path
) -> None:
    _, small = pair
    draft = f"self:int4+{small}"
    config = FAMILIES["llama"]()
    config.num_hidden_layers = 8  # or what passes while layers are rounded has all of them stay
    target = save(build(config), tmp_path / "target")
    alone, _, _ = passes_of(target, None, temperature)
    files = files_of([open_checkpoint(target), open_checkpoint(small)], draft, None)
    roomy = plan_memory(files, ram=1 << 40, dtype="float32", context=256, num_nodes=32)
    ram = roomy.fixed_bytes + 3 * max(roomy.layer_bytes) + 100
    with opened(target, draft, ram=ram) as decoder:
        assert decoder.plan.streamed_bytes
    for change in ({"tree": "16x6"}, {"tree": "chain:4"}, {"tree": "auto"}, {"ram": ram}, {"lookup": True}):
        assert passes_of(target, draft, temperature, **change)[0] == alone, change
    prompts = [PROMPT, PROMPT[:7], [5], PROMPT[3:]]
    sampling = Sampling(temperature=temperature, seed=5)
    with opened(target, None) as decoder:
        options = {"temperature": temperature, "seed": 5, "max_new_tokens": 20}
        wanted = [decoder.generate(ids, **options).token_ids for ids in prompts]
    with opened(target, draft, parallel=3) as decoder:
        requests = [Request(ids, sampling, 20) for ids in prompts]
        outcomes = {finished.number: finished.outcome for finished in write_all(decoder, requests)}
    for number, ids in enumerate(wanted):
        outcome = outcomes[number]
        assert isinstance(outcome, Generation) and outcome.token_ids == ids


def worst_gap(decoder: Decoder) -> float:
    """The largest distance of both caches, over some steps, from those of drafters that read the whole text."""
    drafter: Any = decoder.drafter
    text = decoder.begin(PROMPT, Sampling(temperature=0.7, seed=3), shape=DynamicShape(24, 12))
    worst = 0.0
    for _ in range(5):
        decoder.step(text)
        state = text.caches.draft
        for model, cache in ((drafter, state.copy), (drafter._scout, state.scout)):
            fresh = ModelDrafter(model.model, drafter._vocab_size, 512)
            anew = fresh.new_state()
            fresh.propose([DraftText(DynamicShape(2, 1), text.tokens[: cache.length], text.sampler, anew)])
            for layer, states in cache.states(cache.length).items():
                for name, rows in anew.states(cache.length)[layer].items():
                    worst = max(worst, float((states[name] - rows).abs().max()))
    return worst


def rows_of_the_scout(drafter: TieredDrafter, tree: Any, path: Any, sampler: Any, state: Any) -> None:
    scouted = state.tree
    ModelDrafter.accepted(drafter, tree, path, sampler, state.scout)
    state.tree = scouted
    state.copy.commit([row - 1 for row in scouted.row_of.values() if row][: len(path.nodes) - 1])


def test_both_caches_hold_the_accepted_path_and_a_mix_up_shows(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(pair[0], f"self:int4+{pair[1]}") as decoder:
        assert worst_gap(decoder) < 1e-3
        monkeypatch.setattr(TieredDrafter, "accepted", rows_of_the_scout)
        assert worst_gap(decoder) > 1e-2


def test_guesses_have_the_scores_of_a_pass_of_their_own_in_that_of_the_root(pair: Pair) -> None:
    model = resident_model(open_checkpoint(pair[1]), "float32")
    beside, apart = (Draft(model, VOCAB_SIZE, model.new_cache(80)) for _ in range(2))
    # two children of the root and one of the first, then one of the second
    position_U = len(PROMPT) + torch.tensor([0, 0, 1, 1])
    sees_UU = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]).bool()
    rows = (torch.tensor([4, 9, 5]), position_U[:3], sees_UU[:3, :3])
    scores = beside.catch_up_beside(PROMPT, rows)
    assert torch.allclose(scores, torch.cat((apart.catch_up(PROMPT), apart.run(*rows))), atol=1e-5)
    later = (torch.tensor([8]), position_U, sees_UU[3:])
    assert torch.allclose(beside.run(*later), apart.run(*later), atol=1e-5)
    model.close()
    with opened(pair[0], f"self:int4+{pair[1]}") as decoder:
        decoder.generate(PROMPT, max_new_tokens=8)
        assert decoder.drafter.widths[0] > 1, "the root was run alone"


def test_layers_that_the_target_carries_may_be_the_scout(pair: Pair, tmp_path: Path) -> None:
    tensors = {name: rows for file in pair[0].glob("*.safetensors") for name, rows in load_file(file).items()}
    layer = {name.removeprefix("model.layers.0."): rows for name, rows in tensors.items() if "layers.0." in name}
    mtp = {f"layers.0.{name}": rows.clone() for name, rows in layer.items()}
    width = len(tensors["model.norm.weight"])
    mtp["fc.weight"] = torch.cat((torch.eye(width), torch.zeros(width, width)), 1)
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    mtp |= {f"{name}.weight": torch.ones(width) for name in norms}
    added = {f"mtp.{name}": rows for name, rows in mtp.items()}
    save_file(tensors | added, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((pair[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    for temperature in (0.0, 0.7):
        alone, _, _ = passes_of(tmp_path, None, temperature)
        with opened(tmp_path, "self:int4+mtp") as decoder:
            assert decoder.generate(PROMPT, max_new_tokens=64, temperature=temperature, seed=5).token_ids == alone
            assert decoder.drafter._times._are_seen, "nothing was guessed"


def test_a_plan_counts_copy_and_scout_once(pair: Pair) -> None:
    target, small = (open_checkpoint(folder) for folder in pair)
    draft = f"self:int4+{pair[1]}"
    files = files_of([target, small], draft, None)
    assert files.draft is not None and files.draft.scout is not None
    with opened(pair[0], "self:int4") as copied, opened(pair[0], draft) as decoder:
        saved_bytes = decoder.plan.draft_bytes - copied.plan.draft_bytes
        assert decoder.drafter.num_bytes == copied.drafter.num_bytes + decoder.drafter._scout.num_bytes
    assert saved_bytes > model_shape(small).num_bytes, "its rows and caches besides"


@pytest.mark.parametrize(
    ("draft", "said"),
    [("{small}+self:int4", "a copy and one below it"), ("self:int4+{small}+mtp", "a copy and one below it"),
     ("self:int4+auto", "a copy and one below it"), ("self:int4+self:int8", "a copy and one below it"),
     ("self:int4+eagle3:{small}", "a copy and one below it"), ("self:int4+", "name each"),
     ("self:int4+{other}", "share the target's vocabulary"), ("self:int4+/nowhere", "nowhere")],
)  # fmt: skip
def test_what_cannot_guess_below_a_copy_is_named_in_one_line(
    draft: str, said: str, pair: Pair, tmp_path: Path, _no_weights: None
) -> None:
    config = FAMILIES["llama"]()
    config.vocab_size = 150
    other = save(build(config), tmp_path / "other") if "other" in draft else None
    with pytest.raises(UserError, match=said) as error:
        offload.load(str(pair[0]), draft.format(small=pair[1], other=other))
    assert "\n" not in str(error.value)
