"""Signals that are held back all come, in their order."""

import signal
from collections.abc import Iterator

import pytest

from offload.interrupts import held_back


@pytest.fixture
def terminations() -> Iterator[list[int]]:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    yield came
    signal.signal(signal.SIGTERM, before)


def test_a_signal_comes_although_one_before_it_raises(terminations: list[int]) -> None:
    """The mistake that was: Ctrl-C while a file was written took a supervisor's SIGTERM along."""
    with pytest.raises(KeyboardInterrupt), held_back(signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert not terminations
    assert terminations == [signal.SIGTERM]
