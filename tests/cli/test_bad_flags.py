"""Flags, prompts and budgets that cannot be: refused in one line, before the first weight is read."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import BOTH, ENOUGH, GENERATE, PLAN, assert_refused, drop, generate
from shell import shell

from offload.commands import every_command

HAS_CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.usefixtures("_instant_link")


def flags(name: str, arguments: str, *words: str, commands: tuple[tuple[str, ...], ...] = (GENERATE,)) -> Any:
    return pytest.param(arguments.split(), words, commands, id=name)


SIZE = "must be a size such as 8GiB"
TREE = "must be auto, none, NxD, dynamic:NxD, chain:L, chain:auto or sequences:KxL"
FLAGS = [
    flags("negative temperature", "--temp -1", "--temp must be 0 or more, got -1.0", "0 is greedy"),
    flags("temperature no number", "--temp nan", "--temp must be 0 or more, got nan", "0 is greedy"),
    flags("endless temperature", "--temp inf", "--temp must be 0 or more, got inf", "0 is greedy"),
    flags("temperature in words", "--temp hot", "--temp", "valid number", "--help)"),
    flags("top-p of nothing", "--top-p 0", "--top-p must lie in (0, 1], got 0.0", "1 keeps every token"),
    flags("top-p beyond all", "--top-p 1.5", "--top-p must lie in (0, 1], got 1.5", "1 keeps every token"),
    flags("negative top-k", "--top-k -1", "--top-k must be 0 or more, got -1", "0 keeps every token"),
    flags("negative seed", "--seed -1", "--seed must lie in [0, 2^63), got -1", "0 is as good as any"),
    flags("negative number of tokens", "-n -2", "-n", "at least -1, got '-2'", "--help)"),
    flags("no threads", "--threads 0", "--threads", "at least 1, got '0'", "--help)"),
    flags(
        "more threads than cores", "--threads 9999", "--threads must be at most 1, the cores", "got 9999: leave it out"
    ),
    flags("no context", "--context 0", "--context must be 1 or more, got 0", commands=BOTH),
    flags("context too long", "--context 65537", "--context must be at most 65536", "got 65537", commands=BOTH),
    flags("budget of nothing", "--ram 0", "--ram must be more than zero, got 0", "try 4GiB", commands=BOTH),
    flags("budget of less than a byte", "--ram 0.1", "--ram must be more than zero, got 0.1", commands=BOTH),
    flags("budget in words", "--ram lots", f"--ram {SIZE}", "'lots'", commands=BOTH),
    flags("negative budget", "--ram=-4GiB", f"--ram {SIZE}", "'-4GiB'", commands=BOTH),
    flags("budget without a number", "--ram GiB", f"--ram {SIZE}", "'GiB'", commands=BOTH),
    flags("budget in unknown units", "--ram 4XB", f"--ram {SIZE}", "'4XB'", commands=BOTH),
    flags("budget without end", f"--ram {'9' * 400}GiB", f"--ram {SIZE}", commands=BOTH),
    flags("unknown tree", "--tree oak", f"--tree {TREE}, got 'oak'", "try --tree 64x16", commands=BOTH),
    flags("tree without nodes", "--tree 0x4", "--tree must have numbers of 1 or more", "got '0x4'", commands=BOTH),
    flags("tree without depth", "--tree 8x", f"--tree {TREE}", "got '8x'", commands=BOTH),
    flags("tree of negative size", "--tree=-8x3", f"--tree {TREE}", "got '-8x3'", commands=BOTH),
    flags("tree too large", "--tree 99999x9", "at most 65536 nodes, got '99999x9'", commands=BOTH),
    flags("chain without length", "--tree chain:", f"--tree {TREE}", commands=BOTH),
    flags("sequences without length", "--tree sequences:4", f"--tree {TREE}", commands=BOTH),
    flags("tree without guesses", "--no-lookup --tree 8x3", "--tree needs a draft", "'8x3'", "give --draft"),
    flags("match of no length", "--lookup-length 0:4", "--lookup-length must be LEAST:MOST", "got '0:4'"),
    flags("no store there", "--datastore /nowhere", "/nowhere"),
    flags("unknown type", "--dtype int3", "--dtype must be one of auto, bfloat16", "got 'int3'", commands=BOTH),
    flags("unknown device", "--device tpu", "--device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
    flags("device without a number", "--device cuda:x", "--device must be", "got 'cuda:x'"),
    flags("device memory on a CPU", "--device cpu --gpu-mem 4GiB", "--gpu-mem limits a CUDA device", "--ram"),
    flags(
        "device memory too small in a plan",
        "--gpu-mem 1MiB",
        "of device memory",
        "raise --gpu-mem to",
        commands=(PLAN,),
    ),
    flags("hardware unknown", "--hardware l41", "--hardware must be one of l40", "'l41': describe", commands=(PLAN,)),
    flags("unknown rule", "--rule luck", "--rule must be one of match", "'luck': leave it out", commands=BOTH),
    flags("hardware file missing", "--hardware nowhere.json", "cannot read nowhere.json", commands=(PLAN,)),
    flags("tokens of an unnamed tree", "--tokens-per-sweep 4", "belongs to one tree", commands=(PLAN,)),
    flags("device memory malformed", "--device cpu --gpu-mem much", f"--gpu-mem {SIZE}", "'much'"),
    flags("prompt and file", "-f prompt.txt", "-p and -f exclude each other", "give one"),
    flags("unknown option", "--fast", "No such option", "--fast", "--help)", commands=BOTH),
    flags("argument too many", "another", "another", "--help)", commands=BOTH),
]


@pytest.mark.usefixtures("_no_weights")
@pytest.mark.parametrize(("arguments", "words", "commands"), FLAGS)
def test_flags_are_refused(
    arguments: list[str], words: tuple[str, ...], commands: tuple[tuple[str, ...], ...], sound: Path
) -> None:
    for command in commands:
        assert_refused(shell(*command, "-m", sound, *arguments), *words)


@pytest.mark.skipif(HAS_CUDA, reason="says what happens without CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
def test_cuda_without_cuda_is_refused(device: str, sound: Path) -> None:
    outcome = generate(sound, "-p", "Count:", "--device", device)
    assert_refused(outcome, f"--device {device} needs a CUDA device", "use --device cpu")


def test_a_command_without_a_model_is_refused() -> None:
    assert_refused(shell("generate", "-p", "Count:"), "--model", "(see offload generate --help)")
    assert_refused(shell("plan"), "--model", "(see offload plan --help)")
    assert_refused(shell("conjure"), "conjure", "(see offload --help)")
    assert_refused(shell("bench", "passes", "--fast"), "--fast", "(see offload bench passes --help)")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("--verion", ("No such option: --verion. Did you mean --version? (see offload --help)",)),
        ("--vers -m x", ("Did you mean --version?",)),
        ("generate --modl x", ("No such option: --modl. Did you mean --model? (see offload generate --help)",)),
        ("generat -m x", ("Did you mean 'generate'?",)),
        ("bench decod", ("No such command 'decod'. Did you mean decode? (see offload bench --help)",)),
        ("bench decode --quik", ("Did you mean --quick? (see offload bench decode --help)",)),
        ("generate -m x --stop", ("'--stop' requires an argument. (see offload generate --help)",)),
        ("bench decode --size", ("'--size' requires an argument. (see offload bench decode --help)",)),
        ("datastore build --out", ("(see offload datastore build --help)",)),
        ("datastore bild", ("Did you mean 'build'?", "(see offload datastore --help)")),
    ],
)
def test_what_is_mistyped_is_asked_after(command: str, words: tuple[str, ...]) -> None:
    assert_refused(shell(*command.split()), *words)


@pytest.mark.parametrize("option", ["--nonesuch", "-Z"])
def test_every_command_refuses_an_option_that_it_has_not(option: str) -> None:
    from offload.bench.suite import COMMANDS

    root = every_command()
    groups = {"datastore": root["datastore"].commands, "bench": COMMANDS if option == "--nonesuch" else {}}
    paths = [(), *((name,) for name in root), *((group, own) for group in groups for own in groups[group])]
    assert len(paths) > 15
    for path in paths:
        refused = shell(*path, option)
        assert_refused(refused, f"No such option: {option} (see {' '.join(('offload', *path))} --help)")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("no/such/folder", ("no model directory at no/such/folder", "hub id")),
        ("~nobody-of-this-name/model", ("no model directory", "hub id")),
        ("x" * 300, ("no model directory", "hub id")),
        ("somebody/some-model", ("somebody/some-model", "hub", "check the network")),
        ("somebody/a..b", ("somebody/a..b", "hub", "check the name")),
    ],
)
def test_model_that_is_nowhere_is_refused(model: str, words: tuple[str, ...]) -> None:
    for command in BOTH:
        assert_refused(shell(*command, "-m", model), *words)


def test_model_that_is_a_file_is_refused(sound: Path, tmp_path: Path) -> None:
    assert_refused(generate(sound / "config.json", "-p", "Count:"), "is a file", "give the folder")
    (tmp_path / "big.gguf").touch()
    assert_refused(generate(tmp_path / "big.gguf", "-p", "Count:"), "big.gguf: its header needs 4 bytes", "again")


@pytest.mark.usefixtures("_no_weights")
def test_prompts_are_refused(sound: Path, tmp_path: Path) -> None:
    latin, empty = tmp_path / "latin.txt", tmp_path / "empty.txt"
    latin.write_bytes("caf\u00e9".encode("latin-1"))
    empty.write_bytes(b"")
    assert_refused(generate(sound, "-f", latin), "must be UTF-8", "latin.txt", "byte 3", "convert it")
    assert_refused(generate(sound, "-f", tmp_path / "gone.txt"), "gone.txt", "No such file", "check the path")
    assert_refused(generate(sound, "-f", tmp_path), "cannot read the prompt", "Is a directory", "check the path")
    assert_refused(generate(sound, "-f", empty), "the prompt is empty", "empty.txt", "give some text")
    assert_refused(generate(sound), "the prompt is empty", "standard input", "give some text")
    assert_refused(generate(sound, "-p", "-", stdin=b"\xff"), "must be UTF-8", "standard input", "byte 0")
    assert_refused(generate(sound, "-p", ""), "the prompt is empty", "-p", "give some text")
    assert_refused(generate(sound, "-p", "caf\udce9"), "must be UTF-8", "-p", "byte 3")


def test_prompt_longer_than_the_context_is_refused(sound: Path, request: pytest.FixtureRequest) -> None:
    assert generate(sound, "-p", "x" * 62).code == 0
    request.getfixturevalue("_no_weights")
    outcome = generate(sound, "-p", "x" * 64)
    assert_refused(
        outcome, "a prompt of 64 tokens and a new one exceed the context of 64", "raise --context", "shorten"
    )


@pytest.mark.parametrize(("asked", "is_told"), [("100000", True), ("-1", False)])
def test_more_tokens_than_have_room_are_as_many_as_have(asked: str, is_told: bool, sound: Path) -> None:
    outcome = shell("generate", "-m", sound, *ENOUGH[:-2], "-p", "x" * 60, "-n", asked)
    assert outcome.code == 0 and outcome.out == " one two three:\n", outcome
    assert ("at most 4 new tokens and not 100000: the context of 64 has no more room" in outcome.err) == is_told
    assert "the text is cut off where the context of 64 ends: --context N makes it longer\n" in outcome.err


@pytest.mark.usefixtures("_no_weights")
def test_prompt_without_a_tokenizer_is_refused(broken: Path) -> None:
    drop("tokenizer*")(broken)
    assert_refused(generate(broken, "-p", "Count:"), "no tokenizer", "put its tokenizer.json beside it")


def test_chat_template_that_fails_is_refused(broken: Path) -> None:
    for template in ("{% for %}", "{{ raise_exception('only for system messages') }}"):
        (broken / "chat_template.jinja").write_text(template)
        assert_refused(generate(broken, "-p", "Count:"), "chat template", "--raw")
        assert generate(broken, "-p", "Count:", "--raw").code == 0


# Budgets


@pytest.mark.parametrize("options", ["--context 64", "--context 3000", "--context 512 --dtype bfloat16"])
def test_the_smallest_budget_that_is_named_works(options: str, sound: Path) -> None:
    command, settings = ("generate", "-m", sound, "-p", "Count:", "-n", "4", "--threads", "1"), options.split()
    in_mb = shell(*command, "--ram", "1MB", *settings)
    assert_refused(in_mb, "budget is 1 MB", "raise --ram to ")
    assert "MiB" not in in_mb.err, "sizes have the unit of the user"
    too_small = shell(*command, "--ram", "1MiB", *settings)
    assert_refused(too_small, "for two layer slots", "budget is 1 MiB")
    assert "--context" not in too_small.err, "no shorter one would do"
    named = re.search(r"raise --ram to (\d+)MiB", too_small.err)
    assert named is not None
    least_mib = int(named[1])
    refused = shell("plan", "-m", sound, "--ram", f"{least_mib - 1}MiB", *settings)
    assert_refused(refused, f"raise --ram to {least_mib}MiB")
    assert shell("plan", "-m", sound, "--ram", f"{least_mib}MiB", *settings).code == 0
    run = shell(*command, "--ram", f"{least_mib}MiB", *settings)
    assert run.code == 0 and run.out == " one two three:\n"
