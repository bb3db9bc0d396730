"""Decode with models that do not fit into memory: one sweep over the weights, many tokens.

import offload

with offload.load("path/to/target", "path/to/draft", ram="8GiB") as decoder:
    print(decoder.generate("def main():", max_new_tokens=64).text)

`load` gives a `Decoder`, whose `generate` returns a `Generation` and whose `stream` yields pieces
of text; a `Chat` is a conversation with it. `UserError`, one line, is raised for what the caller
can correct. `RunError` is raised for what fails during a run: `ReadError` for the disk, `RankError`
for another rank.
"""

import os
from typing import TYPE_CHECKING, Any

import offload.distributed  # noqa: F401  # which tells the engine how ranks load

if TYPE_CHECKING:
    from offload.engine.chat import Chat
    from offload.engine.decoder import Decoder
    from offload.engine.generation import Generation
    from offload.engine.load import load
    from offload.engine.request import Request
    from offload.errors import RankError, ReadError, RunError, UserError
    from offload.memory.plan import MemoryPlan
    from offload.sampling_options import Sampling

__all__ = ["Chat", "Decoder", "Generation", "MemoryPlan", "RankError", "ReadError", "Request", "RunError", "Sampling",
           "UserError", "load"]  # fmt: skip
__version__ = "0.1.0"

if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    # How often an OpenMP thread looks for work before it sleeps, ten times less than the default,
    # which keeps a core busy that others need. If it slept at once, small products would take
    # longer. The OpenMP library reads this when torch loads it.
    os.environ["GOMP_SPINCOUNT"] = "30000"
# oneDNN keeps code for each number of rows of a 16-bit product, up to 0.6 MB each, and torch keeps
# a second copy. Passes vary in their number of rows, so at the default of 1024 entries a process
# grows by hundreds of MB within hours. Generating one takes .4 to 2 ms, and a text of hundreds of
# passes needs some 130. Torch's own copies save no time that could be measured.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("LRU_CACHE_CAPACITY", "1")

_HOMES = {
    "Chat": "engine.chat",
    "Decoder": "engine.decoder",
    "Generation": "engine.generation",
    "MemoryPlan": "memory.plan",
    "RankError": "errors",
    "ReadError": "errors",
    "Request": "engine.request",
    "RunError": "errors",
    "Sampling": "sampling_options",
    "UserError": "errors",
    "load": "engine.load",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `offload --help` and `offload plan` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'offload' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"offload.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Return the commands that completion and `help` list, used already or not."""
    return [*__all__, "__version__"]
