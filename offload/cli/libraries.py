"""torch and transformers, imported without what no decoder needs of them.

Importing the libraries is most of a command's start, and half of that is torch's compiler and parts
for many machines, named in decorators and type checks of functions that are never called here. Only
the command line does this, whose process is its own.
"""

import gc
import importlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from offload.cli.console import Console
from offload.machine import has_cuda_driver

# Used where they are installed: by losses, by candidates of assisted generation, by pictures and by
# quantisers.
_UNUSED = ("scipy", "sklearn", "torchvision", "torchao")
# What a library says to those who write programs, and no user can mend. Tests take them for errors.
_DEPRECATIONS = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
_PHASE = "importing torch and transformers"
_COMPILER = "torch._dynamo"
# What every model class and every tokenizer of transformers imports, and any pass over a model
# without weights: its sympy counts as the program's own then, not as a run's.
_PARTS = (
    "offload.engine.load",
    "transformers.modeling_layers",
    "transformers.tokenization_utils_tokenizers",
    "torch.fx.experimental.symbolic_shapes",
)


@contextmanager
def libraries(
    console: Console, before_leaving: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Import torch and transformers while a line says so; show their warnings as lines.

    `before_leaving` is called where Ctrl-C ends the program meanwhile.
    """
    said = set[str]()

    def tell(origin: str, message: object) -> None:
        line = " ".join(f"{origin}: {message}".split())
        if line not in said:
            said.add(line)
            console.say(line)

    # for as long as the process lives; `-W` and PYTHONWARNINGS go before
    if "torch" not in sys.modules and not sys.warnoptions:
        for category in _DEPRECATIONS:
            warnings.simplefilter("ignore", category)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, category, *_, **__: tell(category.__name__, message)
        console.wait(_PHASE)
        if "torch" not in sys.modules:
            _import(before_leaving)
            # its own settings decide how much it logs
            handler = logging.Handler()
            handler.emit = lambda record: tell("transformers", record.getMessage())  # type: ignore[method-assign]
            logging.getLogger("transformers").handlers[:] = [handler]
        yield


class _NoCompiler(ModuleType):
    """Decorators of torch's compiler that leave functions alone; all else is the compiler's own."""

    def __getattr__(self, name: str) -> Any:
        if name in ("allow_in_graph", "assume_constant_result"):
            return lambda function: function
        if name == "disable":
            return lambda function=None, *_, **__: function or (lambda later: later)
        if name == "trace_rules":  # torch.distributed clears their cache, where it finds a compiler
            return SimpleNamespace(clear_lru_cache=lambda: None)
        if name.startswith("__"):  # what the machinery of imports asks every module for
            raise AttributeError(name)
        sys.modules.pop(_COMPILER, None)
        return getattr(importlib.import_module(_COMPILER), name)


def _import(before_leaving: Callable[[], None]) -> None:
    """Import quickly; Ctrl-C ends the program at once: much could swallow an exception."""
    before = signal.getsignal(signal.SIGINT)
    if before not in (signal.SIG_IGN, None):
        signal.signal(signal.SIGINT, lambda *_: _leave(before_leaving))
    # all that is made now stays: looking for waste takes a fifth of the time, and a second at the
    # end
    gc.disable()
    try:
        _import_parts()
    finally:
        gc.enable()
        gc.freeze()
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _import_parts() -> None:
    """Import torch and transformers while the modules that nothing here needs seem absent."""
    needs_triton = has_cuda_driver() or "TRITON_INTERPRET" in os.environ
    absent = [
        name
        for name in (*_UNUSED, *(() if needs_triton else ("triton",)))
        if name not in sys.modules
    ]
    sys.modules.update(dict.fromkeys(absent))  # None is what makes an import fail
    try:
        torch = importlib.import_module("torch")
        compiler = _NoCompiler(_COMPILER)
        # from where its own modules are taken
        compiler.__path__ = [os.path.join(torch.__path__[0], "_dynamo")]
        # and stays: any product on the meta device asks for it
        sys.modules.setdefault(_COMPILER, compiler)
        for name in _PARTS:
            importlib.import_module(name)
    finally:
        for name in absent:
            sys.modules.pop(name, None)


def _leave(before_leaving: Callable[[], None]) -> None:
    """End without a way back through code that would take Ctrl-C for an error of its own."""
    before_leaving()
    os.write(2, b"\r\x1b[Koffload: interrupted\n" if os.isatty(2) else b"offload: interrupted\n")
    os._exit(128 + signal.SIGINT)
