"""What the bench rests on: the gate refuses what is wrong, prompts repeat, regressions are told from noise."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload import UserError
from offload.bench.harness.gate import (
    Proof,
    Written,
    prove,
    reference,
)
from offload.bench.harness.prompts import prompts
from offload.bench.harness.record import Result, change, changes, read, store
from offload.bench.harness.tables import Guard
from offload.checkpoint.packaged import PAIR
from offload.sampling_options import Sampling

V = 50


def fixed_scores(seed: int) -> tuple[Tensor, object]:
    """Logits that do not depend on the text, and a reference that gives them."""
    logits_TV = torch.randn(400, V, generator=torch.Generator().manual_seed(seed)) * 3

    def score(prompt_ids: Sequence[int], new_ids: Sequence[int]) -> Tensor:
        return logits_TV[: len(new_ids)]

    return logits_TV, score


def test_gate_passes_the_argmax_and_refuses_one_other_token() -> None:
    logits_TV, score = fixed_scores(0)
    right = logits_TV.argmax(1).tolist()
    assert prove([Written([1], right, Sampling(), "match")], score) == Proof(400, 0, 0, 0.0)
    wrong = [*right]
    wrong[123] = int(logits_TV[123].argmin())
    with pytest.raises(UserError, match="new token 123 is wrong"):
        prove([Written([1], wrong, Sampling(), "match")], score)


def test_gate_lets_ties_within_rounding_pass_and_counts_them() -> None:
    logits_TV, score = fixed_scores(1)
    best, second = logits_TV.topk(2, 1).indices.T
    logits_TV[7, second[7]] = logits_TV[7, best[7]] - 0.01
    chosen = best.tolist()
    chosen[7] = int(second[7])
    assert prove([Written([1], chosen, Sampling(), "match")], score) == Proof(399, 1, 0, 0.0)


def test_gate_lets_a_mixture_part_from_float32_by_as_much_as_its_own_scores_do() -> None:
    """What is refused is a token further off, or one of a model that 16 bits do not move so far."""
    logits_TV, score = fixed_scores(4)
    best, second = logits_TV.topk(2, 1).indices.T
    chosen = best.tolist()
    chosen[7] = int(second[7])
    logits_TV[7, second[7]] = logits_TV[7, best[7]] - 0.5
    run = Written([1], chosen, Sampling(), "match")
    typed_TV = logits_TV.clone()
    typed_TV[90, 3] += 0.75  # another row, where a router has chosen otherwise
    proof = prove([run], score, lambda prompt_ids, new_ids: typed_TV)
    assert proof == Proof(399, 1, 0, 0.0, 1, pytest.approx(0.75))
    assert (
        "1 of these by what routers choose in 16 bits, which moves the original's own scores by up to 0.75"
        in proof.line
    )
    for spoilt_TV in (logits_TV, typed_TV.where(typed_TV < 1e9, 0.0) * math.nan):
        with pytest.raises(UserError, match=r"new token 7 is wrong, it misses the draw by 0\.500"):
            prove([run], score, lambda prompt_ids, new_ids, own_TV=spoilt_TV: own_TV)
    typed_TV[90, 3] -= 0.4
    with pytest.raises(UserError, match="new token 7 is wrong"):
        prove([run], score, lambda prompt_ids, new_ids: typed_TV)
    with pytest.raises(UserError, match="new token 7 is wrong"):
        prove([run], score)


@pytest.mark.parametrize("rule", ["sequoia", "specinfer", "spectr"])
def test_gate_of_rules_that_draw_afresh_is_the_distribution(rule: str) -> None:
    logits_TV, score = fixed_scores(2)
    generator, sampling = torch.Generator().manual_seed(5), Sampling(temperature=0.6)
    drawn = torch.multinomial((logits_TV / 0.6).softmax(1), 1, generator=generator)[:, 0].tolist()
    proof = prove([Written([1], drawn, sampling, rule)], score)
    assert proof.num_by_law == 400 and abs(proof.sigmas) < 3.5
    warmer = torch.multinomial(logits_TV.softmax(1), 1, generator=generator)[:, 0].tolist()
    for wrong in (warmer, logits_TV.argmax(1).tolist(), random.Random(0).choices(range(V), k=400)):
        with pytest.raises(UserError, match="miss the target's distribution"):
            prove([Written([1], wrong, sampling, rule)], score)


def test_streamed_reference_says_what_the_resident_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    new_ids = list(range(40, 60))
    with reference(PAIR / "target", PAIR / "draft", "2GiB") as resident:
        wanted = resident([5, 6, 7], new_ids)
    monkeypatch.setattr("offload.bench.harness.gate.available_ram_bytes", lambda: 0)
    with reference(PAIR / "target", PAIR / "draft", "2GiB") as streamed:
        for _ in range(2):  # a second text begins afresh
            assert torch.allclose(streamed([5, 6, 7], new_ids), wanted, atol=1e-3)


def test_prompts_repeat_and_none_comes_twice() -> None:
    chosen = prompts(["code"], 6)
    assert chosen == prompts(["code"], 6) and len({prompt.text for prompt in chosen}) == len(chosen) == 6
    assert all(prompt.text.strip() and len(prompt.text) <= 1200 for prompt in chosen)


def test_files_of_the_users(tmp_path: Path) -> None:
    lines = [{"question_id": 1, "turns": ["One?", "Two?"]}, {"prompt": "Three?"}, {"text": "Four?"}]
    questions, text = tmp_path / "mt_bench.jsonl", tmp_path / "story.txt"
    questions.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    text.write_text("Once upon a time")
    chosen = prompts([str(questions), str(text)], 9)
    assert [prompt.text for prompt in chosen] == ["One?", "Three?", "Four?", "Once upon a time"]
    assert [prompt.is_chat for prompt in chosen] == [True, True, True, False]
    questions.write_text('{"turns": []}')
    with pytest.raises(UserError, match=r"mt_bench.jsonl:1 has no question"):
        prompts([str(questions)], 1)
    with pytest.raises(UserError, match=r"code, copy or a file, cannot read cods \(No such file"):
        prompts(["cods"], 1)


def noisy(centre: float, seed: int, num: int = 8, noise: float = 0.05) -> list[float]:
    rng = random.Random(seed)
    return [centre * rng.gauss(1, noise) for _ in range(num)]


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_a_planted_regression_is_flagged_and_noise_is_not(better: str) -> None:
    worse = 0.8 if better == "higher" else 1.25
    for seed in range(20):
        old = Guard(noisy(5, seed), better)  # type: ignore[arg-type]
        assert not change("same", old, Guard(noisy(5, 100 + seed), better)).is_worse  # type: ignore[arg-type]
        assert change("slow", old, Guard(noisy(5 * worse, 200 + seed), better)).is_worse  # type: ignore[arg-type]
        assert not change("fast", old, Guard(noisy(5 / worse, 300 + seed), better)).is_worse  # type: ignore[arg-type]


def test_prompts_are_compared_with_themselves() -> None:
    """What differs between prompts hides a tenth less in one heap, but not prompt by prompt."""
    names, rng = ["a", "b", "c", "d"], random.Random(1)
    before = [2.0, 4.0, 6.0, 9.0]
    after = [0.9 * value * rng.gauss(1, 0.005) for value in before]
    verdict = change("paired", Guard(before, "higher", names), Guard(after, "higher", names))
    assert verdict.after / verdict.before == pytest.approx(verdict.ratio)
    assert change("paired", Guard(before, "higher", names), Guard(after, "higher", names)).is_worse
    assert not change("heaps", Guard(before, "higher"), Guard(after, "higher")).is_worse


def test_one_sample_or_a_change_below_the_floor_is_never_flagged() -> None:
    assert not change("alone", Guard([5.0], "higher"), Guard([1.0], "higher")).is_worse
    tiny = Guard([0.99 * value for value in (5.0, 5.001, 5.002)], "higher")
    assert not change("floor", Guard([5.0, 5.001, 5.002], "higher"), tiny).is_worse


def a_result(bench: str = "decode", **guards: Guard) -> Result:
    return Result(bench=bench, settings={"x": 1}, ceiling={"bytes_per_s": 1e9}, rows=[{"name": "a"}], guards=guards)


def test_results_are_stored_as_they_are(tmp_path: Path) -> None:
    result = a_result(speed=Guard([1.0, 3.0, 2.0], "higher", ["p", "q", "r"]))
    store(result.as_dict(), tmp_path / "deep" / "a.json")
    assert read(tmp_path / "deep" / "a.json") == result
    stored = json.loads((tmp_path / "deep" / "a.json").read_text())
    wanted = {"schema", "bench", "settings", "ceiling", "rows", "guards", "machine", "created", "commit"}
    assert stored.keys() == wanted and stored["guards"]["speed"]["value"] == 2.0
    assert {"cpu", "num_cores", "memory_bytes", "torch"} <= stored["machine"].keys()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1}', '{"schema": 1, "guards": []}', '{"schema": 2}'])
def test_what_is_no_result_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=r"a\.json"):
        read(tmp_path / "a.json")


@pytest.mark.parametrize("name", ["target", "ram_bytes", "temperature", "num_new_tokens", "prompts"])
def test_results_of_other_models_or_texts_are_not_compared(name: str) -> None:
    guard = {"a": Guard([1.0, 1.1], "lower")}
    old, new = a_result(**guard), a_result(**guard)
    old.settings[name], new.settings[name] = ["x"], ["x"]
    assert not changes(old, new)[0].is_worse
    new.settings[name] = ["y"]
    with pytest.raises(UserError, match=f"--compare: {name} differ: measure with the same options"):
        changes(old, new)


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    new, old, link = tmp_path / "deep" / "new.json", tmp_path / "old.json", tmp_path / "link.json"
    old.write_text("before")
    link.symlink_to(old)
    for path in (new, old, link):
        with pytest.raises(TypeError):
            store({"half": 1, "other": object()}, path)
    assert old.read_text() == "before" and not new.exists()
    store({"by": "a link"}, link)
    assert link.is_symlink() and json.loads(old.read_text()) == {"by": "a link"}
    store({}, Path("/dev/null"))
    assert Path("/dev/null").is_char_device(), "what is no file is not replaced"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
