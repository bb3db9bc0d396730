"""What `offload plan` says of mixtures of experts by their configs alone: what stays, hits, seconds per token."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from mixture_headers import CONFIG
from shell import shell
from transformers import AutoConfig

from offload.calibration import link as rates
from offload.errors import UserError
from offload.planning import load_options as options
from offload.planning.load_options import LoadOptions
from offload.rank_roles import RankInfo
from offload.reports.estimate import estimate

LAPTOP = ("--ram", "3.2GB", "--disk-speed", "2GB", "--context", "2048")


@pytest.fixture(autouse=True)
def same_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine computes decides how many rows a prompt's pass has, and those take memory from experts."""
    monkeypatch.setattr(rates, "product_flops_per_s", lambda *_: 1e11)


def config_of(folder: Path, kind: str, **changes: Any) -> str:
    """A config.json with transformers' defaults for this kind."""
    folder.mkdir(exist_ok=True)
    config = {**AutoConfig.for_model(kind, dtype="bfloat16").to_dict(), **changes}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return str(folder / "config.json")


def printed(*flags: object) -> str:
    outcome = shell("plan", *flags)
    assert outcome.code == 0 and outcome.err == "" and max(map(len, outcome.out.splitlines())) < 80
    return " ".join(outcome.out.split())


def figures(*flags: object) -> dict[str, Any]:
    outcome = shell("plan", *flags, "--json")
    assert outcome.code == 0, outcome.err
    found: dict[str, Any] = json.loads(outcome.out)
    return found


@pytest.fixture(scope="module")
def fine(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A sixth of the layers of Qwen3-30B-A3B, and fewer tokens."""
    sizes = {"num_hidden_layers": 8, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32000}
    return config_of(tmp_path_factory.mktemp("qwen") / "30b", "qwen3_moe", **sizes)


def test_a_mixture_keeps_what_is_used_most(fine: str) -> None:
    got, whole = figures("-m", fine, *LAPTOP), figures("-m", fine, *LAPTOP, "--experts", "layers")
    experts = got["experts"]
    assert (experts["num_experts"], experts["experts_per_token"]) == (8 * 128, 8 * 8)
    assert experts["expert_slot_bytes"] == pytest.approx(9.44e6, rel=0.01)
    assert 0.18 < experts["num_kept"] / 1024 < 0.25 and got["tiers"]["disk"]["num_layers"] == 0
    assert 0.5 < got["expert_hit_share"] < 0.8
    token_bytes = 8 * 8 * experts["expert_slot_bytes"]
    assert got["bytes_per_sweep"] == pytest.approx((1 - got["expert_hit_share"]) * token_bytes, rel=0.01)
    assert got["sweep_s"] == pytest.approx(got["bytes_per_sweep"] / 2e9) and got["sweep_s"] < whole["sweep_s"] / 20
    assert 0.3 < 6 * got["predictions"][0]["s_per_token"] < 0.8, "0.40 to 0.45 s by traces, with a fifth of all experts"
    assert "experts" not in whole and whole["predictions"][0]["s_per_token"] == pytest.approx(whole["sweep_s"])


def test_a_person_reads_it_in_a_line(fine: str) -> None:
    said, whole = printed("-m", fine, *LAPTOP), printed("-m", fine, *LAPTOP, "--experts", "layers")
    got = figures("-m", fine, *LAPTOP)
    kept, hits = got["experts"]["num_kept"], got["expert_hit_share"]
    assert f"experts {kept:,} of 1,024 stay ({kept / 1024:.0%}), which is {hits:.0%} of what a token needs" in said
    assert "s a token" not in said, "the headline has it"
    assert "all 8 stay in memory, but for routed experts" in said and "a pass for one token moves about" in said
    assert "experts" not in whole and "one pass over the weights moves" in whole
    assert "slots for experts" in printed("-m", fine, *LAPTOP, "-v")
    card = printed("-m", fine, "--gpu-mem", "6GiB", *LAPTOP)
    assert re.search(r"stay \(\d+%\), which is \d+% of what a token needs; [\d,]+ more in memory", card), card
    roomy = printed("-m", fine, "--ram", "100GB", *LAPTOP[2:], "--experts", "demand")
    assert "layers all 8 stay in memory" in roomy and "routed" not in roomy and "a token needs" not in roomy


def test_other_mixtures_and_machines(tmp_path: Path) -> None:
    oss = figures("-m", config_of(tmp_path / "oss", "gpt_oss", vocab_size=32000), "--ram", "6GB", *LAPTOP[2:])
    assert oss["experts"]["num_experts"] == 36 * 128 and oss["experts"]["experts_per_token"] == 36 * 4
    r1 = config_of(tmp_path / "r1", "deepseek_v3", num_hidden_layers=6)
    got = figures("-m", r1, "--ram", "20GB", "--disk-speed", "2GB", "--context", "2048")
    assert got["experts"]["num_experts"] == 3 * 256, "the first three layers are dense"
    card = figures("-m", r1, "--hardware", "rtx4090", "--ram", "24GB", "--context", "2048")
    both = ("num_expert_slots", "num_host_expert_slots")
    assert card["device"] == "cuda" and all(card["experts"][name] > 100 for name in both)
    assert card["predictions"][0]["limit"] == "disk" and card["s_per_token_range"][0] < got["s_per_token_range"][0]


def test_packing_is_advised_for_stacks_too(fine: str, tmp_path: Path) -> None:
    oss = config_of(tmp_path / "oss", "gpt_oss", vocab_size=32000)
    for found in (figures("-m", oss, "--ram", "6GB", *LAPTOP[2:]), figures("-m", fine, *LAPTOP)):
        assert found["packing"]["bytes_per_sweep"] < 0.9 * found["bytes_per_sweep"], "experts are packed one by one"


def test_a_draft_gets_small_trees_where_rows_are_dear(fine: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000}  # fmt: skip
    draft = config_of(tmp_path / "06b", "qwen3", **sizes)
    room: dict[str, Any] = {"gpu_memory": "6GiB", "ram": "8GB", "context": 1024}
    nodes = {
        how: estimate(
            fine, draft, LoadOptions(experts=how, **room), hardware="rtx4090", has_packing=False
        ).plan.num_nodes
        for how in ("demand", "layers")
    }
    assert nodes["demand"] <= 16 < nodes["layers"]


@pytest.mark.parametrize("how", ["demand", "layers"])
def test_families_that_multiply_all_experts_stream_layers(how: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "granitemoe", "num_local_experts": 32}))
    outcome = shell("plan", "-m", tmp_path / "config.json", "--ram", "6GB", "--experts", how, "--json")
    if how == "demand":
        assert outcome.code == 2 and "got model type granitemoe: try --experts layers" in outcome.err
    else:
        assert outcome.code == 0 and "experts" not in json.loads(outcome.out)


def test_flags_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "require_place", lambda: RankInfo(0, 2, 0, 0, 2, "localhost", 1))
    with pytest.raises(UserError, match="`experts` demand works in one process alone, got `ranks` shards"):
        LoadOptions(ranks="shards", experts="demand")
    assert LoadOptions(ranks="shards").experts == "auto"
