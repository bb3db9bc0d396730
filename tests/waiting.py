"""Waiting for what comes true by itself; from above it is bounded by what would hang."""

import time
from collections.abc import Callable

PATIENCE_S = 60.0


def until(holds: Callable[[], bool]) -> None:
    """Return once it holds."""
    begun_s = time.monotonic()
    while not holds():
        assert time.monotonic() - begun_s < PATIENCE_S, "it never came true"
        time.sleep(0.002)
