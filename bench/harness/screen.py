"""The line at the bottom of a terminal that says what is under way; elsewhere nothing is shown."""

import shutil
import sys
import time

_LEAST_S = 0.1  # between two states of the line


class Screen:
    """One live line on standard error. Nothing is shown when `is_quiet`."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_shown = not is_quiet and sys.stderr.isatty()
        self._next_s = 0.0

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def wait(self, label: str) -> None:
        if self._is_shown:
            sys.stderr.write(f"\r\x1b[K{label[: shutil.get_terminal_size().columns - 1]}")
            sys.stderr.flush()

    def count(self, done: float, total: float, label: str) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LEAST_S
            self.wait(f"{label}: {done:.0f} of {total:.0f}")

    def bytes_landed(self, done_bytes: int, total_bytes: int, label: str = "reading") -> None:
        self.count(done_bytes / 1e6, total_bytes / 1e6, f"{label}, MB")

    def clear(self) -> None:
        self.wait("")
