"""The picture of a bench: it says what it is of, nothing sticks out, and one size alone is a table."""

from datetime import UTC, datetime
from typing import Any

import pytest

from offload.bench.harness.picture import figure_of
from offload.machine import cpu_name

pytest.importorskip("matplotlib")

SETTINGS = {"target": "Llama-70B", "draft": "Llama-1B", "device": "cpu"}


def row(tree: str, num_nodes: int, tokens: float, temperature: float = 0.0, rule: str = "match") -> dict[str, Any]:
    named = {"tree": tree, "rule": rule, "temperature": temperature, "num_prompts": 3}
    return {**named, "num_nodes": num_nodes, "tokens_per_sweep": tokens}


def drawn(rows: list[dict[str, Any]], settings: dict[str, str] = SETTINGS) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = figure_of(rows, settings)
    FigureCanvasAgg(figure).draw()
    return figure


def lies_within(inner: Any, outer: Any) -> bool:
    return all(outer.contains(*corner) for corner in inner.get_window_extent().padded(-1).corners())


def sizes() -> list[dict[str, Any]]:
    trees = [("", 16, 3.0), ("", 64, 4.1), ("", 256, 5.0), ("dynamic:", 64, 5.2), ("dynamic:", 768, 8.0)]
    cases = [(temperature, rule) for temperature in (0.0, 0.6) for rule in ("match", "sequoia", "specinfer")]
    found = [row(f"{kind}{size}x16", size, tokens, *case) for case in cases for kind, size, tokens in trees]
    return [row("none", 1, 1.0), *found]


@pytest.mark.parametrize("name", ["Llama-70B", "a-model-of-many-words-" * 9])
def test_it_says_what_it_is_of_and_nothing_sticks_out(name: str) -> None:
    figure = drawn(sizes(), {**SETTINGS, "target": name})
    (place,) = figure.axes
    title = place.get_title()
    for part in (name, "Llama-1B", cpu_name(), f"{datetime.now(UTC):%Y-%m}"):
        assert part.replace(" ", "") in title.replace("\n", "").replace(" ", "")
    labels = [place.title, place.xaxis.label, place.yaxis.label, *place.get_xticklabels(), *place.get_yticklabels()]
    assert all(lies_within(label, figure.bbox) for label in labels if label.get_text())
    assert lies_within(place.get_legend(), place.bbox)
    low, high = place.get_ylim()
    assert low == 0 and high > 8
    assert not place.tables and len(place.lines) == len(place.get_legend().get_texts()) == 12


def test_one_size_is_a_table() -> None:
    figure = drawn([row("none", 1, 1.0), row("64x16", 64, 4.123), row("64x16", 64, 3.5, 0.6)])
    (place,) = figure.axes
    (table,) = place.tables
    cells = {at: cell.get_text().get_text() for at, cell in table.get_celld().items()}
    assert not place.lines and cells[0, 4] == "tokens per sweep" and cells[2, 4] == "4.12" and cells[2, 0] == "64x16"
    assert "Llama-70B" in place.get_title()
