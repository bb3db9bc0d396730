"""The comparison with other programs: the cap holds, wrong tokens never get a speed, what is missing is listed."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from planted_peer import NUM_NEW, PROMPT, order, plant

from offload.bench.harness.process import new_cap
from offload.bench.harness.setting import Setting
from offload.bench.harness.tables import say_table
from offload.bench.peers import ours, peers
from offload.bench.peers.child import Measured
from offload.bench.peers.gguf_writer import reordered, write_gguf
from offload.bench.peers.peers import (
    COLUMNS,
    OURS,
    Common,
    Outcome,
    Program,
    compare,
    proved,
    run_child,
)
from offload.checkpoint.packaged import PAIR
from offload.machine import rss_bytes

# --- the cap


@pytest.mark.full
def test_cap_counts_files_and_memory(tmp_path: Path) -> None:
    cap = new_cap(cap_bytes := 32 << 20)
    if cap is None:
        pytest.skip("memory groups cannot be made here")
    (tmp_path / "file").write_bytes(bytes(64 << 20))
    os.sync()
    code = """
        import os, sys
        open(sys.argv[1], "w").write(str(os.getpid()))
        file = open(sys.argv[2], "rb", buffering=0)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.read(1 << 20): pass
        if len(sys.argv) > 3: hoard = bytearray(int(sys.argv[3]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(cap.processes), str(tmp_path / "file")]
    try:
        assert subprocess.run(command).returncode == 0
        assert cap_bytes * 0.9 < (cap.peak_bytes() or cap_bytes) <= cap_bytes  # the file filled it, and no more
        assert subprocess.run([*command, str(2 * cap_bytes)]).returncode == -9
    finally:
        cap.remove()
    assert not cap.folder.exists()


# --- one child


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def right_tokens() -> list[int]:
    """What ours writes."""
    return written_by_ours("none")


def written_by_ours(tree: str) -> list[int]:
    """In this process, where no end of a child closes the decoder."""
    peer = ours.open_peer(order(options={"tree": tree}, cap_bytes=rss_bytes() + (1 << 30)))
    with peer._decoder:
        return tokens_of(peer)


def tokens_of(peer: object) -> list[int]:
    tokens: list[int] = []
    peer.generate(PROMPT, NUM_NEW, 60.0, tokens.extend)  # type: ignore[attr-defined]
    return tokens


@pytest.mark.usefixtures("planted")
def test_wrong_token_gets_no_speed(right_tokens: list[int]) -> None:
    good = run_child(sys.executable, order(options={"tokens": right_tokens}))
    assert good.reason == ""
    assert good.runs[0].token_ids == right_tokens
    assert proved(good, PAIR / "target", [PROMPT])._replace(num_near=0) == good, (
        "ties within rounding are no wrong tokens"
    )

    wrong = [*right_tokens[:-1], (right_tokens[-1] + 1) % 4096]
    bad = proved(run_child(sys.executable, order(options={"tokens": wrong})), PAIR / "target", [PROMPT])
    assert bad.reason.startswith("refused: a token misses")
    assert bad.runs == ()


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"error": "no such thing"}, "failed: ValueError: no such thing"),
        ({"signal": 9}, "failed: killed by signal 9, out of memory"),
        ({"tokens": [5]}, "failed: no token after the first within the time limit"),
        ({"tokens": []}, "failed: no token after the first within the time limit"),
        ({"tokens": [5] * NUM_NEW, "sleep_s": 9.0}, "failed: took longer than 1 s"),
    ],
)
def test_failure_is_told_in_a_line(options: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "sleep_s" in options:
        monkeypatch.setattr("offload.bench.peers.peers._START_S", 0.9)
    assert run_child(sys.executable, order(options=options, limit_s=0.1)).reason == reason


# --- the programs themselves


# --- the table


def runs(tokens_per_s: float) -> list[Measured]:
    return [Measured(0, [(1.0, [7]), (1.0 + 4 / tokens_per_s, [8] * 4)])]


def test_rows_ratios_and_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speeds = {"a": iter([8.0, 4.0]), "b": iter([1.0]), "c": iter([3.0])}
    wanted = {"a": None, "b": 5.0, "c": 2.5, "d": 1.0}
    programs = {
        name: Program(f"program {name}", name, {}, ("json" if name in speeds else "absent_module",), 8, 1, wanted[key])
        for key, name in zip("abcd", (OURS, "b", "c", "d"), strict=True)
        for speeds in [(OURS, "b", "c")]
    }
    keys = {OURS: "a", "b": "b", "c": "c"}
    monkeypatch.setattr(
        peers,
        "run_child",
        lambda python, order: Outcome(runs=runs(next(speeds[keys[order.module]])), is_capped=True, peak_bytes=10**9),
    )
    monkeypatch.setattr(peers, "proved", lambda outcome, model, prompts, noise: outcome)
    place = Setting(tmp_path, tmp_path, tmp_path, 1 << 30)
    setting = Common(place, [PROMPT], (sys.executable,))
    said: list[dict] = []
    rows = compare(["b", "c", "d"], programs, setting, said.append)

    assert [row["peer"] for row in said] == [OURS, "b", "c", "d", OURS]
    assert rows[0]["tokens_per_s"] == pytest.approx(8 / (4 / 8 + 4 / 4))  # both measurements of ours together
    assert [row.get("ratio") for row in rows] == [None, pytest.approx(16 / 3), pytest.approx(16 / 9), None]
    assert [row.get("is_met") for row in rows] == [None, True, False, None]
    assert rows[3]["reason"] == "missing: no interpreter here can import absent_module"
    say_table(COLUMNS, json.loads(json.dumps(rows)))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "5.33 >= 5 met" in lines[2]
    assert "1.78 >= 2.5 MISSED" in lines[3]
    assert lines[4] == "program d missing: no interpreter here can import absent_module"


# --- GGUF


def test_gguf_holds_the_same_values(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from safetensors.torch import load_file

    write_gguf(PAIR / "draft", tmp_path / "draft.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["draft.gguf"]
    reader = gguf.GGUFReader(tmp_path / "draft.gguf")
    config = json.loads((PAIR / "draft/config.json").read_text())
    assert reader.fields["llama.block_count"].contents() == config["num_hidden_layers"]
    assert reader.fields["llama.attention.layer_norm_rms_epsilon"].contents() == pytest.approx(config["rms_norm_eps"])
    weights = load_file(PAIR / "draft/model.safetensors")
    written = {tensor.name: tensor for tensor in reader.tensors}
    assert len(written) == len(weights)
    for name, values in (
        ("token_embd", weights["model.embed_tokens.weight"]),
        ("blk.1.ffn_down", weights["model.layers.1.mlp.down_proj.weight"]),
        ("blk.0.attn_v", weights["model.layers.0.self_attn.v_proj.weight"]),
    ):
        assert bytes(written[f"{name}.weight"].data) == values.view(torch.uint8).numpy().tobytes(), name
    norm = weights["model.layers.0.input_layernorm.weight"].float()
    np.testing.assert_array_equal(written["blk.0.attn_norm.weight"].data, norm.numpy())
    query = weights["model.layers.0.self_attn.q_proj.weight"].view(torch.int16).numpy()
    data = np.frombuffer(bytes(written["blk.0.attn_q.weight"].data), dtype=np.int16).reshape(query.shape)
    np.testing.assert_array_equal(data, reordered(query, config["num_attention_heads"]))
