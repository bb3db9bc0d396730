"""The front door: `offload.load`, from a path to a decoder.

`resolve` decides what headers can decide; `opening` carries it out, and decides what needs
measuring. Warnings of transformers while a model is opened become notes, not lines on the stderr of
the program that loads it; the command line collects warnings itself (`cli/libraries.py`).
Invariant: other threads, and other handlers, still get theirs.
"""

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

from offload.checkpoint.open import ReadHeaders
from offload.declaration import as_in, called_with
from offload.engine.decoder import Decoder
from offload.engine.draft_choice import settle_draft
from offload.engine.hooks import NO_HOOKS, Hooks, Progress
from offload.engine.opening import open_setup
from offload.engine.request import Request, require_request
from offload.engine.resolve import resolve
from offload.errors import require
from offload.model.library import version_notes
from offload.options import ModelChoice, ModelOptions
from offload.planning.load_options import LoadOptions
from offload.rules import check_lenience
from offload.streaming.device import Device
from offload.streaming.disk import DiskReader, OpenSource

_LIBRARY = "transformers"


@contextmanager
def warned(notes: list[str]) -> Iterator[None]:
    """Collect in `notes`, each once, what transformers would log to stderr from this thread."""
    from transformers.utils.logging import get_logger  # the first call gives the logger its handler

    thread = threading.get_ident()
    logger = get_logger(_LIBRARY)

    def is_for_others(record: logging.LogRecord) -> bool:
        if record.thread != thread:
            return True
        line = f"{_LIBRARY}: {' '.join(record.getMessage().split())}"
        if line not in notes:
            notes.append(line)
        return False

    places = (sys.stderr, sys.__stderr__)
    streams = [handler for handler in logger.handlers if isinstance(handler, logging.StreamHandler)]
    handlers = [handler for handler in streams if handler.stream in places]
    for handler in handlers:
        handler.addFilter(is_for_others)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_for_others)


@dataclass(frozen=True)
class LoadArguments(ModelOptions, ModelChoice):
    """Arguments of `load`: those of `LoadOptions`, unchecked, and those that only programs give."""

    _: KW_ONLY
    device: str | Device = as_in(ModelOptions, "device")  # type: ignore[assignment]
    request: Request | None = None
    open_source: OpenSource = DiskReader
    on_bytes: Progress = lambda done, total: None
    on_layer: Callable[[], None] = lambda: None


@called_with(LoadArguments)
def load(given: LoadArguments) -> Decoder:
    """Open a model that need not fit into memory.

    Args:
        {arguments}
        request: the first run, refused here if it cannot be served; the tree is chosen for its
            sampling.
        open_source: opens weight files.
        on_bytes: called with (bytes, bytes in all) as they arrive, from 0 in each phase: draft,
            embeddings and head; layers that stay; experts.
        on_layer: called for every layer that a sweep has run; an exception from it ends the run,
            and the next may begin.

    `device` may be an open device. `ranks` are the processes that torchrun has started: on rank 0
    this returns; any other serves until that decoder is closed, then raises `SystemExit`.
    docs/flags.md explains each option.

    Raises:
        UserError: anything that the user can correct, in one line.
    """
    device = given.device
    is_device = isinstance(device, str) or hasattr(device, "torch_device")
    requirement = "`device` must be auto, cpu, cuda, cuda:N or an open one"
    require(is_device, requirement, repr(device), 'try `device="auto"`')
    if given.request is not None:
        require_request(given.request)
    for name in ("open_source", "on_bytes", "on_layer"):
        value = getattr(given, name)
        require(callable(value), f"`{name}` must be callable", f"{value!r:.80}", "leave it out")
    opened = None if isinstance(device, str) else device
    kind = "cpu" if opened is None or not opened.has_own_memory else "cuda"
    options = LoadOptions.from_options(given, device=device if opened is None else kind)
    hooks = Hooks(on_bytes=given.on_bytes, on_layer=given.on_layer)
    notes = list[str]()
    with warned(notes):
        decoder = open_decoder(
            options,
            given.request,
            device=opened,
            open_source=given.open_source,
            hooks=hooks,
        )
    decoder.notes.extend(notes)
    return decoder


def open_decoder(
    options: LoadOptions,
    request: Request | None = None,
    *,
    device: Device | None = None,
    read: ReadHeaders | None = None,
    open_source: OpenSource = DiskReader,
    hooks: Hooks = NO_HOOKS,
    transport: Any = None,
) -> Decoder:
    """Do what `load` does, with a record of options; warnings are left to the caller.

    `device` is open, `read` is `resolve`'s, `transport` connects to the other ranks. Raises what
    `load` raises.
    """
    if request is not None:
        check_lenience(options.lenience, options.rule, request.sampling)
    context: Any = {"device": device, "open_source": open_source}
    setup = resolve(options, read=read, hooks=hooks, **context)
    if options.has_open_draft:
        setup = settle_draft(setup, request, partial(resolve, **context))
    decoder = open_setup(setup, request, transport)
    decoder.notes.extend(version_notes())
    return decoder
