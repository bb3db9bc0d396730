"""The comparison with other programs: the cap holds, wrong tokens never get a speed, what is missing is listed."""

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from planted_peer import NUM_NEW, PROMPT, order, plant
from small_moe import NUM_EXPERTS, save_small_moe
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from offload.bench.harness import process as harness
from offload.bench.harness.process import new_cap
from offload.bench.harness.setting import Setting
from offload.bench.harness.tables import say_table
from offload.bench.peers import hugging_face, ours, peers
from offload.bench.peers.child import Measured, follow, rate
from offload.bench.peers.gguf_writer import reordered, write_gguf
from offload.bench.peers.peers import (
    COLUMNS,
    OURS,
    PROGRAMS,
    Common,
    Outcome,
    Program,
    compare,
    proved,
    run_child,
)
from offload.checkpoint.packaged import PAIR
from offload.errors import UserError
from offload.machine import CGROUP_V1, CGROUP_V2, GroupFiles, memory_groups, rss_bytes

TUNED = {
    "num_assistant_tokens": 4,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
}


# --- the cap


def group_maker(files: GroupFiles, *refusing: str) -> Callable[[Path], None]:
    """Like the kernel: a new folder is a group at once, but in folders of these names no memory group may be made."""

    def make(folder: Path) -> None:
        os.mkdir(folder)
        if folder.parent.name not in refusing:
            for name in (files.limit, "cgroup.procs"):
                (folder / name).write_text("")

    return make


def fake_tree(root: Path, line: str, patch: pytest.MonkeyPatch) -> None:
    """Memory groups are those of this tree."""
    (root / "memory/a/b").mkdir(parents=True)
    (root / "a/b").mkdir(parents=True)
    (root / "membership").write_text(f"7:cpu:/c\n{line}\n")
    patch.setattr(harness, "memory_groups", lambda *_: memory_groups(root, root / "membership"))


@pytest.mark.parametrize(
    ("line", "files", "refusing", "where"),
    [
        ("4:memory:/a/b", CGROUP_V1, [], "memory/a/b"),
        ("0::/a/b", CGROUP_V2, [], "a/b"),
        ("0::/a/b", CGROUP_V2, ["b"], "a"),
    ],
)
def test_group_lies_as_deep_as_it_may(
    tmp_path: Path, line: str, files: GroupFiles, refusing: list[str], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_tree(tmp_path, line, monkeypatch)
    monkeypatch.setattr(Path, "mkdir", group_maker(files, *refusing))
    cap = new_cap(12345)
    assert cap is not None
    assert cap.folder.parent == tmp_path / where
    assert (cap.folder / files.limit).read_text() == "12345"
    assert cap.processes.parent == cap.folder


def test_no_group_where_the_kernel_makes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tree(tmp_path, "0::/a/b", monkeypatch)
    assert new_cap(12345) is None  # plain folders: no limit file appears in them
    assert not list(tmp_path.rglob("offload-bench*"))
    (tmp_path / "membership").unlink()
    assert new_cap(12345) is None


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


def test_fastest_thread_count_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class TwoAreBetter:
        num_threads = 0

        def use_threads(self, count: int) -> None:
            self.num_threads = count

        def generate(self, prompt_ids: list[int], num_tokens: int, limit_s: float, emit: Callable) -> None:
            for _ in range(num_tokens):
                time.sleep(0.03 / self.num_threads**2)
                emit([self.num_threads] * 4)

    module = type(sys)("two_are_better")
    module.open_peer = lambda order: TwoAreBetter()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "two_are_better", module)
    weights, group = tmp_path / "weights", tmp_path / "procs"
    weights.touch()
    wish = order("two_are_better", threads=[1, 2, 1], prompts=[PROMPT] * 3, target=str(weights), group=str(group))
    figures = follow(wish)
    assert group.read_text() == str(os.getpid())
    assert figures["num_threads"] == 2
    # 10 tokens after the first burst are 3 bursts of 4, the last one whole
    assert [run.token_ids for run in figures["runs"]] == [[2] * 4 * 4] * 3


def test_rate_leaves_the_first_burst_out() -> None:
    runs = [Measured(0, [(9.0, [1, 2]), (10.0, [3]), (11.0, [4, 5, 6])]), Measured(1, [(1.0, [1]), (3.0, [2, 3])])]
    assert rate(runs) == pytest.approx((4 + 2) / (2 + 2))


# --- the programs themselves


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"weights": "disk"},
        {"assistant": TUNED},
        {"assistant": {}},
    ],
    ids=str,
)
def test_transformers_in_all_its_ways(options: dict[str, object]) -> None:
    """It need not write what ours does: in 16 bits two tokens that lie closer than rounding may swap."""
    options = {"weights": "mmap", "assistant": None, **options}
    peer = hugging_face.open_peer(order(options=options, cap_bytes=rss_bytes() + (258 << 20)))
    written = Outcome(runs=[Measured(0, [(1.0, tokens_of(peer))])])
    assert proved(written, PAIR / "target", [PROMPT]).reason == ""
    if options["weights"] == "disk":
        assert "disk" in peer._model.hf_device_map.values()
    if options["assistant"]:
        assert peer._options["assistant_model"].generation_config.num_assistant_tokens == 4


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


def test_no_ratio_without_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcomes = iter([Outcome(reason="refused: wrong"), Outcome(runs=runs(1.0)), Outcome(runs=runs(9.0))])
    monkeypatch.setattr(peers, "measure", lambda program, setting: next(outcomes))
    setting = Common(Setting(tmp_path, tmp_path, tmp_path, 1 << 30), [PROMPT], ())
    rows = compare(["mmap"], PROGRAMS, setting, lambda row: None)
    assert rows[0] == {"peer": OURS, "title": PROGRAMS[OURS].title, "reason": "refused: wrong"}
    assert "ratio" not in rows[1]


# --- GGUF


def test_reordered_rows_turn_neighbours_as_halves_turn() -> None:
    """Scores of queries and keys are the same under both conventions of rotary positions."""
    num_heads, head_width, width, length = 3, 8, 5, 7
    weights = [np.random.default_rng(seed).normal(size=(num_heads * head_width, width)) for seed in (0, 1)]
    x_TD = np.random.default_rng(2).normal(size=(length, width))
    angle_TI = np.arange(length)[:, None] * 100.0 ** (-np.arange(head_width // 2) / (head_width // 2))
    half = np.concatenate([angle_TI, angle_TI], axis=1)[None]

    def heads(weight: np.ndarray) -> np.ndarray:
        return (x_TD @ weight.T).reshape(length, num_heads, head_width).swapaxes(0, 1)

    query, key = (torch.from_numpy(heads(weight))[None] for weight in weights)
    query, key = apply_rotary_pos_emb(query, key, *(torch.from_numpy(f(half)) for f in (np.cos, np.sin)))

    def turned(weight: np.ndarray) -> np.ndarray:
        pairs = heads(reordered(weight, num_heads)).reshape(num_heads, length, -1, 2)
        return ((pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle_TI)).view(float)

    wanted = (query @ key.mT)[0].numpy()
    np.testing.assert_allclose(turned(weights[0]) @ turned(weights[1]).swapaxes(1, 2), wanted, atol=1e-9)


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


def test_gguf_of_a_mixture_stacks_its_experts(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from safetensors.torch import load_file

    folder = save_small_moe(tmp_path / "moe", dtype=torch.bfloat16)
    write_gguf(folder, tmp_path / "moe.gguf")
    reader, weights = gguf.GGUFReader(tmp_path / "moe.gguf"), load_file(folder / "model.safetensors")
    for key, value in (("count", NUM_EXPERTS), ("used_count", 2), ("feed_forward_length", 24)):
        assert reader.fields[f"qwen3moe.expert_{key}"].contents() == value
    written = {tensor.name: tensor.data for tensor in reader.tensors}
    for part in ("gate", "up", "down"):
        names = (f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight" for expert in range(NUM_EXPERTS))
        stack = torch.stack([weights[name] for name in names])
        assert bytes(written[f"blk.1.ffn_{part}_exps.weight"]) == stack.view(torch.uint8).numpy().tobytes(), part
    for name, part in (("mlp.gate", "ffn_gate_inp"), ("self_attn.q_norm", "attn_q_norm")):
        wanted = weights[f"model.layers.0.{name}.weight"].float().numpy()
        np.testing.assert_array_equal(written[f"blk.0.{part}.weight"], wanted)
    query = weights["model.layers.0.self_attn.q_proj.weight"].view(torch.uint8).numpy()
    assert bytes(written["blk.0.attn_q.weight"]) == query.tobytes(), "its positions turn as Hugging Face's do"


def test_gguf_of_another_family_is_refused(tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((PAIR / "draft" / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "qwen3"}))
    with pytest.raises(UserError, match="only a Llama"):
        write_gguf(tmp_path, tmp_path / "out.gguf")
