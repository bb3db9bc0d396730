"""Callbacks while a decoder is loaded and runs: phases, bytes, layers."""

from collections.abc import Callable
from typing import NamedTuple

Progress = Callable[[int, int], None]  # called with bytes read and bytes in all
Counted = Callable[[int, int, str], None]  # called with the number done, the total, and of what


class Hooks(NamedTuple):
    """Callbacks; an exception raised in one ends the work."""

    on_phase: Callable[[str], None] = lambda phase: None  # called with the name of the next phase
    on_bytes: Progress = lambda done, total: None  # called for every slab that a phase has read
    on_count: Counted = lambda done, total, unit: None  # called for windows or rounds of a tune
    on_layer: Callable[[], None] = lambda: None  # called for every layer that a sweep has run
    # called with findings about weights when they are first read
    on_note: Callable[[str], None] = lambda line: None


NO_HOOKS = Hooks()
