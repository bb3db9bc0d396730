"""The packaged pairs: exact in float32 on real text, inflated and streamed by the commands that newcomers run first."""

import json
import re
import urllib.request
from pathlib import Path

import pytest
from refusals import assert_refused
from served import serving
from shell import Outcome, shell
from test_tiny import reference

import offload
from offload.checkpoint.files import locked_anew
from offload.checkpoint.packaged import PAIR, PROMPT, inflated_target
from offload.cli import packaged
from offload.cli.console import Console
from offload.cli.loading import making_target
from offload.cli.main import main
from offload.cli.packaged import demo_options
from offload.engine.load import open_decoder
from offload.engine.tokenizer import load_tokenizer
from offload.errors import UserError
from offload.options import CHAT_PAIR, OutputOptions
from offload.planning.load_options import LoadOptions
from offload.reports.proof import draw_gaps, rounding
from offload.sampling_options import Sampling

TREES = ("none", "8x3", "64x16", "chain:8", "sequences:4x4", "grown:64x16")
# Every tree on one prompt; on the others those that take few sweeps.
PROMPTS = {
    PROMPT: TREES,
    "import os\n\n\ndef walk(top):\n": ("64x16", "sequences:4x4"),
    "class Stack(list):\n    def push(self, item):\n": ("64x16", "grown:64x16"),
}
NUM_NEW = 64


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("prompt", PROMPTS, ids=["settings", "walk", "stack"])
def test_greedy_float32_equals_transformers(prompt: str) -> None:
    with offload.load(PAIR / "target", PAIR / "draft", dtype="float32", tree="64x16", threads=1) as decoder:
        wanted = reference(PAIR / "target", decoder.encode(prompt), NUM_NEW)
        results = {tree: decoder.generate(prompt, max_new_tokens=NUM_NEW, tree=tree) for tree in PROMPTS[prompt]}
    assert {tree: result.token_ids for tree, result in results.items()} == dict.fromkeys(results, wanted)
    yields = {tree: result.stats.tokens_per_sweep for tree, result in results.items()}
    assert yields.get("none", 1) == 1 and yields["64x16"] > 2.5, "the packaged draft no longer agrees with its target"


def is_drawn(token_ids: list[int]) -> bool:
    """Whether each is the draw of the float32 reference, up to bf16 rounding."""
    prompt_ids = load_tokenizer(PAIR / "target")(PROMPT)["input_ids"]
    return max(draw_gaps(PAIR / "target", prompt_ids, token_ids, Sampling())) <= rounding(Sampling())


def test_demo_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--size", "100MB", "--ram", "230MB", "-n", "24", "--tree", "16x8", "--temp", "0", "--json"]
    monkeypatch.setattr("sys.argv", ["offload", "demo", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    captured = capsys.readouterr()
    assert exit_.value.code == 0, captured.err
    result = json.loads(captured.out)
    assert result["tree"]["plan"]["tiers"]["disk"]["num_layers"] > 0, "nothing was streamed"
    plain_ids, tree_ids = (result[run]["token_ids"] for run in ("none", "tree"))
    assert is_drawn(plain_ids) and is_drawn(tree_ids), "in bf16 they may part at a near tie, and only there"
    assert not is_drawn([*plain_ids[:3], (plain_ids[3] + 1) % 4096]), "a wrong token would show"
    assert result["none"]["stats"]["tokens_per_sweep"] == 1
    tree_s, plain_s = (result[run]["stats"]["tpot_s"] for run in ("tree", "none"))
    assert result["speedup"] == pytest.approx(plain_s / tree_s)


def run_demo(*arguments: object) -> Outcome:
    return shell("demo", "--tree", "16x8", *arguments)


@pytest.mark.full
def test_demo_of_a_small_size_finds_its_own_budget() -> None:
    """A quarter of it would not hold two layers; and what comes with the prompt's sweep has no speed."""
    outcome = run_demo("--size", "40MB", "-n", "3", "--json")
    result = json.loads(outcome.out)
    assert outcome.code == 0 and result["tree"]["plan"]["tiers"]["disk"]["num_layers"] > 0
    assert result["tree"]["stats"]["tpot_s"] == 0 and result["speedup"] is None
    said = run_demo("--size", "40MB", "-n", "3").err.splitlines()
    assert "too few tokens to tell how fast: raise -n" in said
    (proof,) = (line for line in said if line.startswith("proof: the model alone"))
    assert proof.endswith(": all 6 tokens compared") and said[-2].lstrip().startswith("offload plan -m MODEL")
    pair = said[-1].split(" -m ")[1].split(" -d ")
    assert all((Path(folder) / "config.json").is_file() for folder in pair), "which other commands take"
    headings = [line for line in said if line.startswith("---")]
    assert [line.split(",")[0] for line in headings] == ["--- the prompt", "--- without guesses", "--- with guesses"]


def test_demo_is_refused_before_a_target_is_made(tmp_path: Path) -> None:
    refused = run_demo("--size", "300MB", "--ram", "50MB")
    assert_refused(refused, "for two layer slots", "budget is 50 MB", "raise --ram to")
    assert_refused(run_demo("--size", "300GB"), "--size must be at most 200GB, got 300000000000: try 2GB")
    wordy = run_demo("--size", "300MB", "-p", "x " * 2000)
    assert_refused(wordy, "exceed the context of 512: shorten the prompt or lower -n")
    for outcome in (refused, wordy):
        assert "--context" not in outcome.err, "which it does not have"
    least_mb = re.search(r"raise --ram to (\d+)MB", refused.err)
    assert least_mb is not None and not list(tmp_path.rglob("*.safetensors"))
    least = demo_options(LoadOptions(tree="16x8"), 300_000_000).ram
    assert least == pytest.approx(int(least_mb[1]) * 10**6, abs=10**6)


@pytest.mark.full
def test_demo_refuses_to_print_a_speed_for_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.cli import demo_run

    with offload.load(PAIR / "target", PAIR / "draft", tree="8x3", threads=1) as decoder:
        right = decoder.run(PROMPT, Sampling(), max_new_tokens=4, raw=True)
        list(right)
        monkeypatch.setattr(demo_run, "draw_gaps", lambda *_: [0.0, 2.5])
        with pytest.raises(offload.UserError, match=r"misses the original model's draw by 2\.5"):
            demo_run.compare(decoder, PROMPT, Sampling(), num_tree=2, show=lambda _, pieces: [*pieces] and None)


QUESTION = "Hello"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target is made larger, but not by much."""
    monkeypatch.setattr(packaged, "_CHAT_BYTES", 40_000_000)


@pytest.mark.usefixtures("small")
def test_a_chat_opens_without_a_model() -> None:
    outcome = shell("chat", "--demo", "--greedy", stdin=f"{QUESTION}\n".encode())
    assert outcome.code == 0, outcome.err
    assert "I am a very small model" in outcome.out
    assert "from disk" in outcome.err, "it streams as a large model does"


@pytest.mark.usefixtures("small")
def test_a_server_opens_without_a_model() -> None:
    options = packaged.packaged_chat(LoadOptions(draft=CHAT_PAIR / "draft", parallel=2, threads=1), lambda *_: None)
    decoder = open_decoder(options)
    with serving(decoder) as server:
        body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "offload": {"passes": True}}
        request = urllib.request.Request(
            f"{server.address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            said = json.load(response)
    (choice,) = said["choices"]
    assert "I am a very small model" in choice["message"]["content"] and choice["finish_reason"] == "stop"
    assert decoder.plan.is_streamed


def test_what_is_made_is_told_with_its_place_and_made_by_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gigabyte stays on a newcomer's disk: once, and not in silence."""
    (tmp_path / "offload").mkdir()
    making = pytest.raises(UserError, match="making the packaged model just now: try again")
    with locked_anew(tmp_path / "offload" / ".demo-40MB.inflating"), making:
        inflated_target(40_000_000, lambda *_: None)
    said = []
    for _ in range(2):
        with Console(OutputOptions()) as console, making_target(console) as landed:
            inflated_target(40_000_000, landed)
        said.append(capsys.readouterr().err)
    assert f"which stay in {tmp_path}/offload" in said[0] and said[1] == ""
    for command in ("chat", "serve"):
        assert_refused(shell(command, "--demo", "-m", "big"), "--demo brings its own models", "leave out --model")
        assert_refused(shell(command), "--model says what is to run", "or --demo for the packaged one")
