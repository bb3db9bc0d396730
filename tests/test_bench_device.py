"""The bench of the device path, whole, on a device that is the host: a script nobody runs is a script that fails."""

import json

import pytest
import torch
import typer

from offload.bench import device as bench


def test_every_row_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(quick=False, tiny=True, gpu_mem="", device="cuda")
    rows = {row["row"]: row for row in json.loads(capsys.readouterr().out.splitlines()[-1])}
    assert rows["layers"]["plan"]["tiers"]["host"]["num_layers"] > 2, "the sweeps of the bench must stream"
    assert rows["gate: float32 greedy ids equal transformers"]["is_met"]
    assert rows["soak: sweeps with poisoned slots that repeat their scores"]["is_met"]
    assert rows["page-locked bytes against layers held"]["is_met"]
    for start in (
        "copies of",
        "sweep of 24 rows",
        "draft step of 1 rows",
        "none:",
        "sequences:4x4",
        "24x8",
        "accelerate",
        "best",
    ):
        (row,) = (row for name, row in rows.items() if name.startswith(start))
        assert row["value"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_without_a_card_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        bench.main(quick=True, tiny=False, gpu_mem="40GiB", device="cuda")
    lines = capsys.readouterr()
    assert ended.value.exit_code == 2 and not lines.out
    assert lines.err.count("\n") == 1 and "needs a CUDA device" in lines.err
