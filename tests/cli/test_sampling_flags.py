"""Flags of penalties, biases, log-probabilities, leniency and a system prompt: they reach the decoder."""

import json
from pathlib import Path
from typing import Any

import pytest
from reciting import NUM_SAID, PROMPT, SAID, generate_json, open_decoder
from refusals import assert_refused, generate
from shell import shell

from offload.bench.harness.models import resident_pair
from offload.checkpoint.packaged import PAIR
from offload.cli.demo_run import compare
from offload.cli.sampling import GivenSampling
from offload.distributed.pipeline_decoder import check_stages
from offload.engine import load
from offload.engine.request import Request
from offload.errors import UserError
from offload.options import SamplingOptions
from offload.planning.load_options import LoadOptions
from offload.reports.tune import tune
from offload.sampling_options import Sampling

FLAGS = {
    "temperature": ("--temp", 2), "top_p": ("--top-p", 0.9), "top_k": ("--top-k", 30),
    "min_p": ("--min-p", 0.1), "repeat_penalty": ("--repeat-penalty", 1.4),
    "presence_penalty": ("--presence-penalty", 0.5), "frequency_penalty": ("--frequency-penalty", -0.2),
}  # fmt: skip


def test_penalties_reach_the_sampler(looper: Path) -> None:
    arguments = [word for flag in FLAGS.values() for word in flag]
    arguments += ["--logit-bias", "40:3.5", "--logit-bias", "7:-2", "--seed", 3, "-n", 20]
    result = generate_json(looper, *arguments)
    options = {name: value for name, (_, value) in FLAGS.items()} | {"logit_bias": {40: 3.5, 7: -2}}
    with open_decoder(looper) as decoder:
        assert decoder.generate(PROMPT, max_new_tokens=20, seed=3, **options).token_ids == result["token_ids"]
        assert "".join(decoder.stream(PROMPT, max_new_tokens=20, seed=3, **options)) == result["text"]
    assert result["sampling"] == {**options, "logit_bias": {"7": -2, "40": 3.5}}


def test_logprobs_are_part_of_the_object(ender: Path) -> None:
    result = generate_json(ender, "--logprobs", 2)
    assert [entry["token"] for entry in result["logprobs"]] == result["token_ids"]
    for entry in result["logprobs"]:
        assert entry["top"][0] == [entry["token"], entry["logprob"]] and len(entry["top"]) == 2
        assert entry["top_texts"][0] == entry["text"] and len(entry["top_texts"]) == 2
    whole = "".join(entry["text"] for entry in result["logprobs"])
    assert whole.startswith(" Hello w\u00f6rld "), "half a character is none"
    assert "logprobs" not in generate_json(ender)


def test_a_system_prompt_is_told_first_and_needs_a_prompt(talker: Path, sound: Path, tmp_path: Path) -> None:
    instructed, plain = (generate_json(talker, *flags, prompt="Say") for flags in (("--system", "Be brief."), ()))
    assert instructed["text"] == plain["text"] == SAID and len(instructed["token_ids"]) == NUM_SAID + 1
    assert instructed["num_prompt_tokens"] - plain["num_prompt_tokens"] == len("<system:Be brief.")
    (tmp_path / "text.session").write_bytes(b"x")
    outcome = generate(sound, "--session", tmp_path / "text.session", "--system", "Be.")
    assert_refused(outcome, "--system is told before a prompt, and there is none")


def test_a_chat_is_penalised_too(talker: Path) -> None:
    script = b"/set repeat-penalty 1.5\n/set\nSay\n"
    flags = ("--ram", "1GiB", "--context", 128, "--threads", 1, "--presence-penalty", 0.25)
    outcome = shell("chat", "-m", talker, *flags, stdin=script)
    assert outcome.code == 0
    assert "greedy, repeat penalty 1.5, presence penalty 0.25, seed 0" in outcome.err


def test_greedy_wins_and_says_so() -> None:
    for given, note in (
        ({}, ""), ({"temperature": 0.0, "min_p": 0.0}, ""),
        ({"temperature": 1.0, "top_p": 0.9}, "--greedy wins over `temperature` 1 and `top_p` 0.9"),
    ):  # fmt: skip
        settled = GivenSampling.from_options(SamplingOptions({**given, "seed": 7}, greedy=True)).settled("", print)
        assert settled == (Sampling(seed=7), note)


@pytest.mark.parametrize("wrong", [{"sampling": Sampling(logit_bias={5: 1})}, {"num_logprobs": 0}], ids=str)
def test_stages_refuse_what_they_cannot_do(wrong: dict[str, Any]) -> None:
    check_stages(Request("x", Sampling(temperature=1, min_p=0.5)))
    with pytest.raises(UserError, match="use `ranks` shards"):
        check_stages(Request("x", **wrong))


RUN = ("generate", "-m", str(PAIR / "target"), "-d", str(PAIR / "draft"), "--raw", "-p", "import", "-n", "12")
HOW = ("--tree", "chain:3", "--context", "64", "--temp", "0")


def test_it_is_said_on_stderr_and_in_the_json() -> None:
    for flags, is_exact in (((), True), (("--lenience", "1"), True), (("--lenience", "0.2"), False)):
        shown, outcome = shell(*RUN, *HOW, *flags), shell(*RUN, *HOW, *flags, "--json")
        assert shown.code == outcome.code == 0, shown.err + outcome.err
        lines = [line for line in shown.err.splitlines() if line.startswith("NOT EXACT: --lenience 0.2 accepts")]
        assert len(lines) == (not is_exact) and outcome.err == ""
        result = json.loads(outcome.out)
        assert result["is_exact"] is is_exact and result.get("lenience", 1.0) == (1.0 if is_exact else 0.2)
        assert is_exact or result["is_invariant"] is False
        assert result["stats"]["alpha"]["num_positions"] > 0


def test_nobody_proves_or_tunes_what_is_not_exact(tmp_path: Path) -> None:
    options = LoadOptions(PAIR / "target", PAIR / "draft", "1GiB", "chain:3", device="cpu", context=512, lenience=0.5)
    with (
        load.open_decoder(options) as decoder,
        pytest.raises(UserError, match="proved"),
    ):
        compare(decoder, "import", Sampling(), num_tree=2, show=lambda _, run: print(*run))
    with pytest.raises(UserError, match="what is measured is proved: `lenience` must be 1"):
        resident_pair().open("chain:3", lenience=0.5)
    text = tmp_path / "text"
    text.write_text("import os\n" * 200)
    with pytest.raises(UserError, match="`lenience` must be 1 for a profile"):
        tune(LoadOptions(PAIR / "target", PAIR / "draft", lenience=0.5), [text], Sampling())
