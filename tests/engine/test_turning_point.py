"""Longrope: a text longer than the turning point has all its positions turned by other factors.

Expected texts come from whole passes of transformers' model, each over all tokens before the next one.
"""

from pathlib import Path

import pytest
import torch
from test_families import CHANGING, PROMPT, tiny_model
from tiny import save
from transformers import AutoModelForCausalLM, PreTrainedModel

import offload

TURN = 64
NUM_NEW = 40
PROMPTS = {num: (PROMPT * 4)[:num] for num in (40, TURN, TURN + 1, 100)}
LOAD = {"ram": "1GiB", "context": 160, "threads": 1}


def _whole_passes(theirs: PreTrainedModel, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NUM_NEW):
        with torch.inference_mode():
            tokens.append(int(theirs(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = CHANGING["longrope"]()
    config.rope_parameters["long_factor"] = [1.0 + 3 * place for place in range(8)]
    return save(tiny_model(config, seed=2), tmp_path_factory.mktemp("turning"))


@pytest.fixture(scope="module")
def texts(folder: Path) -> dict[int, list[int]]:
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    wanted = {num: _whole_passes(theirs, prompt) for num, prompt in PROMPTS.items()}
    with torch.inference_mode():
        generated_1T = theirs.generate(
            torch.tensor([PROMPTS[40]]), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None
        )
    assert generated_1T[0, 40:].tolist() == wanted[40], "transformers reads the text again as well"
    return wanted


def _take_in_by_parts(decoder: offload.Decoder) -> None:
    decoder.target._max_rows = 24
    if decoder.num_parallel > 1:
        decoder._speculation._max_prompt_rows = 24


@pytest.mark.parametrize("parallel", [1, 3])
@pytest.mark.parametrize("tree", ["none", "64x16"])
def test_texts_are_the_targets_on_both_sides(
    parallel: int, tree: str, folder: Path, texts: dict[int, list[int]]
) -> None:
    """Prompts come in by parts; texts of both sides are written at a time, and nothing kept is mixed."""
    with offload.load(folder, folder, **LOAD, tree=tree, parallel=parallel) as decoder:
        assert any(f"beyond {TURN} tokens is read anew once" in note for note in decoder.notes)
        _take_in_by_parts(decoder)
        for _ in range(2):
            outcome = decoder.generate([*PROMPTS.values()], max_new_tokens=NUM_NEW)
            assert [generation.token_ids for generation in outcome] == [*texts.values()]


def test_a_text_that_is_gone_on_with_keeps_what_fits(folder: Path, texts: dict[int, list[int]], tmp_path: Path) -> None:
    """A short text keeps nothing of a long one, nor the other way round; a session tells which it was."""
    greedy = offload.Sampling()
    text_40 = PROMPTS[40] + texts[40]
    with offload.load(folder, **LOAD) as decoder:

        def new_ids(prompt: list[int], num_kept: int) -> list[int]:
            run = decoder.run(prompt, greedy, max_new_tokens=len(text_40) - len(prompt), continues=True)
            list(run)
            assert run.result().stats.num_kept_tokens == num_kept
            return prompt + run.result().token_ids

        assert new_ids(text_40[:70], 0) == text_40
        decoder.save_session(tmp_path / "long")
        assert new_ids(text_40[:75], 74) == text_40
        assert new_ids(text_40[:50], 0) == text_40, "of a long text"
        decoder.load_session(tmp_path / "long")
        assert new_ids(text_40[:50], 0) == text_40, "of a session with a long text"
        decoder.load_session(tmp_path / "long")
        assert new_ids(text_40[:75], 74) == text_40


def test_sampled_texts_are_those_without_a_tree(folder: Path) -> None:
    seen = set()
    for tree in ("none", "chain:8", "64x16"):
        with offload.load(folder, folder, **LOAD, tree=tree) as decoder:
            result = decoder.generate(PROMPTS[40], max_new_tokens=NUM_NEW, temperature=1.0, seed=3)
            seen.add(tuple(result.token_ids))
    assert len(seen) == 1 and len(next(iter(seen))) == NUM_NEW


def test_what_is_not_done_beyond_it_is_refused_with_figures(folder: Path) -> None:
    with pytest.raises(offload.UserError, match="`context` must be at most 256"):
        offload.load(folder, **{**LOAD, "context": 257})
    with offload.load(folder, **LOAD) as decoder:
        decoder.score_texts([(PROMPTS[TURN + 1], 1)])
        with pytest.raises(offload.UserError, match=f"scored up to the {TURN} tokens .*, got 99"):
            decoder.score_texts([(PROMPTS[100], 1)])
