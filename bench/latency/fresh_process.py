"""What `main-job` measures in a process of its own, which prints its figures as JSON; it imports nothing heavy."""

import json
import time

from offload.config import parse_size

PROMPT_TOKENS = 128


def report_memory(size: str) -> None:
    """Print the memory figures of this process as JSON."""
    import torch  # noqa: F401
    import transformers

    from offload.machine import peak_rss_bytes, rss_bytes

    lazy_bytes = rss_bytes()
    _ = transformers.modeling_utils.PreTrainedModel, transformers.AutoModelForCausalLM  # imported lazily: now for good
    imported_bytes = rss_bytes()
    from offload.cli.console import Console
    from offload.cli.demo import PROMPT, demo_options, inflated_target, open_demo

    ram_bytes = parse_size(size, "--size") // 4
    target = inflated_target(4 * ram_bytes, lambda *_: None)
    with open_demo(target, demo_options(ram_bytes, "64x16"), Console(is_quiet=True)) as decoder:
        ids = (decoder.encode(PROMPT, raw=True) * 4)[:PROMPT_TOKENS]
        decoder.generate(ids, max_new_tokens=64)
        planned_bytes = decoder.plan.total_bytes
    figures = {"ram_bytes": ram_bytes, "planned_bytes": planned_bytes, "imported_bytes": imported_bytes}
    figures |= {"grown_bytes": peak_rss_bytes() - imported_bytes, "lazily_imported_bytes": imported_bytes - lazy_bytes}
    print(json.dumps(figures))


def report_start(size: str) -> None:
    """Print the seconds from the end of the imports to the first computed layer."""
    import transformers.models.llama.modeling_llama

    from offload.cli.demo import PAIR, PROMPT, demo_options, inflated_target
    from offload.engine.load import open_decoder

    ram_bytes, times = parse_size(size, "--size") // 4, list[float]()
    target, started = inflated_target(4 * ram_bytes, lambda *_: None), time.perf_counter()
    options, note = demo_options(ram_bytes, "64x16"), lambda: times.append(time.perf_counter() - started)
    with open_decoder(target, PAIR / "draft", options, on_layer=note) as decoder:
        decoder.generate(PROMPT, max_new_tokens=1)
    print(json.dumps({"first_layer_s": times[0], "module": transformers.__name__}))
