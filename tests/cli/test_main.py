"""The commands as a person or a script uses them: what goes to stdout and to stderr, where prompts are, help."""

import json
import re
import shutil
from pathlib import Path

import pytest
from reciting import (
    NUM_SAID,
    PROMPT,
    SAID,
    TREES,
    generate,
    generate_json,
    only_object,
    open_decoder,
    recited,
    settings,
    streaming_ram,
)
from shell import Outcome, process, run_python, shell
from tiny import FAMILIES, save_pair

import offload
from offload.commands import every_command
from offload.declaration import GROUPS, options_of
from offload.machine import has_cuda_driver
from offload.options import RECORDS

# What a run prints


def test_text_goes_to_stdout_and_figures_to_stderr(ender: Path) -> None:
    outcome = generate(ender)
    with open_decoder(ender) as decoder:
        assert outcome.out == decoder.generate(PROMPT).text + "\n" == SAID + "\n"
    assert outcome.code == 0
    place, drafting, first, link, memory = outcome.err.splitlines()
    assert place.startswith(f"{ender.name}: 0 of 4 layers in RAM") and place.endswith("a pass from disk")
    assert drafting.startswith(f"draft {ender.name}, tree 8x3, ") and drafting.endswith(" tokens a pass expected")
    assert f"{NUM_SAID + 1} tokens, the first after" in first
    assert "tokens/s" in first and "tokens a pass" in first and "tree of 8 nodes, 3 deep" in first
    assert "GB/s" in link and memory.startswith("peak memory")


def test_what_is_not_there_is_not_told(ender: Path) -> None:
    assert generate(ender, "--quiet") == Outcome(0, SAID + "\n", "")
    outcome = generate(ender, "-n", "0")
    assert outcome.code == 0 and outcome.out == "\n" and "no tokens generated" in outcome.err
    roomy = ("--ram", "1GiB", "--context", 64, "-n", 20, "--threads", 1, "--no-lookup")
    outcome = shell("generate", "-m", ender, "-p", PROMPT, *roomy)
    assert outcome.out == SAID + "\n" and "all 4 layers fit into RAM" in outcome.err
    assert "no tree" in outcome.err and "link" not in outcome.err and "draft" not in outcome.err


def test_a_long_prompt_takes_as_many_sweeps_as_its_bar_expects(looper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with offload.load(looper, ram="1GiB", context=2048, threads=1) as decoder:
        stream, sweeps = decoder.target.stream, list[None]()
        begin = stream.begin_sweep
        monkeypatch.setattr(stream, "begin_sweep", lambda: sweeps.append(begin()))
        for num_tokens in (1, 512, 513, 514, 1025, 1026):
            sweeps.clear()
            decoder.generate([5] * num_tokens, max_new_tokens=1)
            assert len(sweeps) == decoder.plan.num_prompt_sweeps(num_tokens), num_tokens


TOP_FIELDS = {"text", "token_ids", "num_prompt_tokens", "num_new_tokens", "finish_reason", "seed", "plan", "stats"}
STATS_FIELDS = {
    *("num_sweeps", "tokens_per_sweep", "ttft_s", "tpot_s", "sweep_s", "draft_s", "verify_s", "stall_s"),
    *("bytes_streamed", "link_bytes_per_s", "peak_rss_bytes", "peak_device_bytes", "tree"),
}


@pytest.mark.parametrize("tree", TREES)
def test_json_fields_agree_with_each_other(tree: str, looper: Path) -> None:
    result = generate_json(looper, "-n", "60", "--seed", "5", tree=tree)
    plan, stats = result["plan"], result["stats"]
    assert set(result) >= TOP_FIELDS and set(stats) >= STATS_FIELDS
    assert len(result["token_ids"]) == result["num_new_tokens"] == 60
    assert result["num_prompt_tokens"] == len(PROMPT) and result["seed"] == 5 and result["finish_reason"] == "length"
    assert result["text"] == recited(len(result["text"]))
    num_later = sum(stats["accepted_per_sweep"])
    assert len(stats["accepted_per_sweep"]) == stats["num_sweeps"]
    assert stats["tokens_per_sweep"] == pytest.approx(num_later / stats["num_sweeps"])
    assert stats["ttft_s"] > 0 and stats["tpot_s"] > 0 and 0 <= stats["stall_s"] <= stats["sweep_s"]
    decode_s = stats["tpot_s"] * num_later
    assert stats["draft_s"] + stats["sweep_s"] + stats["verify_s"] <= decode_s
    assert stats["link_bytes_per_s"] == pytest.approx(stats["bytes_streamed"] / decode_s)
    assert stats["peak_rss_bytes"] > 0 and stats["peak_device_bytes"] == 0
    assert plan["budgets"]["planned_bytes"] <= plan["budgets"]["ram_bytes"] == streaming_ram(looper)


def test_bytes_streamed_are_those_of_the_plan(looper: Path) -> None:
    """Every sweep moves the layers that do not stay; the slots read ahead, and a block may be shared at either end."""
    result = generate_json(looper, "-n", "100", tree="none")
    plan, stats = result["plan"], result["stats"]
    tiers, slots = plan["tiers"], plan["slots"]
    assert tiers["resident"] == {"num_layers": 0, "num_bytes": 0} and tiers["disk"]["num_layers"] == 4
    assert stats["num_sweeps"] == 99
    planned_bytes = stats["num_sweeps"] * tiers["disk"]["num_bytes"]
    ahead_bytes, blocks_bytes = slots["num_slots"] * slots["slot_bytes"], stats["num_sweeps"] * 4 * 8192
    assert planned_bytes - ahead_bytes - blocks_bytes <= stats["bytes_streamed"] <= planned_bytes + ahead_bytes


# Where a prompt comes from


def test_prompt_from_flag_file_and_pipe_are_the_same(ender: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Grüß dich:", encoding="utf-8")
    wanted = generate_json(ender, prompt="Grüß dich:")
    assert wanted["num_prompt_tokens"] == len("Grüß dich:".encode()) and wanted["text"] == SAID
    piped = file.read_bytes()
    others = (
        generate_json(ender, "-f", file, prompt=None),
        generate_json(ender, prompt=None, stdin=piped),
        generate_json(ender, prompt="-", stdin=piped),
        generate_json(ender, prompt=None, stdin=piped + b"\n"),  # as `echo` writes it
    )
    for other in others:
        for field in ("text", "token_ids", "num_prompt_tokens"):
            assert other[field] == wanted[field]


# The other commands


def test_plan_is_the_plan_that_a_run_follows(looper: Path) -> None:
    planned = only_object(shell("plan", *settings(looper)[:-2], "--json").out)
    followed = generate_json(looper, "-n", "1")["plan"]
    assert {key: planned[key] for key in followed} == followed
    assert planned["fits"] is True and planned["bytes_per_sweep"] == followed["tiers"]["disk"]["num_bytes"]
    assert planned["sweep_s"] == pytest.approx(planned["bytes_per_sweep"] / planned["link_bytes_per_s"])


LISTS_IMPORTS = """
import sys
from offload.cli.main import main
heavy = {"torch", "transformers", "accelerate", "fastapi", "starlette", "uvicorn", "llguidance"}
try:
    main()
finally:
    print(*{name.partition(".")[0] for name in sys.modules} & heavy, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "command", ["--help", "generate --help", "serve --help", "plan --device cpu --json -m", "plan --json -m"]
)
def test_commands_that_compute_nothing_import_nothing_heavy(command: str, looper: Path) -> None:
    """Which is what makes them quick, on a busy machine too."""
    if command == "plan --json -m" and has_cuda_driver():
        pytest.skip("a card has to be asked, which torch does")
    model = [looper] if command.endswith("-m") else []
    if model:
        shell(*command.split(), *model)  # what its layers are is asked of torch once, and kept
    outcome = process(*command.split(), *model, python=("-c", LISTS_IMPORTS), is_cold=True)
    assert outcome.code == 0 and outcome.err == "\n" and outcome.out


@pytest.mark.parametrize(("word", "words"), [("run", "offload chat"), ("pull", "-m ORG/NAME"), ("help", "--help")])
def test_a_newcomer_gets_help_and_words_of_other_programs_lead_on(word: str, words: str) -> None:
    outcome = shell()
    assert outcome == shell("--help") == shell("-h") and outcome.code == 0 and shell("plan", "-h").code == 0
    assert "generate" in outcome.out and "Start here: offload demo" in outcome.out
    assert shell("--version").out == f"offload {offload.__version__}\n"
    refused = shell(word, "llama")
    assert refused.code == 2 and refused.err.startswith(f"offload: No such command '{word}': ") and words in refused.err


def test_models_are_listed_and_what_does_not_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("offload.checkpoint.download.in_cache", lambda name: cached(tmp_path, name))
    assert shell("list").out.startswith("no model was downloaded yet")
    target, _ = save_pair(FAMILIES["llama"](), tmp_path)
    shutil.copytree(target, cached(tmp_path, "org/whole"))
    cached(tmp_path, "org/half").mkdir(parents=True)
    (tmp_path / "hub" / "datasets--org--text" / "snapshots").mkdir(parents=True)
    half, whole = shell("list").out.splitlines()
    assert half.startswith("org/half   does not run: ") and whole.startswith("org/whole") and "billion param" in whole
    listed = {load["name"]: load for load in json.loads(shell("list", "--json").out)}
    assert listed["org/half"]["num_bytes"] is None and listed["org/half"]["refusal"]
    assert listed["org/whole"]["num_bytes"] > 1000 and listed["org/whole"]["refusal"] is None


def cached(folder: Path, name: str) -> Path:
    return folder / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / "0123456789"


LONG = ("generate", "chat", "serve", "plan", "tune")
SHORT = ("demo", "verify", "pack", "datastore build")


def options(name: str) -> list[str]:
    """The names that a command's options are looked for by; without those for help, and hidden ones."""
    first, *words = name.split()
    command = every_command()[first]
    for word in words:
        command = command.commands[word]
    shown = [param for param in command.params if param.param_type_name == "option" and not param.hidden]
    names = [next((flag for flag in parameter.opts if flag.startswith("--")), parameter.opts[0]) for parameter in shown]
    return [flag for flag in names if flag != "--help-all"]


def explained(text: str) -> set[str]:
    """Options that begin a line: what is in the middle of one is only named."""
    return {flag for line in re.findall(r"^  (?=-)(.*)", text, re.MULTILINE) for flag in re.findall(r"--[\w-]+", line)}


@pytest.mark.parametrize("name", LONG)
def test_help_explains_what_matters_first_and_names_the_others(name: str) -> None:
    short, whole = shell(*name.split(), "--help").out, shell(*name.split(), "--help-all").out
    first, _, rest = short.partition(f"More, which offload {name} --help-all explains:")
    main = explained(first) & {*options(name)}
    assert 5 <= len(main) <= 8 and "--model" in main, main
    named = set(re.findall(r"--[\w-]+", rest.partition("Examples:")[0]))
    assert named == {*options(name)} - main, "each is somewhere"
    assert explained(whole) >= {*options(name)} and len(first.splitlines()) < 40
    assert not re.search(r"-$", rest.partition("Examples:")[0], re.MULTILINE), "no name is broken"


def test_all_options_stand_in_their_groups() -> None:
    for record in RECORDS:
        for option in options_of(record).values():
            assert option.group in GROUPS and record.GROUP in GROUPS, option.name  # type: ignore[attr-defined]
    for name in LONG:
        whole = shell(name, "--help-all").out
        titles = re.findall(r"^(\w+):$", whole, re.MULTILINE)
        assert titles[0] == "Options" and titles[1:] == [group for group in GROUPS if group in titles]
        assert {"Model", "Memory", "Guessing", "Output"} <= {*titles}
        guessing = whole.partition("Guessing:")[2].partition("\n\n")[0]
        assert "--tree" in guessing and "--ram" not in guessing


@pytest.mark.parametrize("name", SHORT)
def test_a_command_with_few_options_shows_them_all(name: str) -> None:
    text = shell(*name.split(), "--help").out
    assert explained(text) >= {*options(name)} and "--help-all" not in text
    assert shell(*name.split(), "--help-all").code == 2


def test_help_of_the_program_imports_no_command() -> None:
    code = "import sys; sys.argv = ['offload', '--help']; from offload.cli.main import main\n"
    code += "try: main()\nexcept SystemExit: print(*(name for name in sys.modules if name.endswith('_commands')))"
    text = run_python("-c", code)
    assert text.splitlines()[-1] == "" and [*every_command()] == re.findall(r"^  (\w+)  +[A-Z]", text, re.MULTILINE)
