"""What a caller hears of while a decoder is loaded and runs: phases, bytes, layers."""

from collections.abc import Callable
from typing import NamedTuple

Progress = Callable[[int, int], None]  # bytes landed, bytes in all
Counted = Callable[[int, int, str], None]  # how many are done, how many there are, of what


class Hooks(NamedTuple):
    """What to call; whatever is raised there ends the work."""

    on_phase: Callable[[str], None] = lambda phase: None  # with what is about to be done
    on_bytes: Progress = lambda done, total: None  # for every slab that a phase has read
    on_count: Counted = lambda done, total, unit: None  # for windows or rounds of a tune
    on_layer: Callable[[], None] = lambda: None  # for every layer that a sweep has run
    # for what weights show when they are first seen
    on_note: Callable[[str], None] = lambda line: None


NO_HOOKS = Hooks()
