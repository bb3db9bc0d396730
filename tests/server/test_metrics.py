"""Figures for Prometheus: a text that its own parser reads, and numbers that are the engine's."""

from pathlib import Path

import httpx
import pytest
from served import GREEDY, MODEL_ID, _afresh, serving  # noqa: F401

from offload.engine.scheduler import EngineFigures
from offload.server.app import metrics_text

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")


def samples(text: str) -> dict[str, float]:
    found = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.documentation and family.type in ("counter", "gauge")
        for sample in family.samples:
            found[sample.name + "".join(f"/{value}" for value in sample.labels.values())] = sample.value
    return found


def test_figures_are_the_engines(looper: Path) -> None:
    with serving(looper) as served:
        served.client().completions.create(model=MODEL_ID, prompt="Say:", max_tokens=12, **GREEDY)
        response = httpx.get(f"{served.address}/metrics")
        figures = served.engine.figures()
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    got = samples(response.text)
    assert got["offload_tokens_total"] == figures.num_tokens == 12
    assert got["offload_prompt_tokens_total"] == len("Say:")
    assert got["offload_passes_total"] == figures.num_passes > 0
    assert got["offload_link_bytes_total"] == figures.moved.num_bytes > 0
    assert got["offload_tokens_per_pass"] == pytest.approx(12 / figures.num_passes)
    assert got["offload_link_bytes_per_second"] == pytest.approx(figures.moved.num_bytes / figures.pass_s)
    assert got["offload_requests_total/done"] == 1
    assert got["offload_requests_total/queue_full"] == 0 and "offload_requests_total/refused" not in got
    assert got["offload_requests_active"] == got["offload_requests_waiting"] == 0


def test_an_idle_engine_has_no_rates() -> None:
    assert set(samples(metrics_text(EngineFigures())).values()) == {0}
