"""Draft heads with files of their own: scores are the library's or those of few lines, text is that of no draft."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_models import (
    CORRECTED,
    FORMS,
    MASK,
    WIDTH,
    assistant,
    assistant_scores,
    dflash,
    dflash_scores,
    eagle3,
    eagle3_scores,
    gemma,
    target,
    written,
)
from safetensors.torch import load_file

from offload import Request, load
from offload.drafting import block_convolution
from offload.drafting.base import DraftText
from offload.drafting.corrections import CausalRefiner
from offload.engine.decoder import Decoder
from offload.errors import UserError
from offload.model.taps import TapLog
from offload.sampling_options import Sampling
from offload.trees.topology import DynamicShape
from offload.trees.verification import Acceptance

PROMPT = [1, 5, 9, 5, 9, 7, 3, 5, 9, 11]
HOT = {"temperature": 0.7, "seed": 5}
HEADS = {
    "eagle3": (lambda: eagle3()[0], lambda *path: eagle3_scores("specforge", *path)),
    **{f"eagle3 {form}": (lambda form=form: eagle3(form)[0], lambda *path, form=form: eagle3_scores(form, *path))
       for form in FORMS},
    **{f"dflash {form}": (lambda form=form: dflash(form)[0], lambda *path, form=form: dflash_scores(form, *path))
       for form in ("z-lab", "muse", "speculators", *CORRECTED)},
}  # fmt: skip
HEADS |= {
    f"assistant of {num} with {clusters}": (
        lambda clusters=clusters: assistant(has_clusters=clusters)[0],
        lambda *path, num=num, clusters=clusters: assistant_scores(num, clusters, *path),
    )
    for num, clusters in ((0, False), (0, True), (2, False))
}
KINDS = ["eagle3", "dflash z-lab", "assistant of 0 with False", "dflash rnn", "dflash dflash2", "dflash xpress"]


def target_of(kind: str) -> Path:
    of_gemma = {f"assistant of {num}": num for num in (0, 2)}
    return next((gemma(num)[0] for name, num in of_gemma.items() if kind.startswith(name)), target()[0])


def opened(kind: str, **options: Any) -> Decoder:
    return load(target_of(kind), HEADS[kind][0](), dtype="float32", **options)


def alone(kind: str, **options: Any) -> Decoder:
    return load(target_of(kind), tree="none", lookup=False, dtype="float32", **options)


def gap(decoder: Decoder, kind: str, num_steps: int = 3) -> float:
    """The distance of a tree's scores from those of paths computed afresh, over the largest of these.

    Steps between are right, wrong and partly right.
    """
    shape = DynamicShape(12, 3)
    text = decoder.begin(PROMPT, Sampling(), shape=shape)
    decoder.step(text)
    worst = 0.0
    for _ in range(num_steps):
        decoder.step(text)
        text.recover()
        (tree,) = decoder.drafter.propose([DraftText(shape, text.tokens, text.sampler, text.caches.draft)])
        assert tree.num_nodes > 4
        for node, score_V in tree.score_of_node.items():
            wanted_V = HEADS[kind][1](text.tokens, tree.path(node))
            is_there = wanted_V.isfinite()
            if not torch.equal(is_there, score_V.isfinite()):
                return float("inf")
            off_V = (score_V - wanted_V)[is_there] / wanted_V[is_there].abs().max()
            worst = max(worst, float(off_V.abs().max()))
        text.caches.draft.commit([])
    return worst


@pytest.mark.parametrize("kind", HEADS)
def test_a_tree_of_a_head_has_the_scores_of_chains(kind: str) -> None:
    with opened(kind, tree="dynamic:12x3") as decoder:
        assert gap(decoder, kind) < 1e-5


def entered_below(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    carried = decoder.drafter.model._carried
    layers = tuple(layer - 1 for layer in carried.tapped)
    patch.setattr(decoder.drafter.model, "_carried", carried._replace(tapped=layers))
    decoder.target.tap(decoder.drafter.needs)


def off_by_one(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    right = TapLog.commit
    patch.setattr(TapLog, "commit", lambda log, path, length: right(log, [max(0, row - 1) for row in path], length))


def in_another_order(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    right = TapLog.offer
    patch.setattr(TapLog, "offer", lambda log, hidden, **options: right(log, hidden.roll(WIDTH, -1), **options))


def swapped(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    model = decoder.drafter.model
    right = model._enter

    def enter(*given: Any) -> Any:
        state = right(*given)
        model._mixer.rows = model._mixer.rows[::-1]
        return state

    patch.setattr(model, "_enter", enter)


def fed_otherwise(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    carried = decoder.drafter.model._carried
    patch.setattr(decoder.drafter.model, "_carried", carried._replace(is_fed_normed=not carried.is_fed_normed))


def other_residual(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    carried = decoder.drafter.model._carried
    other = carried._replace(is_residual_normed=not carried.is_residual_normed)
    patch.setattr(decoder.drafter.model, "_carried", other)


def other_keys(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    carried = decoder.drafter.model._carried
    lent = tuple((kind, layer - 2) for kind, layer in carried.lent)
    patch.setattr(decoder.drafter.model, "_carried", carried._replace(lent=lent))


def by_another_token(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    model = decoder.drafter.model
    right = model.below
    patch.setattr(
        model, "below", lambda block, depth_F, token_F, state_FR: right(block, depth_F, 0 * token_F, state_FR)
    )


def mixed_with_context(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    right = block_convolution._convolved

    def convolved(rows: Any, *kernels: Any) -> Any:
        return right(rows + (rows == 0), *kernels)

    patch.setattr(block_convolution, "_convolved", convolved)


def without_rows_before(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    right = CausalRefiner._taken_in
    patch.setattr(CausalRefiner, "_taken_in", lambda *given: right(*given[:-1], torch.zeros_like(given[-1])))


MISTAKES = [(kind, mistake) for kind in KINDS[:2] for mistake in (entered_below, off_by_one, in_another_order)]
MISTAKES += [(KINDS[2], other_keys), *((kind, by_another_token) for kind in KINDS[3:])]
MISTAKES += [(kind, mistake) for kind in KINDS[4:] for mistake in (entered_below, off_by_one, in_another_order)]
MISTAKES += [("dflash dflash2", mixed_with_context), ("dflash xpress", without_rows_before)]
MISTAKES += [("eagle3", mistake) for mistake in (swapped, fed_otherwise, other_residual)]


@pytest.mark.parametrize(("kind", "mistake"), MISTAKES)
def test_what_leaves_the_text_as_it_is_shows_in_the_scores(
    kind: str, mistake: Callable[[Decoder, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(kind, tree="dynamic:12x3") as decoder:
        mistake(decoder, monkeypatch)
        assert gap(decoder, kind) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_no_row_of_a_guess_stays(kind: str) -> None:
    """Such a row has a guess's state in it, and comes again with the target's."""
    shape = DynamicShape(12, 3)
    with opened(kind, tree="dynamic:12x3") as decoder:
        text = decoder.begin(PROMPT, Sampling(), shape=shape)
        decoder.step(text)
        text.recover()
        state = text.caches.draft
        (tree,) = decoder.drafter.propose([DraftText(shape, text.tokens, text.sampler, state)])
        node = next(iter(tree.row_of_node), 1)
        path = Acceptance([0, node], [tree.tokens[node], 3])
        decoder.drafter.accepted(tree, path, text.sampler, state)
        assert state.length == len(text.tokens) - 1


@pytest.mark.parametrize("form", ["z-lab", *CORRECTED])
def test_a_block_ranks_paths_by_products_under_the_noise_of_their_positions(form: str) -> None:
    """Every path is looked at; what corrects a score by the token before it makes other lists below each."""
    shape = DynamicShape(12, 3)
    with opened(f"dflash {form}", tree="dynamic:12x3") as decoder:
        text = decoder.begin(PROMPT, Sampling(**HOT), shape=shape)
        for _ in range(3):
            decoder.step(text)
        text.recover()
        (tree,) = decoder.drafter.propose([DraftText(shape, text.tokens, text.sampler, text.caches.draft)])
        beta = decoder.drafter.exponent(text.sampler)
        best = {(): 1.0}
        for depth in range(3):
            for above in [path for path in best if len(path) == depth]:
                score_1V = dflash_scores(form, text.tokens, above)[None]
                chance_V = (beta * text.sampler.perturbed(score_1V, [len(text.tokens) + depth])[0]).softmax(0)
                best |= {(*above, token): best[above] * chance for token, chance in enumerate(chance_V.tolist())}
            # a path is no likelier than its beginning
            best = {path: best[path] for path in sorted(best, key=lambda path: -best[path])[:99]}
        likeliest = sorted(best, key=lambda path: (-best[path], len(path)))[: tree.num_nodes]
        assert tree.num_nodes > 4
        assert {tuple(tree.path(node)) for node in range(tree.num_nodes)} == {*likeliest}


def texts_of(decoder: Decoder, options: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of a text, of one that goes on from it, and of one that begins like it."""
    first = decoder.generate(PROMPT, max_new_tokens=12, **options).token_ids
    further = decoder.generate([*PROMPT, *first, 8, 9], max_new_tokens=12, **options).token_ids
    edited = decoder.generate([*PROMPT[:6], 4, 4, 9], max_new_tokens=12, **options).token_ids
    return [first, further, edited]


@pytest.mark.parametrize("options", [{}, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_that_of_no_draft_streamed_and_resident(kind: str, options: dict[str, Any]) -> None:
    with alone(kind) as decoder:
        wanted = texts_of(decoder, options)
    for tree in ("none", "chain:4", "64x8", "dynamic:64x8", "dynamic:256x8"):
        with opened(kind, tree=tree, lookup=tree == "dynamic:64x8") as decoder:
            assert texts_of(decoder, options) == wanted, tree
            plan = decoder.plan
    with opened(kind, tree=tree, ram=plan.fixed_bytes + 2 * max(plan.layer_bytes)) as decoder:
        assert decoder.plan.is_streamed
        assert texts_of(decoder, options) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_four_texts_and_a_session_are_those_of_no_draft(kind: str, tmp_path: Path) -> None:
    prompts = [[*PROMPT, index] for index in range(4)]
    requests = [Request(prompt, max_new_tokens=10, sampling=Sampling(**HOT)) for prompt in prompts]

    def together(decoder: Decoder) -> list[list[int]]:
        runs = [decoder.start(request) for request in requests]
        while active := [run for run in runs if not run.sequence.has_ended]:
            decoder.step_all(active)
        return [run.sequence.new_ids for run in runs]

    with alone(kind, parallel=4) as decoder:
        wanted = together(decoder)
    for tree in ("dynamic:16x3", "16x3"):
        with opened(kind, tree=tree, parallel=4) as decoder:
            assert together(decoder) == wanted
    path = tmp_path / "text.session"
    with opened(kind, tree="dynamic:16x3") as decoder:
        first = decoder.generate(PROMPT, max_new_tokens=10).token_ids
        decoder.save_session(path)
        longer = [*PROMPT, *first, 3]
        wanted_more = decoder.generate(longer, max_new_tokens=10).token_ids
    with opened(kind, tree="dynamic:16x3") as decoder:
        decoder.load_session(path)
        assert decoder.generate(longer, max_new_tokens=10).token_ids == wanted_more


def changed(kind: str, config: dict[str, Any], without: str = "", cut: str = "") -> Path:
    """Return a copy of a head with another config, without a tensor, or with the last column of one cut off."""
    folder = HEADS[kind][0]()
    tensors = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name != without}
    if cut:
        tensors[cut] = tensors[cut][..., :-1]
    return written(tensors, {**json.loads((folder / "config.json").read_text()), **config})


DFLASH2 = {"block_size": 4, "mask_token_id": MASK, "target_layer_ids": [0, 4], "conv_kernel_size": 3}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("eagle3", {"cut": "fc.weight"}, "another target.*3 states"),
    ("eagle3", {"cut": "t2d"}, "another target.*of 63 words"),
    ("eagle3", {"config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}}}, "must rise.*of 8"),
    ("eagle3", {"config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "low"}}}, "must number"),
    ("eagle3", {"without": "d2t"}, "24 words has d2t.*got none"),
    ("eagle3", {"cut": "d2t"}, r"got I64 \[23\]"),
    ("eagle3", {"without": "norm.weight"}, "not read .no norm.weight"),
    ("eagle3", {"config": {"model_type": "mixtral"}}, "not read .layers of type mixtral"),
    ("eagle3", {"config": {"medusa_num_heads": 4}}, "Medusa form is not read"),
    ("eagle3", {"config": {"speculators_model_type": "eagle"}}, "speculators' eagle form"),
    ("dflash z-lab", {"cut": "fc.weight"}, "another target.*2 states"),
    ("dflash vanilla", {"without": "markov_head.markov_w2.weight"}, "not read .no markov_head.markov_w2"),
    ("dflash vanilla", {"cut": "markov_head.markov_w2.weight"}, "markov_w2.weight must have shape"),
    ("dflash z-lab", {"config": {"block_size": 1}}, "block_size, of 2 to 1024"),
    ("dflash z-lab", {"config": {"block_size": 100000}}, "block_size, of 2 to 1024.*got 100000"),
    ("dflash z-lab", {"config": {"sample_from_anchor": "yes"}}, "is true or false, got 'yes'"),
    ("dflash vanilla", {"config": {"markov_head_type": "rnn"}}, "not read .no markov_head.joint_proj"),
    ("dflash vanilla", {"config": {"markov_head_type": "gru"}}, "not read .no markov_head.gru"),
    (
        "dflash gated",
        {"cut": "markov_head.gate_proj.weight"},
        r"gate_proj.weight must have shape .8, 40., .*has .8, 39.",
    ),
    ("dflash rnn", {"cut": "markov_head.joint_proj.weight"}, "joint_proj.weight must have"),
    ("dflash dflash2", {"without": "layers.1.mlp_conv.base_kernel"}, "not read .no layers.1.mlp_conv.base_kernel"),
    (
        "dflash dflash2",
        {"cut": "layers.0.attention_conv.base_kernel"},
        "base_kernel must have",
    ),
    ("dflash dflash2", {"cut": "candidate_selector.successor_codebook"}, "successor_codebook must have"),
    ("dflash dflash2", {"config": {"dflash_config": {**DFLASH2, "selector_top_k": 65}}}, "1 to 64, got 65"),
    (
        "dflash dflash2",
        {"config": {"dflash_config": {**DFLASH2, "output_multiplier": "x"}}},
        "from 0, got 'x'",
    ),
    (
        "dflash dflash2",
        {"config": {"dflash_config": {**DFLASH2, "conv_group_size": 5}}},
        "divides a width of 32, got 5",
    ),
    ("dflash dflash2", {"config": {"dflash_config": DFLASH2}}, "predecessor_codebook states selector_top_k, got none"),
    ("dflash xpress", {"without": "refiner_head.down_g.weight"}, "not read .no refiner_head.down_g"),
    ("dflash xpress", {"cut": "refiner_head.mix_l"}, "mix_l must have shape"),
    (
        "dflash z-lab",
        {"config": {"dflash_config": {"mask_token_id": 64, "target_layer_ids": [0, 4]}}},
        "another target",
    ),
    ("dflash z-lab", {"config": {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 9]}}}, "must rise"),
]


REFUSED += [
    (KINDS[2], {"config": {"backbone_hidden_size": 48}}, "another target .sizes must be .*32., got 48"),
    (KINDS[2], {"without": "pre_projection.weight"}, "no pre_projection.weight"),
    (KINDS[2], {"config": {"use_ordered_embeddings": True}}, "no masked_embedding.token_ordering"),
]


@pytest.mark.parametrize(("kind", "change", "said"), REFUSED)
def test_what_cannot_draft_is_named_in_one_line(kind: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as refusal:
        load(target_of(kind), changed(kind, **{"config": {}, **change}))
    assert "\n" not in str(refusal.value)
    assert ": " in str(refusal.value)


def test_a_name_that_says_another_kind_and_options_that_do_not_go_with_heads_are_refused() -> None:
    folder = HEADS["dflash z-lab"][0]()
    for draft, changes, said in (
        (f"eagle3:{folder}", {}, "name it dflash"),
        (f"dflash:{folder}+mtp", {}, "joins one draft"),
        (f"dflash:{folder}", {"draft_dtype": "int8"}, "does not go with a head"),
        (folder, {"draft_dtype": "int8"}, "does not go with a head"),
    ):
        with pytest.raises(UserError, match=said):
            load(target()[0], draft, **changes)


def test_words_that_lead_nowhere_are_refused() -> None:
    folder = HEADS["eagle3"][0]()
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] = torch.full_like(tensors["d2t"], MASK)
    with pytest.raises(UserError, match="rising ids below 64"):
        load(target()[0], written(tensors, json.loads((folder / "config.json").read_text())))
