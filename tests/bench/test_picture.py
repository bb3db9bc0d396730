"""The picture of a bench says what it is of, nothing sticks out, and rows are bars beside their ceiling."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from offload.bench.harness.picture import Bar, case_words, draw_decoding, figure_of
from offload.machine import cpu_name

pytest.importorskip("matplotlib")

SETTINGS = {"target": "Llama-70B", "draft": "Llama-1B", "device": "cpu"}


def drawn(bars: list[Bar], settings: dict[str, str] = SETTINGS) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = figure_of(bars, "How many tokens per second?", "tokens per second", "what the link allows", settings)
    FigureCanvasAgg(figure).draw()
    return figure


def lies_within(inner: Any, outer: Any) -> bool:
    return all(outer.contains(*corner) for corner in inner.get_window_extent().padded(-1).corners())


@pytest.mark.parametrize("num_rows", [1, 2, 40])
@pytest.mark.parametrize("name", ["Llama-70B", "a-model-of-many-words-" * 9])
def test_it_says_what_it_is_of_and_nothing_sticks_out(name: str, num_rows: int) -> None:
    bars = [Bar(case_words(f"dynamic:{8 * i}x{i}", "match", 0.6), 0.9 * i, 1.0 * i) for i in range(1, num_rows + 1)]
    figure = drawn(bars, {**SETTINGS, "target": name})
    (place,) = figure.axes
    title = figure.get_suptitle()
    for part in ("How many tokens per second?", name, "Llama-1B", cpu_name(), f"{datetime.now(UTC):%Y-%m}"):
        assert part.replace(" ", "") in title.replace("\n", "").replace(" ", "")
    labels = [figure._suptitle, place.xaxis.label, *place.get_yticklabels(), *place.texts, *figure.legends]
    assert all(lies_within(label, figure.bbox) for label in labels)
    assert len(place.get_yticklabels()) == num_rows


@pytest.mark.parametrize("least_pass_s", [0.5, None])
def test_rows_of_decode_are_drawn(tmp_path: Path, least_pass_s: float | None) -> None:
    named = {"rule": "match", "temperature": 0.0}
    rows = [
        {"tree": "none", "tokens_per_sweep": 1.0, "decode_tokens_per_s": 1.9, "accepted_per_pos": [], **named},
        {"tree": "auto", "tokens_per_sweep": 4.1, "decode_tokens_per_s": 7.5, "accepted_per_pos": [0.6] * 9, **named},
    ]
    draw_decoding(rows, least_pass_s, SETTINGS, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 5000
