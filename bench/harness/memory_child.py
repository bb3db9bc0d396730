"""One decoder in a process of its own, and the memory of each phase of loading and each text.

Libraries are imported before anything is measured, those that transformers imports lazily for the
target included, so the figures are what `--ram` is for.

Invariant: peaks are the kernel's own (`VmHWM`), set back before every phase.
"""

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from offload.machine import peak_rss_bytes, rss_bytes

POSTS = ("runtime_bytes", "rest_bytes", "draft_bytes", "distribution_bytes", "kv_bytes", "activation_bytes",
         "resident_bytes", "slots_bytes")  # fmt: skip
# texts differ by so many tokens in length, since code for products is kept by number of rows
_STEP = 7


class Order(NamedTuple):
    """What a child is to do; plain values only, it travels as JSON."""

    target: str
    draft: str
    # fields of `LoadOptions`
    options: dict[str, Any]
    num_texts: int = 3  # one after another, or as many rounds of `parallel` at a time
    num_tokens: int = 32
    # length of the longest prompt
    prompt_tokens: int = 128
    temperature: float = 0.0


class Taken(NamedTuple):
    """What the process takes in one phase, beyond its libraries."""

    phase: str
    peak_bytes: int
    end_bytes: int
    # memory at the phase's end, without what C's allocator has free
    held_bytes: int


class _FreeBlocks(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class Meter:
    """Notes the memory of this process's phases."""

    def __init__(self) -> None:
        self.imported_bytes = rss_bytes()
        self.found = list[Taken]()
        self._phase = "headers"
        _set_back_peak()

    def begin(self, phase: str) -> None:
        """Begin a phase; the one before it is over."""
        taken = (
            one - self.imported_bytes
            for one in (peak_rss_bytes(), rss_bytes(), rss_bytes() - _free_bytes())
        )
        self.found.append(Taken(self._phase, *taken))
        self._phase = phase
        _set_back_peak()


def run_child(
    order: Order,
    python: Sequence[str] = (sys.executable, "-m", "offload.bench.harness.memory_child"),
) -> Any:
    """Return what `follow` found, in a fresh process."""
    done = subprocess.run(
        [*python, json.dumps(order._asdict())], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def follow(order: Order, on_text: Callable[[Any], None] = lambda decoder: None) -> dict[str, Any]:
    """Follow the order in this process; `on_text` is called behind every text, with the decoder."""
    _import_libraries(Path(order.target))
    from offload.cli.demo import PROMPT
    from offload.engine.hooks import Hooks
    from offload.engine.load import open_decoder
    from offload.planning.options import LoadOptions

    meter = Meter()
    options = LoadOptions(profile="none", device="cpu", **order.options)
    with open_decoder(
        order.target, order.draft, options, hooks=Hooks(on_phase=meter.begin)
    ) as decoder:
        ids = decoder.encode(PROMPT * 20, raw=True)[: order.prompt_tokens]
        plan = decoder.plan
        for text in range(order.num_texts):
            meter.begin(f"text {text + 1}")
            firsts = [
                (text + other) * _STEP % max(1, len(ids) // 2) for other in range(plan.parallel)
            ]
            prompts = [ids[first:] for first in firsts]
            decoder.generate(
                prompts, max_new_tokens=order.num_tokens, temperature=order.temperature, seed=text
            )
            on_text(decoder)
        meter.begin("end")
    slots = plan.num_slots * plan.slot_bytes + plan.num_expert_slots * plan.expert_slot_bytes
    posts = {name: slots if name == "slots_bytes" else getattr(plan, name) for name in POSTS}
    planned = {"ram_bytes": plan.ram_bytes, "planned_bytes": plan.total_bytes, "posts": posts}
    return {
        "imported_bytes": meter.imported_bytes,
        **planned,
        "phases": [one._asdict() for one in meter.found],
    }


def _import_libraries(target: Path) -> None:
    import torch
    import transformers

    import offload.engine.load
    from offload.checkpoint.hub import open_headers

    config = open_headers(target).config
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    _ = transformers.AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    assert torch.get_num_threads() and offload.engine.load, "imported"


def _free_bytes() -> int:
    """Return what C's allocator keeps of freed memory, where it tells."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = _FreeBlocks
    return int(library.mallinfo2().fordblks)


def _set_back_peak() -> None:
    """Set the peak back; where the kernel refuses, a phase's peak includes earlier phases."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    print(json.dumps(follow(Order(**json.loads(sys.argv[1])))))
