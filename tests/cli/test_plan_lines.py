"""What `offload plan` prints: an answer to read at 80 columns, of mixtures too, and all terms where asked for."""

import json
from pathlib import Path

import pytest
from mixture_headers import CONFIG
from shell import process, shell
from test_device_planner import CONFIGS, PAIRS
from tiny import FAMILIES, save_pair

import offload
from offload.calibration.rates import known_flops_per_s
from offload.cli.flags import as_flags
from offload.units import format_bytes

LAPTOP = ("--ram", "32GiB", "--disk-speed", "3GB", "--context", "512")
GPU = ("--hardware", "rtx4090", "--ram", "64GiB", "--context", "512")


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Flags that name two configs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in PAIRS[0]:
        (tmp_path / f"{name}.json").write_text(json.dumps(CONFIGS[name]))
    target, draft = (str(tmp_path / f"{name}.json") for name in PAIRS[0])
    return "-m", target, "-d", draft


def printed(*flags: object) -> str:
    outcome = shell("plan", *flags)
    assert outcome.code == 0 and outcome.err == "" and max(map(len, outcome.out.splitlines())) < 80
    return outcome.out


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (LAPTOP, ("It runs: at least ", "32 GiB of memory, a disk of 3 GB/s", "computing is not counted")),
        (
            GPU,
            ("It runs: ", "rtx4090: 24 GiB on the GPU, 64 GiB of memory, 25 GB/s to the GPU", "the disk is the limit"),
        ),
        (("--ram", "32GiB"), ("It runs. How fast is not known yet.", "--disk-speed, such as 3GB")),
        (("--gpu-mem", "24GiB"), ("It runs. How fast is not known yet.", "name the machine by --hardware")),
        (("--ram", "1TiB"), ("It runs, and all of it stays in memory", "all 80 stay in memory")),
    ],
)
def test_the_answer_comes_first(machine: tuple[str, ...], words: tuple[str, ...], pair: tuple[str, ...]) -> None:
    out = printed(*pair, *machine)
    text = " ".join(out.split())
    assert out.startswith(words[0]) and all(" ".join(phrase.split()) in text for phrase in words)
    assert "Llama-2-70B: 69 billion parameters, 138 GB" in text and "Llama-2-7B: 6.74 billion" in text
    assert "█" not in out and ("GPU" in out) == ("--ram" not in machine or machine == GPU)


def test_what_counts_of_computing_is_said(pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.calibration.rates.known_flops_per_s", lambda *_: 1e12)
    out = printed(*pair, *LAPTOP[:2], "--disk-speed", "100GB", "--context", "1024", "--tree", "64x8")
    text = " ".join(out.split())
    assert out.startswith("It runs: at least 1.1 seconds per token without a draft (1.1 to 1.5 with it).")
    assert "computing is the limit; of computing only the products of weights count, as timed on this processor" in text
    assert "with computing, as timed on this processor" in text


IMPORTS_NOTHING_HEAVY = """
import sys
from offload.cli.main import main
try: main()
finally: print(*{"torch", "transformers", "accelerate", "numba"} & sys.modules.keys(), file=sys.stderr)
"""


def test_a_plan_of_a_known_model_imports_no_torch(pair: tuple[str, ...], tmp_path: Path) -> None:
    """Rows of its prompts go by the rate of products, which is kept; what is damaged is measured again."""
    flags = ("plan", *pair, "--ram", "32GiB", "--disk-speed", "100GB", "--device", "cpu", "--json")
    first = json.loads(process(*flags).out)  # here the rate is made up, see `same_rate`
    again = process(*flags, python=("-c", IMPORTS_NOTHING_HEAVY), is_cold=True)
    assert (again.code, again.err) == (0, "\n") and json.loads(again.out) == first
    (kept,) = (tmp_path / "cache" / "offload" / "rates").glob("*.json")
    right = json.loads(kept.read_text())
    assert right["source"] == "measured"
    for damaged in ("{", "[]", json.dumps(right | {"conditions": ["other"]}), json.dumps(right | {"flops_per_s": 0})):
        kept.write_text(damaged)
        assert known_flops_per_s("bfloat16", int(right["conditions"][2].split()[0])) > 0
        assert json.loads(kept.read_text())["conditions"] == right["conditions"]


def test_a_copy_is_not_predicted_by_the_link_alone(pair: tuple[str, ...]) -> None:
    """Its passes are as wide as the target's, and nothing is known of them."""
    flags = (*pair[:2], "-d", "self:int4", "--ram", "64GiB", "--disk-speed", "3GB", "--context", "512")
    out = printed(*flags)
    assert out.startswith("It runs. How fast is not known yet.") and "seconds per token" not in out
    assert "offload tune measures it, or name a machine by --hardware" in " ".join(out.split())
    assert json.loads(shell("plan", *flags, "--json").out)["predictions"] == []


def test_a_tree_that_does_not_pay_is_no_headline(pair: tuple[str, ...]) -> None:
    first = printed(*pair, *GPU, "--tree", "chain:40", "--tokens-per-sweep", 1).splitlines()[0]
    best, other = first.removeprefix("It runs: ").split(" seconds per token without a draft (")
    assert float(best) < float(other.removesuffix(" with it).").split(" to ")[-1])
    assert "without a draft)" in printed(*pair, *GPU).splitlines()[0]


def test_the_headline_is_seconds_per_token(pair: tuple[str, ...]) -> None:
    first = printed(*pair, *LAPTOP).splitlines()[0].split()
    plan = json.loads(shell("plan", *pair, *LAPTOP, "--json").out)
    low, high = plan["s_per_token_range"]
    assert first[:4] == ["It", "runs:", "at", "least"] and first[7:10] == ["seconds", "per", "token"]
    assert [float(first[4]), float(first[6])] == pytest.approx([low, high], rel=0.05)
    assert float(first[10].strip("(")) == pytest.approx(plan["predictions"][0]["s_per_token"], rel=0.05)
    assert plan["is_link_alone"] and plan["models"]["draft"]["num_parameters"] == 6_738_415_616


def test_more_memory_than_there_is_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = save_pair(FAMILIES["llama"](), tmp_path)
    monkeypatch.setattr("offload.planning.budget.available_ram_bytes", lambda: 3 << 30)
    warning = "--ram 4 GiB is more than the 3 GiB free here: it may not hold"
    assert f"note      {warning}" in printed("-m", target, "--ram", "4GiB")
    for other_machine in (("--ram", "3GiB"), ("--ram", "4GiB", "--disk-speed", "1GB")):
        assert "--ram" not in printed("-m", target, *other_machine)

    with offload.load(target, ram="4GiB", threads=1) as decoder:
        assert list(map(as_flags, decoder.notes)) == [warning]
    assert format_bytes(3 << 30) == "3 GiB"


@pytest.fixture(autouse=True)
def same_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine computes decides how many rows a prompt's pass has, and those take memory from experts."""
    monkeypatch.setattr("offload.calibration.rates.known_flops_per_s", lambda *_: 1e11)


@pytest.mark.parametrize("experts", ["demand", "layers"])
def test_families_that_multiply_all_experts_stream_layers(experts: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "granitemoe", "num_local_experts": 32}))
    outcome = shell("plan", "-m", tmp_path / "config.json", "--ram", "6GB", "--experts", experts, "--json")
    if experts == "demand":
        assert outcome.code == 2 and "got model type granitemoe: try --experts layers" in outcome.err
    else:
        assert outcome.code == 0 and "experts" not in json.loads(outcome.out)
