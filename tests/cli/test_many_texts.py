"""`generate` for many texts: files of prompts, results that a later run goes on with, samples of one prompt."""

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from flipping import flip
from reciting import CONTEXT, NUM_SAID, PROMPT, SAID, at_sweep, failing_reads, interrupt, open_decoder, settings
from shell import Outcome, shell

from offload.checkpoint import identity
from offload.checkpoint.identity import PARTS, ModelIdentity
from offload.checkpoint.open import open_checkpoint
from offload.cli.batch_file import ResultsFile, open_results, read_tasks
from offload.engine.decoder import Decoder
from offload.engine.request import Request
from offload.sampling.grammar import Grammar
from offload.sampling_options import Sampling

Write = Callable[..., Path]


@pytest.fixture
def prompts(tmp_path: Path) -> Write:
    """Writes a file of prompts from objects, or lines as they are."""

    def write(*lines: object) -> Path:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write


def generate(model: Path, *arguments: object) -> Outcome:
    return shell("generate", *settings(model), *arguments)


def objects(text: str) -> list[dict[str, Any]]:
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


# Results


def test_every_prompt_gives_a_line_with_its_own_settings(ender: Path, prompts: Write) -> None:
    file = prompts(
        {"prompt": PROMPT, "id": "whole"},
        "",
        {"prompt": PROMPT, "max_tokens": 2, "id": 7},
        {"prompt": PROMPT, "stop": "w"},
    )
    outcome = generate(ender, "-f", file)
    whole, short, stopped = sorted(objects(outcome.out), key=lambda line: line["index"])
    assert outcome.code == 0 and "3 of 3 texts" in outcome.err and "tokens/s over all" in outcome.err
    assert (whole["id"], whole["text"], whole["finish_reason"]) == ("whole", SAID, "stop")
    assert whole["tokens"] == {"prompt": len(PROMPT), "new": NUM_SAID + 1} and len(whole["token_ids"]) == NUM_SAID + 1
    assert (short["id"], short["text"], short["finish_reason"]) == (7, " Hello", "length")
    assert (stopped["id"], stopped["text"], stopped["sample"]) == (None, " Hello ", 0)
    assert whole["seed"] == 0 and whole["sampling"]["temperature"] == 0 and "seed" not in whole["sampling"]


def test_messages_are_put_into_the_template(talker: Path, prompts: Write) -> None:
    file = prompts({"messages": [{"role": "user", "content": "Hi"}]}, {"prompt": "Hi"})
    first, other = objects(generate(talker, "-f", file, "--out", "-").out)
    assert first["text"] == other["text"] and first["tokens"] == other["tokens"], "a prompt is a question of the user"


def test_lines_have_what_flags_have(talker: Path, ender: Path, prompts: Write) -> None:
    system, chat = "Be brief.", [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    asked, spoken = objects(
        generate(talker, "-f", prompts({"prompt": "Hi"}, {"messages": chat}), "--system", system).out
    )
    assert asked["tokens"] == spoken["tokens"], "the system prompt stands before prompts"
    file = prompts({"prompt": PROMPT, "logprobs": 2, "max_tokens": 1}, {"prompt": PROMPT, "logit_bias": {"0": -50.0}})
    first, biased = objects(generate(ender, "-f", file, "-n", 3).out)
    assert [len(entry["top"]) for entry in first["logprobs"]] == [2] and "logprobs" not in biased
    assert biased["sampling"]["logit_bias"] == [[0, -50.0]]


def test_samples_of_a_file_follow_its_seeds(ender: Path, prompts: Write) -> None:
    file = prompts({"prompt": PROMPT, "seed": 5, "temperature": 1e-3}, {"prompt": PROMPT})
    lines = objects(generate(ender, "-f", file, "--samples", 2, "--temp", 0.001, "--seed", 8).out)
    keys = [(line["index"], line["sample"], line["seed"]) for line in lines]
    assert sorted(keys) == [(0, 0, 5), (0, 1, 6), (1, 0, 8), (1, 1, 9)]


def test_texts_side_by_side_are_those_of_one_after_the_other(ender: Path, prompts: Write) -> None:
    drawn = [{"prompt": "x" * count + PROMPT, "temperature": 4.0, "seed": count, "max_tokens": 9} for count in range(5)]
    file = prompts(*drawn, {"prompt": PROMPT})
    alone, together = (generate(ender, "-f", file, "--parallel", parallel, "--ram", "1GiB") for parallel in (1, 3))
    in_order = [sorted(objects(outcome.out), key=lambda line: line["index"]) for outcome in (alone, together)]
    assert in_order[0] == in_order[1] and len({line["text"] for line in in_order[0]}) > 3
    rates = [float(outcome.err.split(" tokens a pass")[0].split()[-1]) for outcome in (alone, together)]
    assert rates[1] > 1.5 * rates[0], "tokens of several texts come by one pass"


def test_a_prompt_that_is_too_long_fails_alone(ender: Path, prompts: Write, tmp_path: Path) -> None:
    file, out = prompts({"prompt": PROMPT * CONTEXT, "id": "long"}, {"prompt": PROMPT}), tmp_path / "out"
    outcome = generate(ender, "-f", file, "--out", out)
    long, short = objects(out.read_text())
    assert outcome.code == 1 and "1 of 2 texts could not be written" in outcome.err.splitlines()[-1]
    assert "exceed the context" in long["error"] and long["id"] == "long" and "text" not in long
    assert "raise --context" in long["error"] and "lower max_tokens" in long["error"], "flags, and keys of a line"
    assert short["text"] == SAID
    again = generate(ender, "-f", file, "--out", out)
    assert again.code == 1 and again.err.splitlines()[-1] == outcome.err.splitlines()[-1], "the file still lacks it"


# Going on


def test_what_is_written_is_not_repeated(ender: Path, prompts: Write, tmp_path: Path) -> None:
    file, out = prompts(*({"prompt": PROMPT, "max_tokens": count} for count in (3, 5, 8))), tmp_path / "out"
    assert generate(ender, "-f", file, "--out", out).code == 0
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    with counted_runs() as counted:
        assert generate(ender, "-f", file, "--out", out).code == 0 and counted == []
        for kept in (lines[0] + lines[1], lines[0] + lines[1] + lines[2][:30], lines[0] + lines[1] + lines[2][:4]):
            out.write_bytes(kept)
            counted.clear()
            outcome = generate(ender, "-f", file, "--out", out)
            assert outcome.code == 0 and "2 of 3 texts already" in outcome.err
            assert out.read_bytes() == whole and len(counted) == 1


def test_cut_short_it_keeps_what_is_finished(looper: Path, prompts: Write, tmp_path: Path) -> None:
    file, out = prompts(*({"prompt": PROMPT, "max_tokens": 1} for _ in range(6))), tmp_path / "out"
    with at_sweep(4, interrupt), patch("offload.engine.decoder.Decoder.num_parallel", 1):
        outcome = generate(looper, "-f", file, "--out", out)
    assert outcome.code == 130 and "3 of 6 texts" in outcome.err
    assert [line["index"] for line in objects(out.read_text())] == [0, 1, 2]
    assert generate(looper, "-f", file, "--out", out).code == 0
    assert sorted(line["index"] for line in objects(out.read_text())) == [*range(6)]
    file, out = prompts(*({"prompt": PROMPT, "max_tokens": count} for count in (1, 200))), tmp_path / "other"
    with failing_reads(60):
        assert generate(looper, "-f", file, "--out", out).code == 1, "the disk fails"
    assert [line["index"] for line in objects(out.read_text())] == [0]


@pytest.mark.parametrize(
    "change", [["-n", 4], ["--temp", 0.5], ["--seed", 3], ["--raw"], ["--stop", "x"], ["--rule", "topk"]]
)
def test_changed_settings_are_refused(
    ender: Path, prompts: Write, tmp_path: Path, change: Sequence[object], _no_weights: None
) -> None:
    file, out = prompts({"prompt": PROMPT}), tmp_path / "out"
    line = {
        "index": 0,
        "sample": 0,
        "text": "",
        "request": read_tasks(file, Request(), 1, "auto match 1")[0].digest,
        "model": identity.identity_of(open_checkpoint(ender)).as_dict(),
    }
    out.write_text(json.dumps(line) + "\n")
    outcome = generate(ender, "-f", file, "--out", out, *change)
    assert outcome.code == 2 and "line 1 is of another prompt or settings than index 0" in outcome.err
    assert objects(out.read_text()) == [line], "it stays as it is"


@pytest.mark.parametrize("written, refusal", [
    ("Dear diary", "line 1 is no result"), ("{}\n", "line 1 is no result"), ("[1]\n", "line 1 is no result"),
    ('{"index": 0, "sample": 0, "request": "x"}\n', "line 1 does not tell of which model it is"),
    ('{"index": 0, "sample": 0, "request": "x", "model": {"weights": "a"}}\n', "line 1 does not tell of which model"),
])  # fmt: skip
def test_files_of_something_else_stay_as_they_are(
    ender: Path, prompts: Write, tmp_path: Path, written: str, refusal: str, _no_weights: None
) -> None:
    out = tmp_path / "out"
    out.write_text(written)
    outcome = generate(ender, "-f", prompts({"prompt": PROMPT}), "--out", out)
    assert outcome.code == 2 and refusal in outcome.err and out.read_text() == written


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("weights", "weights differ"),
        ("chat_template.jinja", "chat template differs"),
        ("tokenizer.json", "tokenizer differs"),
        (None, ""),
    ],
)
def test_results_of_another_model_of_that_name_are_refused(
    part: str | None, words: str, looper: Path, prompts: Write, tmp_path: Path
) -> None:
    """A copy of the same model goes on."""
    first, second = (Path(shutil.copytree(looper, tmp_path / name / "final")) for name in ("a", "b"))
    out, line = tmp_path / "out", {"prompt": PROMPT, "max_tokens": 1}
    assert generate(first, "-f", prompts(line), "--out", out).code == 0
    before = out.read_text()
    if part == "weights":
        shard = sorted(second.glob("*.safetensors"))[1]
        flip(shard, shard.stat().st_size - 5)
    elif part is not None:
        with (second / part).open("a") as edited:
            edited.write(" ")
    outcome = generate(second, "-f", prompts(line, {**line, "max_tokens": 2}), "--out", out)
    if part is None:
        assert outcome.code == 0 and len(objects(out.read_text())) == 2
        return
    assert outcome.code == 2 and f"{out}, line 1 is not of this model ({words}): name another file" in outcome.err
    assert out.read_text() == before
    assert generate(first, "-f", prompts(line, {**line, "max_tokens": 2}), "--out", out).code == 0


def test_one_process_writes_to_a_file(ender: Path, prompts: Write, tmp_path: Path, _no_weights: None) -> None:
    file, out = prompts({"prompt": PROMPT}), tmp_path / "out"
    with out.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_SH)  # it wants the file for itself
        outcome = generate(ender, "-f", file, "--out", out)
    assert outcome.code == 2 and "another process writes to" in outcome.err
    assert "another file than that of the prompts" in generate(ender, "-f", file, "--out", file).err
    assert "cannot write results to" in generate(ender, "-f", file, "--out", tmp_path).err


def test_half_a_line_that_a_kill_has_left_is_cut_off(prompts: Write, tmp_path: Path) -> None:
    file, out, lines = prompts({"prompt": PROMPT}), tmp_path / "out", list[str]()
    tasks = read_tasks(file, Request(sampling=Sampling(temperature=1.0)), 2, "match")
    model = ModelIdentity(dict.fromkeys(PARTS, ""), {})
    results = ResultsFile("", lines.append)
    results.model = model.as_dict()
    for task in tasks:
        results.add(task, {"text": ""})
    out.write_text(lines[0] + lines[1][:30])
    with open_results(out, tasks, file, lines.append) as opened:
        assert opened.done == {(0, 0)} and opened.models == {1: model}
    assert out.read_text() == lines[0]


def test_digests_follow_what_a_text_depends_on(prompts: Write) -> None:
    def digest(line: dict[str, object], common: Request, by: str = "model") -> str:
        return read_tasks(prompts(line), common, 1, by)[0].digest

    usual, common = {"prompt": PROMPT}, Request(sampling=Sampling(temperature=1.0))
    others = [
        digest({"prompt": PROMPT + " "}, common), digest({**usual, "max_tokens": 5}, common), digest(usual, Request()),
        digest({**usual, "temperature": 0.5}, common), digest({**usual, "seed": 1}, common),
        digest({**usual, "stop": ["a"]}, common), digest({**usual, "regex": "a+"}, common),
        digest({**usual, "json_schema": {}}, common), digest(usual, common, "other"), digest(usual, Request(raw=True)),
    ]  # fmt: skip
    assert len({digest(usual, common), *others}) == len(others) + 1
    assert digest({**usual, "regex": "a+"}, common) == digest(usual, replace(common, grammar=Grammar("regex", "a+")))
    assert digest({**usual, "id": "x", "temperature": 1}, common) == digest(usual, common)


# What is refused


@pytest.mark.parametrize(
    ("content", "flags", "words"),
    [
        ('{"id": 3}', (), "FILE, line 1: a line must have one of prompt and messages"),
        ('{"messages": []}', (), "FILE, line 1: messages must be a list of objects"),
        ('{"messages": ["Hello"]}', (), "FILE, line 1: messages must be a list of objects"),
        ("[1]", (), "FILE, line 1: a line must be a JSON object"),
        ("{", (), "FILE, line 1: a line must be JSON"),
        ("[" * 100_000, (), "FILE, line 1: a line must be JSON"),
        ("", (), "must hold prompts"),
        ("\udcff", (), "must be UTF-8"),
        ('{"prompt": "x"}', ("--samples", 2), "line 2: --samples of greedy text"),
        ('{"prompt": "x"}', ("--session", "kept"), "--session keeps one text"),
        (None, (), "cannot read prompts"),
        (None, ("-p", "x", "--samples", 2, "--session", "kept"), "--session keeps one text"),
    ],
)
def test_what_is_no_file_of_prompts_is_refused(
    content: str | None, flags: tuple[object, ...], words: str, ender: Path, tmp_path: Path, _no_weights: None
) -> None:
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_text(f"\n{content}\n", errors="surrogateescape")
    outcome = generate(ender, *(() if "-p" in flags else ("-f", file)), *flags)
    assert outcome.code == 2 and outcome.out == ""
    assert words.replace("FILE, line 1", f"{file}, line 2") in outcome.err


# Samples of one prompt


def test_samples_are_texts_of_the_seeds_that_follow(ender: Path) -> None:
    wishes = ("-p", PROMPT, "--samples", 3, "--temp", 5, "--seed", 4, "-n", 6)
    listed = json.loads(generate(ender, *wishes, "--json").out)
    assert [(result["sample"], result["seed"]) for result in listed] == [(0, 4), (1, 5), (2, 6)]
    with open_decoder(ender) as decoder:
        alone = [decoder.generate(PROMPT, temperature=5, seed=seed, max_new_tokens=6) for seed in (4, 5, 6)]
    assert [result["token_ids"] for result in listed] == [result.token_ids for result in alone]
    assert len({generation.text for generation in alone}) > 1, "or nothing would tell them apart"
    printed = generate(ender, *wishes).out
    for index, generation in enumerate(alone):
        assert f"--- sample {index}, seed {4 + index}\n{generation.text}\n" in printed


# The line meanwhile


@contextmanager
def counted_runs() -> Iterator[list[Request]]:
    """The requests that a decoder has begun."""
    begun, start = list[Request](), Decoder.start

    def counted(decoder: Decoder, request: Request, **options: Any) -> Any:
        begun.append(request)
        return start(decoder, request, **options)

    with patch.object(Decoder, "start", counted):
        yield begun
