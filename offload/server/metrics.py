"""Figures of an engine in Prometheus' text format, version 0.0.4: counters since the start, gauges of now."""

from offload.engine.service import EngineFigures, PassDone

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(figures: EngineFigures) -> str:
    """One family of lines for each figure; rates are of the passes of the last minute, and 0 where there was none."""
    recent = figures.recent
    span_s = sum(one.seconds for one in recent)
    per_s = 1 / span_s if span_s else 0.0
    num_texts = sum(one.num_texts for one in recent)
    num_tokens = sum(one.num_tokens for one in recent)
    outcomes = ("done", "cancelled", "failed", "refused")
    families = [
        ("requests_active", "gauge", "texts that are written", figures.num_active),
        ("requests_waiting", "gauge", "requests that wait for a place", figures.num_waiting),
        ("prompt_tokens_total", "counter", "tokens of prompts that were begun", figures.num_prompt_tokens),
        ("tokens_total", "counter", "new tokens", figures.num_tokens),
        ("passes_total", "counter", "passes over the weights", figures.num_passes),
        ("pass_seconds_total", "counter", "time in passes", figures.pass_s),
        ("link_bytes_total", "counter", "bytes of weights that passes have moved", figures.moved.num_bytes),
        ("link_wait_seconds_total", "counter", "time that computing waited for the link", figures.moved.stall_s),
        ("queue_wait_seconds_total", "counter", "time that requests waited before they were begun", figures.waited_s),
        ("tokens_per_second", "gauge", "new tokens per second of passes", num_tokens * per_s),
        ("tokens_per_pass", "gauge", "new tokens of all texts per pass", num_tokens / max(1, len(recent))),
        ("texts_per_pass", "gauge", "texts that share a pass", num_texts / max(1, len(recent))),
        ("link_bytes_per_second", "gauge", "bytes moved per second of passes", _moved(recent) * per_s),
    ]
    lines = [line for name, kind, what, value in families for line in _family(name, kind, what, {"": value})]
    totals = {f'{{outcome="{outcome}"}}': getattr(figures, f"num_{outcome}") for outcome in outcomes}
    return "\n".join([*lines, *_family("requests_total", "counter", "requests by what became of them", totals), ""])


def _moved(recent: tuple[PassDone, ...]) -> int:
    return sum(one.moved.num_bytes for one in recent)


def _family(name: str, kind: str, what: str, values: dict[str, float]) -> list[str]:
    samples = [f"offload_{name}{labels} {value:.10g}" for labels, value in values.items()]
    return [f"# HELP offload_{name} {what}", f"# TYPE offload_{name} {kind}", *samples]
