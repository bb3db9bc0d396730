"""What `offload plan` prints: an answer to read at 80 columns, and all the terms where they are asked for."""

import json
from pathlib import Path

import pytest
from shell import process, shell
from test_device_planner import CONFIGS, PAIRS
from tiny import FAMILIES, save_pair

import offload
from offload.cli.flags import as_flags
from offload.cli.plan_lines import _count
from offload.memory import planner as plan
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
    told = " ".join(out.split())
    assert out.startswith(words[0]) and all(" ".join(one.split()) in told for one in words)
    assert "Llama-2-70B: 69 billion parameters, 138 GB" in told and "Llama-2-7B: 6.74 billion" in told
    assert "█" not in out and ("GPU" in out) == ("--ram" not in machine or machine == GPU)


def test_what_counts_of_computing_is_said(pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.calibration.link.product_flops_per_s", lambda *_: 1e12)
    out = printed(*pair, *LAPTOP[:2], "--disk-speed", "100GB", "--context", "1024", "--tree", "64x8")
    told = " ".join(out.split())
    assert out.startswith("It runs: at least 1.1 seconds per token without a draft (1.1 to 1.5 with it).")
    assert "computing is the limit; of computing only the products of weights count, as timed here just now" in told
    assert "with computing, as this processor did it just now" in told


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


def test_ways_to_draft_stand_one_below_another(pair: tuple[str, ...]) -> None:
    flags = (*pair, *GPU, "--context", "512")
    lines = printed(*flags).splitlines()

    rows = [line for line in lines if "s per token with" in line or "no draft: " in line]
    assert len(rows) >= 3 and str(Path(pair[1]).parent) not in "".join(lines)
    figures = json.loads(shell("plan", *flags, "--disk-speed", "1GB", "--json").out)
    slower = [one["prediction"]["s_per_token"] for one in figures["drafts"] if one["prediction"]]
    usual = [one["prediction"]["s_per_token"] for one in json.loads(shell("plan", *flags, "--json").out)["drafts"]
             if one["prediction"]]  # fmt: skip
    assert min(slower) > 2 * min(usual), "the disk that was named is a fifth as fast"


def test_one_way_to_draft_is_no_list(pair: tuple[str, ...]) -> None:
    target = pair[:2]
    assert "drafts" not in printed(*target, "--hardware", "rtx3090", "--gpu-mem", "6300MiB")


def test_what_is_assumed_of_a_machine_is_marked(pair: tuple[str, ...]) -> None:
    told = " ".join(printed(*pair, "--hardware", "l40").split())
    assert "256 GiB of memory" in told and "(assumed: --ram and --disk-speed say otherwise)" in told
    named = " ".join(printed(*pair, "--hardware", "l40", "--disk-speed", "3GB").split())
    assert "a disk of 3 GB/s" in named


@pytest.mark.parametrize(
    ("number", "words"), [(15_700_000, "15.7 million"), (70_553_706_496, "70.6 billion"), (120_000, "0.12 million")]
)
def test_parameters_are_counted_in_words_of_their_size(number: int, words: str) -> None:
    assert _count(number) == words


def test_the_headline_is_seconds_per_token(pair: tuple[str, ...]) -> None:
    first = printed(*pair, *LAPTOP).splitlines()[0].split()
    found = json.loads(shell("plan", *pair, *LAPTOP, "--json").out)
    low, high = found["s_per_token_range"]
    assert first[:4] == ["It", "runs:", "at", "least"] and first[7:10] == ["seconds", "per", "token"]
    assert [float(first[4]), float(first[6])] == pytest.approx([low, high], rel=0.05)
    assert float(first[10].strip("(")) == pytest.approx(found["predictions"][0]["s_per_token"], rel=0.05)
    assert found["is_link_alone"] and found["models"]["draft"]["num_parameters"] == 6_738_415_616


def test_all_terms_are_shown_where_they_are_asked_for(pair: tuple[str, ...]) -> None:
    out = printed(*pair, *GPU, "--tree", "768x22", "--tokens-per-sweep", "12.18", "-v")
    assert "layers in pinned memory" in out and "12.2 a pass with the tree 768x22: tokens per pass as given" in out
    assert "counted as the static one" in printed(*pair, *GPU, "-v").replace("\n            ", " ")
    assert out.splitlines()[-1].split()[:2] == ["768x22", "12.18"] and out.splitlines()[-1].endswith("disk")


def test_sizes_have_the_unit_of_the_flag(pair: tuple[str, ...]) -> None:
    out = printed(*pair, "--ram", "34GB", "--disk-speed", "3GB", "--context", "512", "-v")
    assert "34 GB of memory" in out and "GiB" not in out


def test_a_model_is_built_without_the_compiler(tmp_path: Path) -> None:
    target, _ = save_pair(FAMILIES["gemma2"](), tmp_path)
    code = "import sys; from offload.cli import main\ntry: main.main()\n"
    code += "finally: print('torch._dynamo.eval_frame' in sys.modules, file=sys.stderr)"
    outcome = process("plan", "-m", target / "config.json", "--ram", "8GiB", python=("-c", code), is_cold=True)
    assert outcome.code == 0 and outcome.err.endswith("\nFalse\n") and outcome.out.startswith("It runs"), outcome


def test_more_memory_than_there_is_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = save_pair(FAMILIES["llama"](), tmp_path)
    monkeypatch.setattr(plan, "available_ram_bytes", lambda: 3 << 30)
    warning = "--ram 4 GiB is more than the 3 GiB free here: it may not hold"
    assert f"note      {warning}" in printed("-m", target, "--ram", "4GiB")
    for other_machine in (("--ram", "3GiB"), ("--ram", "4GiB", "--disk-speed", "1GB")):
        assert "--ram" not in printed("-m", target, *other_machine)

    with offload.load(target, ram="4GiB", threads=1) as decoder:
        assert list(map(as_flags, decoder.notes)) == [warning]
    assert format_bytes(3 << 30) == "3 GiB"
