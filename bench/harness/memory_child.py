"""One decoder in a process of its own, and the memory of each phase of loading and each text.

Libraries are imported before anything is measured, those that transformers imports lazily included,
so the figures are what `--ram` is for. Peaks are the kernel's own (`VmHWM`), set back before every
phase.
"""

import ctypes
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from offload.bench.harness.process import call
from offload.machine import peak_rss_bytes, rss_bytes

# of a plan, beside slots
_POSTS = (
    *("runtime_bytes", "rest_bytes", "draft_bytes", "distribution_bytes"),
    *("kv_bytes", "activation_bytes", "resident_bytes"),
)
# texts differ by this many tokens in length, since code for products is kept by number of rows
_STEP = 7
# fields of C's `struct mallinfo2`
_ARENA = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class Order(NamedTuple):
    """What a child is to do; plain values only, it travels as JSON."""

    target: str
    draft: str
    options: dict[str, Any]  # of `LoadOptions`
    num_texts: int = 3  # one after another, or as many rounds of `parallel` at a time
    num_tokens: int = 32
    prompt_tokens: int = 128  # of the longest prompt
    temperature: float = 0.0

    def in_fresh_process(self) -> dict[str, Any]:
        """Return the phases in that file, with `peak_bytes` of all. Raises `RunError`."""
        measured: dict[str, Any] = call("offload.bench.harness.memory_child", self)
        return {**measured, "peak_bytes": max(phase["peak_bytes"] for phase in measured["phases"])}


class _FreeBlocks(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _ARENA.split()]


class _Meter:
    """Notes what this process takes in each phase, held without what C's allocator has free."""

    def __init__(self) -> None:
        self.imported_bytes = rss_bytes()
        self.phases = list[dict[str, Any]]()
        self._phase = ""
        self.next_phase("headers")
        self.phases.clear()

    def next_phase(self, phase: str) -> None:
        """Note what the phase that ends has taken, and begin another."""
        peak_bytes = peak_rss_bytes() - self.imported_bytes
        end_bytes = rss_bytes() - self.imported_bytes
        held_bytes = end_bytes
        library = ctypes.CDLL(None)
        if hasattr(library, "mallinfo2"):
            library.mallinfo2.restype = _FreeBlocks
            held_bytes -= int(library.mallinfo2().fordblks)
        ended = {"phase": self._phase, "peak_bytes": peak_bytes, "end_bytes": end_bytes}
        self.phases.append({**ended, "held_bytes": held_bytes})
        self._phase = phase
        # where the kernel refuses, a phase's peak includes earlier phases
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def _follow(order: Order) -> dict[str, Any]:
    """Load the models, write the texts, and return the memory of each phase."""
    from offload.checkpoint.open import open_headers
    from offload.checkpoint.packaged import PROMPT
    from offload.engine.hooks import Hooks
    from offload.engine.load import open_decoder
    from offload.planning.load_options import LoadOptions

    _import_model_class(open_headers(order.target).config["model_type"])
    meter = _Meter()
    options = LoadOptions(order.target, order.draft, profile="none", device="cpu", **order.options)
    hooks = Hooks(on_phase=meter.next_phase)
    text_options: Any = {"max_new_tokens": order.num_tokens, "temperature": order.temperature}
    with open_decoder(options, hooks=hooks) as decoder:
        ids = decoder.encode(PROMPT * 20, raw=True)[: order.prompt_tokens]
        plan = decoder.plan
        for text in range(order.num_texts):
            meter.next_phase(f"text {text + 1}")
            # ends of one prompt, so that no two of a round begin alike
            starts = [(text + n) * _STEP % max(1, len(ids) // 2) for n in range(plan.parallel)]
            decoder.generate([ids[start:] for start in starts], seed=text, **text_options)
        meter.next_phase("end")
    slots_bytes = plan.total_bytes - plan.fixed_bytes - plan.resident_bytes
    return {
        "imported_bytes": meter.imported_bytes,
        "ram_bytes": plan.ram_bytes,
        "planned_bytes": plan.total_bytes,
        "posts": {**{name: getattr(plan, name) for name in _POSTS}, "slots_bytes": slots_bytes},
        "phases": meter.phases,
    }


def _import_model_class(model_type: str) -> None:
    """Import the module of a model's class, which transformers does when it is first asked for."""
    import transformers

    assert transformers.AutoModelForCausalLM, "imported by its name"
    config_class = transformers.CONFIG_MAPPING[model_type]
    assert transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config_class], "imported by its config"


if __name__ == "__main__":
    print(json.dumps(_follow(Order(*json.loads(sys.argv[1])))))
