"""What ranks send each other: the table of Llama-3-70B, and sums that were made by hand."""

import pytest

from offload.planning.cluster import Gathers, Hops, Network

GBE = {  # Gbit/s -> payload per second and latency; packets carry 1448 bytes of 1538 on the wire
    1: Network(0.94e9 / 8, 100e-6),
    2.5: Network(2.5 * 0.94e9 / 8, 80e-6),
    10: Network(10 * 0.94e9 / 8, 50e-6),
    25: Network(25 * 0.94e9 / 8, 30e-6),
}
WIDTHS = (8192, 8192, 28672, 8192)  # heads' output, o, features, down
TABLE = {  # rows -> Gbit/s -> seconds of two ranks and of four
    1: {1: (0.07, 0.15), 2.5: (0.04, 0.10), 10: (0.02, 0.05), 25: (0.01, 0.03)},
    64: {1: (2.4, 3.6), 2.5: (0.97, 1.5), 10: (0.25, 0.40), 25: (0.10, 0.17)},
    128: {1: (4.7, 7.1), 2.5: (1.9, 2.9), 10: (0.48, 0.75), 25: (0.20, 0.31)},
    256: {1: (9.4, 14), 2.5: (3.8, 5.7), 10: (0.95, 1.4), 25: (0.39, 0.59)},
}


def even(num_ranks: int) -> Gathers:
    return Gathers([[width // num_ranks] * num_ranks for width in WIDTHS], 80, 8192, 2)


@pytest.mark.parametrize("rows", TABLE)
@pytest.mark.parametrize("gbit", GBE)
def test_gathers_of_llama_take_what_the_table_says(rows: int, gbit: float) -> None:
    for num_ranks, seconds in zip((2, 4), TABLE[rows][gbit], strict=True):
        assert even(num_ranks).seconds(rows, GBE[gbit]) == pytest.approx(seconds, rel=0.04, abs=0.0051)


def test_each_rank_sends_as_much_as_the_widest_to_all_others() -> None:
    gathers = Gathers([[3, 5], [10, 6]], 2, 4, 2)
    assert gathers.sent_bytes(7) == ((2 * 15 + 4) * 7 * 2, 2 * 15 * 7 * 2)
    two, four = even(2).sent_bytes(128), even(4).sent_bytes(128)
    assert two[1] == 80 * 128 * 2 * sum(WIDTHS) // 2 and four[3] == 3 * 80 * 128 * 2 * sum(WIDTHS) // 4
    assert two[0] - two[1] == 128 * 8192 * 2 and even(1).sent_bytes(128) == (0,)


def test_a_gather_waits_for_who_sends_most() -> None:
    network = Network(100.0, 0.5)
    assert Gathers([[3, 5]], 1, 0, 2).seconds(10, network) == pytest.approx(10 * 5 * 2 / 100 + 2 * 0.5)
    assert Gathers([[8, 1, 1]], 1, 0, 1).seconds(1, network) == pytest.approx(16 / 100 + 4 * 0.5)  # sent to two others
    assert Gathers([[8]], 1, 4, 2).seconds(10, network) == 0.0


def test_stages_hand_rows_on() -> None:
    hops, network = Hops(3, 8, 2), Network(1000.0, 0.25)
    assert hops.sent_bytes(5) == (80, 80, 40)  # a token of 8 bytes a row comes back
    assert hops.hop_s(5, network) == pytest.approx(0.08 + 0.25)
    assert hops.seconds(5, network) == pytest.approx(2 * 0.33 + 0.04 + 0.25)
    assert Hops(1, 8, 2).seconds(5, network) == 0.0 and Hops(1, 8, 2).sent_bytes(5) == (0,)
