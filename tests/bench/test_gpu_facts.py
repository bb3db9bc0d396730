"""The first step of the GPU runner where there is no GPU: missing facts are rows."""

import pytest

from offload.bench.gpu.machine_facts import facts


def test_a_fact_that_is_missing_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = {row["row"]: row for row in facts()}
    assert found["cores"]["versions"]["torch"] and "FileNotFoundError" in found["nvidia-smi: failed"]["error"]
    assert found["compiler"]["is_met"] is False and "Triton" in found["compiler"]["notes"]
    assert found["memory called available"]["value"] > 0
