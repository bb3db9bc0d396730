"""What transformers warns of while a model is opened: notes of ours, not lines on the stderr of somebody's program.

The command line has an ear of its own (`cli/libraries.py`). Invariant: other threads, and handlers of others, hear what
they would have heard.
"""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LIBRARY = "transformers"


@contextmanager
def warned(notes: list[str]) -> Iterator[None]:
    """Meanwhile what this thread has that library write to stderr goes to the notes instead, each message once."""
    thread, logger = threading.get_ident(), logging.getLogger(_LIBRARY)

    def is_for_others(record: logging.LogRecord) -> bool:
        if record.thread != thread:
            return True
        line = f"{_LIBRARY}: {' '.join(record.getMessage().split())}"
        if line not in notes:
            notes.append(line)
        return False

    handlers = [handler for handler in logger.handlers if _writes_to_stderr(handler)]
    for handler in handlers:
        handler.addFilter(is_for_others)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_for_others)


def _writes_to_stderr(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.__stderr__)
