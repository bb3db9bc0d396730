"""lm-eval's client for servers: its scores and texts are those of `--model hf` of the same weights, by fewer passes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from served import MODEL_ID, serving

import offload

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: make test-eval")

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


@pytest.mark.parametrize("options", [{"batch_size": 4}, {"num_concurrent": 3}], ids=["batches", "at once"])
def test_its_client_for_servers_scores_as_hf_does(theirs: Any, tasks: Path, options: dict[str, Any]) -> None:
    """What asks `/v1/completions` for the likelihood of prompts; its windows are shorter than a model's own."""
    pytest.importorskip("tenacity", reason="lm-eval is not installed: make test-eval")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    decoder = offload.load(PAIR / "target", PAIR / "draft", dtype="float32", threads=1, parallel=2)
    with serving(decoder) as served:
        options |= {"base_url": f"{served.address}/v1/completions", "max_length": 1024}
        model = LocalCompletionsAPI(model=MODEL_ID, tokenizer=str(PAIR / "target"), **options)
        result = results(model, tasks, "small_choice", "small_text", "small_write")
        num_passes = decoder.num_score_passes
    wanted = results(theirs, tasks, "small_choice", "small_text", "small_write")
    assert answers(result, "small_write") == answers(wanted, "small_write")
    for (score,), (other,) in zip(answers(result, "small_choice"), answers(wanted, "small_choice"), strict=True):
        assert float(score[0]) == pytest.approx(float(other[0]), abs=TOLERANCE) and str(score[1]) == str(other[1])
    assert result["results"]["small_choice"]["acc,none"] == wanted["results"]["small_choice"]["acc,none"]
    texts = zip(answers(result, "small_text"), answers(wanted, "small_text"), strict=True)
    for number, ((score,), (other,)) in enumerate(texts):
        assert float(score) == pytest.approx(float(other), rel=0.02 if TEXTS[number] == LONG else TOLERANCE)
    # requests that come at once may each find an idle server
    assert num_passes > 0 and ("batch_size" not in options or num_passes < len(answers(result, "small_choice")))
