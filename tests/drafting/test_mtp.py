"""MTP layers that a target's files carry: scores are the library's, the text is that of no draft."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from carried_models import CONFIGS, carrying, path_scores
from safetensors.torch import load_file, save_file

from offload import Request, load
from offload.drafting.base import DraftText
from offload.drafting.mtp import MtpDrafter
from offload.engine.decoder import Decoder
from offload.errors import UserError
from offload.model.taps import TapLog, Taps
from offload.sampling_options import Sampling
from offload.trees.topology import DynamicShape

PROMPT = [1, 5, 9, 5, 9, 7, 3, 5, 9, 11]
FAMILIES = [*CONFIGS]
HOT = {"temperature": 0.7, "seed": 5}


def opened(family: str, draft: str | None = "mtp", **more: Any) -> Decoder:
    return load(carrying(family)[0], draft, dtype="float32", **more)


def gap(family: str, decoder: Decoder, num_steps: int = 3) -> float:
    """Return how far the scores of trees are from those of chains by the library, over some steps of one text."""
    text = decoder.begin(PROMPT, Sampling(), shape=DynamicShape(12, 3))
    decoder.step(text)
    worst = 0.0
    for _ in range(num_steps):
        decoder.step(text)
        text.recover()
        shape = DynamicShape(12, 3)
        (tree,) = decoder.drafter.propose([DraftText(shape, text.tokens, text.sampler, text.caches.draft)])
        assert tree.num_nodes > 4
        for node, score_V in tree.score_of_node.items():
            wanted_V = path_scores(family, text.tokens, tree.path(node))
            worst = max(worst, float((score_V - wanted_V).abs().max()))
        text.caches.draft.commit([])
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_has_the_scores_of_the_librarys_own_layer_along_each_path(family: str) -> None:
    """Steps between are right, wrong and partly right; after each, the draft is as if all were run at once."""
    with opened(family, tree="dynamic:12x3") as decoder:
        assert gap(family, decoder) < 1e-4


def before_the_norm(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    num_layers = decoder.target._model.num_layers
    patch.setattr(MtpDrafter, "needs", Taps(layers=(num_layers,)))


def swapped(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    model: Any = decoder.drafter.model
    patch.setattr(model, "_carried", model._carried._replace(is_hidden_first=True))


def fed_otherwise(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    model: Any = decoder.drafter.model
    patch.setattr(model, "_carried", model._carried._replace(is_fed_normed=not model._carried.is_fed_normed))


def off_by_one(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    right = TapLog.commit
    patch.setattr(TapLog, "commit", lambda log, path, length: right(log, [max(0, row - 1) for row in path], length))


@pytest.mark.parametrize("mistake", [before_the_norm, swapped, fed_otherwise, off_by_one])
def test_what_leaves_the_text_as_it_is_shows_in_the_scores(
    mistake: Callable[[Decoder, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened("mellum", tree="dynamic:12x3") as decoder:
        mistake(decoder, monkeypatch)
        if mistake is before_the_norm:
            decoder.target.tap(MtpDrafter.needs)
        assert gap("mellum", decoder) > 1e-2


def texts_of(decoder: Decoder, how: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of a text, of one that goes on from it, of one that begins like it, and of four at once."""
    first = decoder.generate(PROMPT, max_new_tokens=12, **how).token_ids
    further = decoder.generate([*PROMPT, *first, 8, 9], max_new_tokens=12, **how).token_ids
    edited = decoder.generate([*PROMPT[:6], 4, 4, 9], max_new_tokens=12, **how).token_ids
    return [first, further, edited]


@pytest.mark.parametrize("tree", ["dynamic:64x8", "64x8", "chain:4", "none"])
@pytest.mark.parametrize("how", [{}, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_text_is_that_of_no_draft(family: str, how: dict[str, Any], tree: str) -> None:
    with opened(family, None, tree="none", lookup=False) as decoder:
        wanted = texts_of(decoder, how)
    with opened(family, tree=tree, lookup=tree == "64x8") as decoder:
        assert texts_of(decoder, how) == wanted


@pytest.mark.parametrize("draft", ["mtp", "mtp+lookup"])
def test_four_texts_and_a_session_are_those_of_no_draft(draft: str, tmp_path: Path) -> None:
    prompts = [[*PROMPT, index] for index in range(4)]
    requests = [Request(prompt, max_new_tokens=10, sampling=Sampling(**HOT)) for prompt in prompts]

    def together(decoder: Decoder) -> list[list[int]]:
        runs = [decoder.start(request) for request in requests]
        while active := [run for run in runs if not run.sequence.has_ended]:
            decoder.step_all(active)
        return [run.sequence.new_ids for run in runs]

    with opened("mellum", None, tree="none", parallel=4) as decoder:
        wanted = together(decoder)
    with opened("mellum", draft, tree="dynamic:16x3", parallel=4) as decoder:
        assert together(decoder) == wanted
    path = tmp_path / "text.session"
    with opened("mellum", draft, tree="dynamic:16x3") as decoder:
        first = decoder.generate(PROMPT, max_new_tokens=10).token_ids
        decoder.save_session(path)
        more = [*PROMPT, *first, 3]
        wanted_more = decoder.generate(more, max_new_tokens=10).token_ids
    with opened("mellum", draft, tree="dynamic:16x3") as decoder:
        decoder.load_session(path)
        assert decoder.generate(more, max_new_tokens=10).token_ids == wanted_more


@pytest.mark.parametrize(
    ("change", "said"),
    [("no tensors", "no tensor is of them"), ("no mixer", "form that is not read"), ("two drafts", "joins one draft")],
)
def test_what_cannot_draft_is_named_in_one_line(change: str, said: str, tmp_path: Path) -> None:
    folder, *_ = carrying("mellum")
    tensors = load_file(folder / "model.safetensors")
    lost = "mtp." if change == "no tensors" else "mtp.fc" if change == "no mixer" else "nothing"
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(lost)}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    with pytest.raises(UserError, match=said) as told:
        load(tmp_path, "mtp+self:int4" if change == "two drafts" else "mtp")
    assert "\n" not in str(told.value)
