"""`--model offload` of lm-eval: what it says equals what `--model hf` says of the same weights, by far fewer passes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from served import MODEL_ID, serving

import offload
from offload.errors import UserError

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'offload[eval]'")

PAIR = Path(offload.__file__).parent / "demo_pair"
TOLERANCE = 1e-4  # of log-probabilities in float32
LONG = "".join(f"def number_{count}(self):\n    return {count * 37} + self.first\n\n" for count in range(90))
CHOICES = [
    {"question": question, "choices": choices, "answer": 0}
    for question, choices in [
        ("import os\nimport", [" sys", " re, sys", " and not", " the"]),
        ("class Thing:\n    def __init__(", ["self", "self, name", "cls", ")"]),
        ("for index in", [" range(10):", " enumerate(lines):", " is", "("]),
        ("try:\n    pass\nexcept ", ["ValueError", "OSError as error:", "def", "try"]),
        ("", ["def run(self):", "import", "x"]),
        ("return not ", ["None", " None", "self.done", "return"]),
    ]
]
PREFIXES = ["def main():\n", "import sys\n\nclass ", "    for line in ", "if __name__ ==", "return self."]
TEXTS = ["def f(x):\n    return x + 1\n", "import re\n", LONG]


@pytest.fixture(scope="module")
def ours() -> Iterator[Any]:
    from offload.integrations.lm_eval import OffloadLM

    with offload.load(PAIR / "target", PAIR / "draft", dtype="float32", threads=1, parallel=4) as decoder:
        yield OffloadLM(decoder)


@pytest.fixture(scope="module")
def theirs() -> Any:
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
    return HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(PAIR / "target"), batch_size=1)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three small tasks, with their data."""
    folder = tmp_path_factory.mktemp("tasks")
    choice = {"output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}"}
    write = {"output_type": "generate_until", "doc_to_text": "{{prefix}}", "doc_to_target": "{{wanted}}"}
    write |= {"generation_kwargs": {"until": ["\n\n", "("], "max_gen_toks": 24, "do_sample": False}}
    roll = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    for name, task, docs, metrics in [
        ("small_choice", choice | {"doc_to_target": "answer"}, CHOICES, ["acc", "acc_norm"]),
        ("small_write", write, [{"prefix": prefix, "wanted": "self"} for prefix in PREFIXES], ["exact_match"]),
        ("small_text", roll, [{"text": text} for text in TEXTS], ["word_perplexity", "bits_per_byte"]),
    ]:
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        whole = {
            "task": name, "dataset_path": "json", "test_split": "test", **task,
            "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
            "metric_list": [{"metric": metric} for metric in metrics],
        }  # fmt: skip
        (folder / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML
    return folder


def results(model: Any, tasks: Path, *names: str) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    result: dict[str, Any] = lm_eval.simple_evaluate(
        model=model, tasks=[*names], task_manager=manager, bootstrap_iters=0, log_samples=True, verbosity="ERROR"
    )
    return result


def answers(result: dict[str, Any], task: str) -> list[Any]:
    return [answer for sample in result["samples"][task] for answer in sample["resps"]]


def test_tasks_give_what_hf_gives(ours: Any, theirs: Any, tasks: Path) -> None:
    names = ("small_choice", "small_write", "small_text")
    own_results, other = results(ours, tasks, *names), results(theirs, tasks, *names)
    for task in names:
        got, wanted = own_results["results"][task], other["results"][task]
        assert got.keys() == wanted.keys()
        numbers = [name for name, value in wanted.items() if isinstance(value, float) and "stderr" not in name]
        assert numbers and all(got[name] == pytest.approx(wanted[name], rel=TOLERANCE) for name in numbers)
    for (got,), (wanted,) in zip(answers(own_results, "small_choice"), answers(other, "small_choice"), strict=True):
        assert float(got[0]) == pytest.approx(float(wanted[0]), abs=TOLERANCE) and str(got[1]) == str(wanted[1])
    assert answers(own_results, "small_write") == answers(other, "small_write")
    for (got,), (wanted,) in zip(answers(own_results, "small_text"), answers(other, "small_text"), strict=True):
        assert float(got) == pytest.approx(float(wanted), rel=TOLERANCE)


def request(*arguments: Any) -> Any:
    """As lm-eval gives them to a model."""
    return SimpleNamespace(args=arguments)


def planted_window(self: Any, request: Any) -> tuple[list[int], int]:
    _, context, scored = request
    ids = (context + scored)[-self.max_length :]  # one token less than there is room for
    return ids, len(ids) - len(scored)


def test_a_window_that_is_too_short_is_seen(ours: Any, theirs: Any) -> None:
    pairs = [request(LONG, "return None"), request(LONG[:80], "return None")]
    wanted = theirs.loglikelihood(pairs, disable_tqdm=True)
    result = ours.loglikelihood(pairs, disable_tqdm=True)
    for (score, own_greedy), (other, other_greedy) in zip(result, wanted, strict=True):
        assert score == pytest.approx(other, abs=TOLERANCE) and own_greedy == other_greedy
    with patch.object(type(ours), "_window", planted_window):
        long, short = ours.loglikelihood(pairs, disable_tqdm=True)
    assert abs(long[0] - wanted[0][0]) > 10 * TOLERANCE and short == result[1]


def test_requests_share_passes(ours: Any, theirs: Any) -> None:
    """Beside the passes of `generate_until`, of which every one writes for as many texts as have a place."""
    names = ["value", "other", "self.count", "None"]
    pairs = [request(f"def number_{count}({name}):\n    return", f" {name}") for count in range(24) for name in names]
    before = ours.decoder.num_score_passes
    result = ours.loglikelihood(pairs, disable_tqdm=True)
    num_passes = ours.decoder.num_score_passes - before
    assert 0 < num_passes <= len(pairs) / 8, f"{num_passes} passes for {len(pairs)} requests"
    for score, other in zip(result[::8], theirs.loglikelihood(pairs[::8], disable_tqdm=True), strict=True):
        assert score[0] == pytest.approx(other[0], abs=TOLERANCE) and score[1] == other[1]


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"num_concurrent": 3}], ids=["batches", "at once"])
def test_its_client_for_servers_scores_as_hf_does(theirs: Any, tasks: Path, options: dict[str, Any]) -> None:
    """What asks `/v1/completions` for the likelihood of prompts; its windows are shorter than a model's own."""
    pytest.importorskip("tenacity", reason="lm-eval is not installed: pip install 'offload[eval]'")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    decoder = offload.load(PAIR / "target", PAIR / "draft", dtype="float32", threads=1, parallel=2)
    with serving(decoder) as served:
        options |= {"base_url": f"{served.address}/v1/completions", "max_length": 1024}
        model = LocalCompletionsAPI(model=MODEL_ID, tokenizer=str(PAIR / "target"), **options)
        result = results(model, tasks, "small_choice", "small_text")
        num_passes = decoder.num_score_passes
    wanted = results(theirs, tasks, "small_choice", "small_text")
    for (score,), (other,) in zip(answers(result, "small_choice"), answers(wanted, "small_choice"), strict=True):
        assert float(score[0]) == pytest.approx(float(other[0]), abs=TOLERANCE) and str(score[1]) == str(other[1])
    assert result["results"]["small_choice"]["acc,none"] == wanted["results"]["small_choice"]["acc,none"]
    texts = zip(answers(result, "small_text"), answers(wanted, "small_text"), strict=True)
    for number, ((score,), (other,)) in enumerate(texts):
        assert float(score) == pytest.approx(float(other), rel=0.02 if TEXTS[number] == LONG else TOLERANCE)
    # requests that come at once may each find an idle server
    assert num_passes > 0 and ("batch_size" not in options or num_passes < len(answers(result, "small_choice")))


def test_chats_are_put_into_the_template(ours: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = "{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    strict = "{% for m in messages %}" + refusing + "[{{ m.content }}]{% endfor %}"
    for model in (ours, theirs):
        monkeypatch.setattr(model.tokenizer, "chat_template", strict)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat) == "[Hi]"
    assert ours.chat_template(True) == strict and ours.tokenizer_name


@pytest.mark.parametrize("settings, refusal", [
    ({"num_beams": 4}, "num_beams=4"), ({"max_gen_toks": 5000}, "less than the context"),
])  # fmt: skip
def test_what_nothing_heeds_or_has_no_room_is_refused(ours: Any, settings: dict[str, Any], refusal: str) -> None:
    with pytest.raises(UserError, match=refusal):
        ours.generate_until([request("import", {"until": ["x"], **settings})], disable_tqdm=True)
    with pytest.raises(UserError, match="between 1 and 1024 tokens"):
        ours.loglikelihood([request("import", LONG)], disable_tqdm=True)


@pytest.fixture
def _own_tasks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thousands that lm-eval brings take half a minute to look through."""
    from lm_eval.tasks import TaskManager

    begin = TaskManager.__init__
    monkeypatch.setattr(
        TaskManager, "__init__", lambda self, **options: begin(self, **options | {"include_defaults": False})
    )


@pytest.mark.usefixtures("_own_tasks_alone")
def test_bad_arguments_are_one_line(monkeypatch: pytest.MonkeyPatch, tasks: Path, capsys: Any) -> None:
    from offload.integrations.lm_eval import main

    common = ["lm-eval", "run", "--tasks", "small_choice", "--include_path", str(tasks), "--model", "offload"]
    for model_args, refusal in [("pretrained=nowhere", "nowhere"), (f"pretrained={PAIR / 'target'},rum=1GiB", "rum=")]:
        monkeypatch.setattr(sys, "argv", [*common, "--model_args", model_args])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("offload: ") and refusal in line
