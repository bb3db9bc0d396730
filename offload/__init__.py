"""Decode with models that do not fit into memory: one sweep over the weights, many tokens.

import offload

with offload.load("path/to/target", "path/to/draft", ram="8GiB") as decoder:
    print(decoder.generate("def main():", max_new_tokens=64).text)

`load` gives a `Decoder`, whose `generate` gives a `Generation` and whose `stream` gives pieces of
text; a `Chat` is a conversation with it. `UserError` is raised for what can be mended, in one line,
and `RunError` where something fails under way: a `ReadError` where that is the disk, a `RankError`
where it is another rank.
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
    # How often an OpenMP thread looks for work before it sleeps; its library reads this when torch
    # loads it. By default it looks ten times as often, on a core that others need; if it slept at
    # once, small products would take longer.
    os.environ["GOMP_SPINCOUNT"] = "30000"
# Of 16-bit products oneDNN keeps code for every number of rows, up to 0.6 MB each, and torch keeps
# it once more beside that. Passes have another number of rows each time, and at their default of
# 1024 a process grows by hundreds of MB within hours. To make one takes .4 to 2 ms, and a text of
# hundreds of passes makes some 130; torch's own copies save nothing that could be measured.
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
