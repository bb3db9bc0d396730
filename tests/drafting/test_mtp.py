"""MTP layers that a target's files carry: scores are the library's, the text is that of no draft."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from carried_models import CONFIGS, carrying, path_scores
from safetensors.torch import load_file, save_file

from offload import Request, load
from offload.checkpoint.carried import has_mtp, mtp_checkpoint
from offload.checkpoint.layout import BLOCK_BYTES
from offload.checkpoint.open import open_checkpoint
from offload.checkpoint.sizes import model_shape
from offload.checkpoint.small_files import of_text
from offload.cli.plan_lines import answer_lines
from offload.drafting.base import DraftText
from offload.drafting.model_drafter import ModelDrafter
from offload.drafting.mtp import CarriedDrafter
from offload.engine.decoder import Decoder
from offload.engine.sequence import TokenSequence
from offload.errors import UserError
from offload.memory.sizes import STATE_ROWS, taps_bytes
from offload.model.taps import TapLog, Taps
from offload.planning.acceptance import NUM_RANKS
from offload.planning.load_options import LoadOptions
from offload.reports.estimate import estimate
from offload.reports.tracing import ranks_of, tokens_again
from offload.sampling_options import Sampling
from offload.trees.topology import DynamicShape

PROMPT = [1, 5, 9, 5, 9, 7, 3, 5, 9, 11]
FAMILIES = [*CONFIGS]
HOT = {"temperature": 0.7, "seed": 5}


def opened(family: str, draft: str | None = "mtp", **options: Any) -> Decoder:
    return load(carrying(family)[0], draft, dtype="float32", **options)


def gap(family: str, decoder: Decoder, text: TokenSequence | None = None, **options: bool) -> float:
    """The largest distance of the scores of trees from those of chains by the library, over some steps of one text."""
    if text is None:
        text = decoder.begin(PROMPT, Sampling(), shape=DynamicShape(12, 3))
        decoder.step(text)
    worst = 0.0
    for _ in range(3):
        decoder.step(text)
        text.recover()
        shape = DynamicShape(12, 3)
        (tree,) = decoder.drafter.propose([DraftText(shape, text.tokens, text.sampler, text.caches.draft)])
        assert tree.num_nodes > 4
        for node, score_V in tree.score_of_node.items():
            wanted_V = path_scores(family, text.tokens, tree.path(node), **options)
            worst = max(worst, float((score_V - wanted_V).abs().max() / wanted_V.abs().max()))
        text.caches.draft.commit([])
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_has_the_scores_of_the_librarys_own_layer_along_each_path(family: str) -> None:
    """Steps between are right, wrong and partly right; after each, the draft is as if all were run at once."""
    with opened(family, tree="dynamic:12x3") as decoder:
        assert gap(family, decoder) < 1e-4


def before_the_norm(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    num_layers = decoder.target._model.num_layers
    patch.setattr(CarriedDrafter, "needs", Taps(layers=(num_layers,)))


def swapped(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    model: Any = decoder.drafter.model
    patch.setattr(model, "_carried", model._carried._replace(is_hidden_first=True))


def fed_otherwise(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    model: Any = decoder.drafter.model
    patch.setattr(model, "_carried", model._carried._replace(is_fed_normed=not model._carried.is_fed_normed))


def off_by_one(decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
    right = TapLog.commit
    patch.setattr(TapLog, "commit", lambda log, path, length: right(log, [max(0, row - 1) for row in path], length))


@pytest.mark.parametrize("family", ["mellum", "ernie4_5_moe"])
@pytest.mark.parametrize("mistake", [before_the_norm, swapped, fed_otherwise, off_by_one])
def test_what_leaves_the_text_as_it_is_shows_in_the_scores(
    mistake: Callable[[Decoder, pytest.MonkeyPatch], None], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(family, tree="dynamic:12x3") as decoder:
        mistake(decoder, monkeypatch)
        if mistake is before_the_norm:
            decoder.target.tap(CarriedDrafter.needs)
        assert gap(family, decoder) > 1e-2


def test_rows_of_accepted_guesses_come_again_with_the_targets_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text stays as it is where they are kept, and so do most guesses: scores tell."""
    folder, *_ = carrying("mellum", is_right=True)
    with load(folder, "mtp", dtype="float32", tree="dynamic:12x3", lookup=False) as decoder:
        assert decoder.generate(PROMPT, max_new_tokens=24).stats.tokens_per_sweep > 2
        assert gap("mellum", decoder, is_right=True) < 1e-4
        monkeypatch.setattr(CarriedDrafter, "_rows_to_keep", ModelDrafter._rows_to_keep)
        assert gap("mellum", decoder, is_right=True) > 1e-3


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "glm4_moe of 3"])
def test_parts_of_a_prompt_and_interrupted_steps_lose_no_states(family: str) -> None:
    left = [1 << 30]

    def on_layer() -> None:
        left[0] -= 1
        if not left[0]:
            raise InterruptedError

    with opened(family, tree="dynamic:12x3", on_layer=on_layer) as decoder:
        decoder.target._max_rows = 3
        text = decoder.begin(PROMPT * 2, Sampling(), shape=DynamicShape(12, 3))
        for num_layers in (2, 9, 14):
            left[0] = num_layers
            with pytest.raises(InterruptedError):
                decoder.step(text)
        left[0] = 1 << 30
        for _ in range(2):
            decoder.step(text)
            left[0] = 2
            with pytest.raises(InterruptedError):
                decoder.step(text)
        assert gap(family, decoder, text) < 1e-4


@pytest.mark.parametrize("family", ["mellum", "glm4_moe of 3"])
def test_a_long_prompt_is_taken_in_by_passes_as_small_as_planned(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows = list[int]()
    with opened(family, tree="dynamic:12x3") as decoder:
        draft: Any = decoder.drafter.model
        right = draft.forward_parts

        def counted(parts: Any, **options: Any) -> Any:
            num_rows.append(sum(len(part.token_T) for part in parts))
            return right(parts, **options)

        monkeypatch.setattr(draft, "forward_parts", counted)
        text = decoder.begin(PROMPT * 20, Sampling(), shape=DynamicShape(12, 3))
        decoder.step(text)
        assert gap(family, decoder, text) < 1e-4
    assert max(num_rows) == STATE_ROWS and sum(num_rows) >= len(PROMPT) * 20


def texts_of(decoder: Decoder, options: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of a text, of one that goes on from it, of one that begins like it, and of four at once."""
    first = decoder.generate(PROMPT, max_new_tokens=12, **options).token_ids
    further = decoder.generate([*PROMPT, *first, 8, 9], max_new_tokens=12, **options).token_ids
    edited = decoder.generate([*PROMPT[:6], 4, 4, 9], max_new_tokens=12, **options).token_ids
    return [first, further, edited]


@pytest.mark.parametrize("tree", ["dynamic:64x8", "64x8", "chain:4", "none"])
@pytest.mark.parametrize("options", [{}, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "glm4_moe of 3", "mimo_v2_flash"])
def test_text_is_that_of_no_draft(family: str, options: dict[str, Any], tree: str) -> None:
    with opened(family, None, tree="none", lookup=False) as decoder:
        wanted = texts_of(decoder, options)
    with opened(family, tree=tree, lookup=tree == "64x8") as decoder:
        assert texts_of(decoder, options) == wanted


@pytest.mark.parametrize("family", ["mellum", "glm4_moe of 3"])
@pytest.mark.parametrize("draft", ["mtp", "mtp+lookup"])
def test_four_texts_and_a_session_are_those_of_no_draft(draft: str, family: str, tmp_path: Path) -> None:
    prompts = [[*PROMPT, index] for index in range(4)]
    requests = [Request(prompt, max_new_tokens=10, sampling=Sampling(**HOT)) for prompt in prompts]

    def together(decoder: Decoder) -> list[list[int]]:
        runs = [decoder.start(request) for request in requests]
        while active := [run for run in runs if not run.sequence.has_ended]:
            decoder.step_all(active)
        return [run.sequence.new_ids for run in runs]

    with opened(family, None, tree="none", parallel=4) as decoder:
        wanted = together(decoder)
    with opened(family, draft, tree="dynamic:16x3", parallel=4) as decoder:
        assert together(decoder) == wanted
    path = tmp_path / "text.session"
    with opened(family, draft, tree="dynamic:16x3") as decoder:
        first = decoder.generate(PROMPT, max_new_tokens=10).token_ids
        decoder.save_session(path)
        longer = [*PROMPT, *first, 3]
        wanted_more = decoder.generate(longer, max_new_tokens=10).token_ids
    with opened(family, draft, tree="dynamic:16x3") as decoder:
        decoder.load_session(path)
        assert decoder.generate(longer, max_new_tokens=10).token_ids == wanted_more


@pytest.mark.parametrize(
    ("change", "said"),
    [("no tensors", "states 1 and no tensor is of them"), ("no mixer", "form that is not read"),
     ("two drafts", "joins one draft"), ("fewer than stated", "MTP layer 2 of 3 is not whole .no enorm, .*its block"),
     ("a gap", "MTP layer 1 of 3 is not whole .no hnorm.")],
)  # fmt: skip
def test_what_cannot_draft_is_named_in_one_line(change: str, said: str, tmp_path: Path) -> None:
    lost = {"no tensors": "mtp.", "no mixer": "mtp.fc", "fewer than stated": "model.layers.5.",
            "a gap": "model.layers.4.hnorm."}.get(change, "nothing")  # fmt: skip
    folder, *_ = carrying("glm4_moe of 3" if "model" in lost else "mellum")
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(lost)}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"num_nextn_predict_layers": 1, **config}))
    with pytest.raises(UserError, match=said) as error:
        load(tmp_path, "mtp+self:int4" if change == "two drafts" else "mtp")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("draft_dtype", [None, "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_has_what_a_carried_draft_holds(family: str, draft_dtype: str | None) -> None:
    """Its weights, and the states that the target shows it, whose log is longest behind a prompt's pass."""
    num_logged = []
    with opened(family, tree="dynamic:16x3", draft_dtype=draft_dtype) as decoder:
        right = TapLog.commit

        def counted(log: TapLog, path: Any, length: int) -> None:
            right(log, path, length)
            num_logged.append(sum(rows.nbytes for rows in log._rows))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TapLog, "commit", counted)
            decoder.generate(PROMPT * 12, max_new_tokens=6)
        draft = decoder.drafter.model
        assert draft is not None
        shape = model_shape(draft.checkpoint, "float32")
        planned = shape.num_bytes - shape.rest_bytes + shape.own_rest_bytes
        # a scratch is made as large as it has to be
        assert decoder.drafter.num_bytes <= planned + shape.scratch_bytes
        num_own = sum(not draft.checkpoint.shares(name) for name in draft.checkpoint.tensors)
        assert planned <= decoder.drafter.num_bytes + BLOCK_BYTES * num_own
        assert max(num_logged) <= taps_bytes(shape, decoder.plan.max_prompt_rows + decoder.plan.num_nodes) / 3
        assert decoder.plan.draft_bytes >= planned + 2 * max(num_logged)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe of 3", "nemotron_h"])
def test_experts_come_on_demand_as_those_of_any_layer(family: str) -> None:
    """Few of them have room; text and scores are as ever, and the plan has what is held."""
    with opened(family, None, tree="none", lookup=False) as decoder:
        wanted = texts_of(decoder, HOT)
    settings = {"experts": "demand", "tree": "dynamic:16x3", "context": 256}
    with opened(family, **settings) as decoder:
        roomy = decoder.plan
    assert roomy.draft_experts is not None
    slot_bytes = roomy.draft_experts.slot_bytes
    assert roomy.num_kept_draft_experts == roomy.draft_experts.num_records
    lacking_bytes = 2 * roomy.num_draft_expert_slots * slot_bytes // 3
    few = roomy.fixed_bytes + sum(roomy.layer_bytes) + 6 * roomy.expert_slot_bytes - lacking_bytes
    with opened(family, ram=few, **settings) as decoder:
        plan = decoder.plan
        assert 0 < plan.num_draft_expert_slots < roomy.num_draft_expert_slots
        model: Any = decoder.drafter.model
        assert texts_of(decoder, HOT) == wanted
        assert gap(family, decoder) < 1e-4
        assert model._pool.num_misses > 0
        shape = model_shape(model.checkpoint, "float32")
        assert shape.experts is not None
        held = decoder.drafter.num_bytes
        slots_bytes = plan.num_draft_expert_slots * slot_bytes
        assert slots_bytes <= held <= sum(shape.experts.dense_bytes) + shape.own_rest_bytes + slots_bytes
        spared_bytes = (roomy.num_draft_expert_slots - plan.num_draft_expert_slots) * slot_bytes
        taps = [taps_bytes(shape, each.max_prompt_rows + each.num_nodes) for each in (roomy, plan)]
        assert roomy.draft_bytes - plan.draft_bytes == spared_bytes + taps[0] - taps[1]
        total = roomy.draft_experts.num_records
        left = total - plan.num_kept_draft_experts
    options = {"model": carrying(family)[0], "draft": "mtp", "dtype": "float32", "ram": few, **settings}
    printed = " ".join(answer_lines(estimate(LoadOptions(**options))).split())
    assert f"but for {left} of {total} experts" in printed


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_a_tune_scores_with_the_states_of_the_target(family: str) -> None:
    """Ranks are those of the library's scores."""
    with opened(family, tree="dynamic:12x3") as decoder:
        written = decoder.generate(PROMPT, max_new_tokens=16).token_ids
        rank_rows = ranks_of(decoder, PROMPT, written, Sampling())
        text = [*PROMPT, *written]
        scores = [path_scores(family, text[:at], []) for at in range(len(PROMPT), len(text))]
        places = [int((row_V > row_V[token]).sum()) for row_V, token in zip(scores, written, strict=True)]
        wanted = [place if place < NUM_RANKS else -1 for place in places]
        assert rank_rows == wanted
        again = tokens_again(decoder, PROMPT, written, Sampling(), DynamicShape(12, 3))
        assert len(written) - 3 <= sum(again) <= len(written)


BLOCK = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
         "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]  # fmt: skip
SPARSE = [*BLOCK[:6], "mlp.gate", "mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.experts.0.down_proj"]
FIRST = "enorm", "hnorm", "eh_proj"
KINDS = {"hunyuan v4": "hy_v4", "mistral large 4": "mistral_large4_text"}
# by family: tensors by the names of published files, and whether its form is read
NAMES: dict[str, tuple[list[str], bool]] = {
    "glm": ([f"model.layers.2.{part}" for part in (*FIRST, "shared_head.norm", "shared_head.head", *SPARSE)], True),
    "step": ([f"model.layers.{2 + depth}.{part}" for depth in range(3)
              for part in (*FIRST, "shared_head.norm", *SPARSE)], True),
    "qwen3.5": (["mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm",
                 *(f"mtp.layers.0.{part}" for part in BLOCK)], True),
    "mimo": ([f"model.mtp_layers.0.{part}" for part in (
        "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", *BLOCK)], True),
    "mimo v2": ([f"model.mtp.layers.{depth}.{part}" for depth in range(3) for part in (
        *FIRST, "final_layernorm", *(part.replace("post_attention", "pre_mlp") for part in BLOCK))], True),
    "ernie": (["model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0",
               *(f"model.mtp_block.0.{part}" for part in BLOCK)], True),
    "nemotron": ([f"mtp.layers.0.{part}" for part in (*FIRST, "norm", "mixer.q_proj")]
                 + ["mtp.layers.1.norm", "mtp.layers.1.mixer.gate", "mtp.layers.1.enorm"], False),
    "longcat": (["model.mtp.norm", *(f"model.mtp.layers.0.{part}" for part in (
        "enorm.m", "hnorm.m", "eh_proj", *BLOCK[:6], "transformer_layer.mlp.gate_proj"))], False),
    "deepseek v4": ([f"mtp.0.{part}" for part in ("enorm", "hnorm", "e_proj", "h_proj", "norm", "attn.wq_a")], False),
    "hunyuan v4": ([f"model.mtp_layers.0.{part}" for part in (*FIRST, "final_layernorm", *SPARSE)], False),
    "mistral large 4": (["mtp_dspark.layers.0.attention.wq", "mtp_dspark.markov_head.markov_w1"], False),
    "inkling": (["model.mtp.chain_norm", *(f"model.mtp.layers.0.{part}" for part in (
        "embed_norm", "hidden_norm", "input_proj", "transformer_block.attn.wq_du"))], False),
}  # fmt: skip


@pytest.mark.parametrize("family", NAMES)
def test_layers_are_found_by_the_names_of_published_files(family: str) -> None:
    """A form that is not read is refused by the parts that are missing, and `auto` passes it over."""
    target = open_checkpoint(carrying("mellum")[0])
    names, is_read = NAMES[family]
    if kind := KINDS.get(family):
        target = replace(target, config={**target.config, "model_type": kind})
    entry = next(iter(target.extra.values()))
    target = replace(target, extra={f"{name}.weight": entry for name in names})
    assert has_mtp(target) == is_read
    if not is_read:
        with pytest.raises(UserError, match="in a form that is not read"):
            mtp_checkpoint(target)
        return
    draft = mtp_checkpoint(target)
    block = SPARSE if any("experts" in name for name in names) else BLOCK
    num_depths = 3 if family in ("step", "mimo v2") else 1
    wanted = {f"model.layers.{depth}.{part}" for depth in range(num_depths) for part in block}
    wanted |= {f"model.mixer.{part}" for part in FIRST} | ({"model.norm"} if family != "ernie" else set())
    wanted |= {f"model.mixer.deeper.{depth}.{part}" for depth in range(num_depths - 1) for part in (*FIRST, "norm")}
    unshared = {name.removesuffix(".weight") for name in draft.tensors if not draft.shares(name)}
    assert unshared == wanted and of_text(draft.config)["num_hidden_layers"] == num_depths
    assert draft.carried is not None and draft.carried.num_depths == num_depths
