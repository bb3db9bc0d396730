"""The figures of a server in Prometheus' text format."""

from collections.abc import Mapping
from functools import partial

from offload.engine.scheduler import EngineStats

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(figures: EngineStats) -> str:
    """Return one family of lines for each figure, in Prometheus' text format.

    Rates are of the passes of the last minute, and 0 where there was none.
    """
    moved = figures.moved
    recent = figures.recent
    num_passes = max(1, len(recent))
    per_s = 1 / (sum(done.seconds for done in recent) or float("inf"))
    num_tokens = sum(done.num_tokens for done in recent)
    num_texts = sum(done.num_texts for done in recent)
    recent_bytes = sum(done.moved.num_bytes for done in recent)
    outcomes = {
        "done": figures.num_done,
        "cancelled": figures.num_cancelled,
        "failed": figures.num_failed,
        "queue_full": figures.num_refused,
    }
    lines = list[str]()

    def family(kind: str, name: str, help_text: str, value: float | Mapping[str, float]) -> None:
        samples = {"": value}
        if isinstance(value, Mapping):
            samples = {f'{{outcome="{outcome}"}}': count for outcome, count in value.items()}
        lines.append(f"# HELP offload_{name} {help_text}")
        lines.append(f"# TYPE offload_{name} {kind}")
        lines.extend(f"offload_{name}{labels} {sample:.10g}" for labels, sample in samples.items())

    gauge = partial(family, "gauge")
    counter = partial(family, "counter")
    gauge("requests_active", "texts that are written", figures.num_active)
    gauge("requests_waiting", "requests that wait for a place", figures.num_waiting)
    help_text = "tokens of prompts that were begun"
    counter("prompt_tokens_total", help_text, figures.num_prompt_tokens)
    counter("tokens_total", "new tokens", figures.num_tokens)
    counter("passes_total", "passes over the weights", figures.num_passes)
    counter("pass_seconds_total", "time in passes", figures.pass_s)
    counter("link_bytes_total", "bytes of weights that passes have moved", moved.num_bytes)
    counter("link_wait_seconds_total", "time that computing waited for the link", moved.stall_s)
    help_text = "time that requests waited before they were begun"
    counter("queue_wait_seconds_total", help_text, figures.waited_s)
    gauge("tokens_per_second", "new tokens per second of passes", num_tokens * per_s)
    gauge("tokens_per_pass", "new tokens of all texts per pass", num_tokens / num_passes)
    gauge("texts_per_pass", "texts that share a pass", num_texts / num_passes)
    gauge("link_bytes_per_second", "bytes moved per second of passes", recent_bytes * per_s)
    counter("requests_total", "requests by what became of them", outcomes)
    return "\n".join([*lines, ""])
