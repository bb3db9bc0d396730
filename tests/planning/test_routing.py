"""How many experts a pass needs and misses, against figures of public routing traces.

The figures are of one text on Qwen3-30B-A3B, 128 experts a layer of which 6 were chosen, and of gpt-oss-120b, 2 of 128
(github.com/Helldez/BigMoeOnEdge, docs/bench-data): unions of random tokens of the text, experts that a cache by use has
to read for a token, and what the same sums say with the shares that were counted there.
"""

import numpy as np
import pytest

from offload.planning.expert_traffic import ExpertRouting

NUM_LAYERS, NUM_EXPERTS, NUM_CHOSEN = 48, 128, 6
UNIONS = {2: 1.76, 4: 2.90, 8: 4.43, 16: 6.15, 32: 7.7}  # in units of k
INDEPENDENT = {2: 1.95, 4: 3.73, 8: 6.80, 16: 11.4, 32: 16.7, 64: 20.4}
MISSES = {1: {0.03: 4.2, 0.05: 3.6, 0.10: 2.5, 0.20: 1.2}, 4: {0.03: 4.8, 0.05: 4.2, 0.10: 3.1, 0.20: 1.5}}
YIELDS = {1: 1.0, 2: 1.8, 4: 2.95, 8: 4.16, 16: 5.0, 32: 5.85, 64: 6.7, 128: 7.6}  # tokens of a sweep, by its nodes


def shares(ranks: np.ndarray, num_chosen: int, num_layers: int = NUM_LAYERS) -> ExpertRouting:
    """The same in every layer, in proportion to `ranks`; what is above 1 goes to the others."""
    low, high = 0.0, 1e6
    for _ in range(100):
        scale = (low + high) / 2
        low, high = (scale, high) if np.minimum(1, scale * ranks).sum() < num_chosen else (low, scale)
    return ExpertRouting(np.tile(np.minimum(1, low * ranks), (num_layers, 1)))


@pytest.fixture(scope="module")
def text() -> ExpertRouting:
    """Shares as of that text: 52 experts of a layer in use, falling with the power 0.75 of their rank."""
    rank = np.arange(1, NUM_EXPERTS + 1)
    return shares(np.where(rank <= 52, rank**-0.75, 0.0), NUM_CHOSEN)


def test_the_shares_of_a_text_say_how_many_experts_its_rows_need(text: ExpertRouting) -> None:
    per_layer = NUM_LAYERS * NUM_CHOSEN
    assert text.distinct(1) == pytest.approx(per_layer) and text.num_experts == NUM_LAYERS * NUM_EXPERTS
    for num_rows, wanted in UNIONS.items():
        assert text.distinct(num_rows) / per_layer == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("num_rows", MISSES)
def test_the_same_shares_say_what_a_cache_of_the_most_used_misses(num_rows: int, text: ExpertRouting) -> None:
    """Layers differ more than these do, so a little less is read there."""
    for room, wanted in MISSES[num_rows].items():
        kept = round(room * text.num_experts)
        assert text.misses(num_rows, kept) / NUM_LAYERS / YIELDS[num_rows] == pytest.approx(wanted, rel=0.25)


def test_independent_choices_need_twice_as_many() -> None:
    alike = shares(np.ones(NUM_EXPERTS), NUM_CHOSEN)
    for num_rows, wanted in INDEPENDENT.items():
        assert alike.distinct(num_rows) / NUM_LAYERS / NUM_CHOSEN == pytest.approx(wanted, rel=0.01)
    for num_rows in (8, 16, 32):
        assert INDEPENDENT[num_rows] > 1.5 * UNIONS[num_rows], "which is what measuring is for"
    half = alike.num_experts // 2
    assert alike.misses(4, half) == pytest.approx(alike.distinct(4) / 2), "none is better to keep"


@pytest.mark.parametrize(
    ("num_experts", "num_chosen", "wanted"),
    [
        (8, 2, [1, 0.97, 0.93, 0.87, 0.79, 0.68, 0.60, 0.53]),
        (128, 8, [1, 1.08, 1.23, 1.55, 2.1, 2.4, 2.3, 2.1]),
        (128, 4, [1, 1.09, 1.29, 1.73, 2.5, 3.5, 4.1, 4.1]),
    ],
)
def test_experts_per_token_of_an_empty_cache(num_experts: int, num_chosen: int, wanted: list[float]) -> None:
    """In units of k, where choices are independent: a big tree pays for few experts, and one row for many."""
    alike = shares(np.ones(num_experts), num_chosen, 1)
    for (num_rows, tokens), each in zip(YIELDS.items(), wanted, strict=True):
        assert alike.distinct(num_rows) / num_chosen / tokens == pytest.approx(each, rel=0.04)


@pytest.mark.parametrize(
    ("num_experts", "num_chosen"), [(128, 8), (128, 4), (256, 8), (64, 8), (32, 4), (8, 2), (4, 4)]
)
def test_what_is_usual_lies_between_the_traces_and_independence(num_experts: int, num_chosen: int) -> None:
    usual, alike = ExpertRouting.usual(3, num_experts, num_chosen), shares(np.ones(num_experts), num_chosen, 3)
    assert usual.q_LE.shape == (3, num_experts) and np.allclose(usual.q_LE.sum(1), num_chosen)
    for num_rows in (2, 4, 8):
        ratio = usual.distinct(num_rows) / 3 / num_chosen
        assert ratio <= alike.distinct(num_rows) / 3 / num_chosen + 1e-9
        assert ratio >= min(num_rows**0.66, 0.88 * alike.distinct(num_rows) / 3 / num_chosen)
    if num_experts >= 16 * num_chosen:
        assert usual.distinct(8) / 3 / num_chosen == pytest.approx(8**0.75, rel=0.01)


def test_misses_fall_with_room_and_needs_rise_with_rows() -> None:
    usual = ExpertRouting.usual(48, 128, 8)
    for num_rows in (1, 4, 64, 512):
        misses = [usual.misses(num_rows, kept) for kept in (0, 7, 300, 1200, 3000, 6144)]
        assert misses == sorted(misses, reverse=True) and misses[-1] == 0 and misses[0] == usual.distinct(num_rows)
    needs = [usual.distinct(num_rows) for num_rows in (0, 1, 2, 3, 8, 512, 1e6)]
    assert needs == sorted(needs) and needs[0] == 0 and needs[-1] == pytest.approx(48 * 128)
    assert usual.misses(1, 1229) < 0.5 * usual.distinct(1), "a fifth of them is more than half of what a token needs"


def test_counts_take_over_from_what_is_usual() -> None:
    generator = np.random.default_rng(0)
    truth = np.stack([generator.permutation(np.arange(1, 33.0) ** -1.2) for _ in range(5)])
    truth *= 4 / truth.sum(1, keepdims=True)
    truth = np.minimum(truth, 0.95)
    usual, exact = ExpertRouting.usual(5, 32, 4), ExpertRouting(truth)

    def counted(num_tokens: int) -> ExpertRouting:
        return ExpertRouting.counted(generator.binomial(num_tokens, truth), num_tokens)

    few, many = counted(20), counted(5000)
    assert np.abs(many.q_LE - truth).max() < 0.03
    for num_rows, kept in ((1, 0), (4, 32), (8, 60)):
        wanted = exact.misses(num_rows, kept)
        assert many.misses(num_rows, kept) == pytest.approx(wanted, rel=0.03)
        assert abs(few.misses(num_rows, kept) - wanted) < max(0.3 * wanted, abs(usual.misses(num_rows, kept) - wanted))
    nothing = ExpertRouting.counted(np.zeros((5, 32)), 0)
    assert nothing.distinct(1) == pytest.approx(5, rel=0.01), "without a count one expert a layer is all that is known"
