"""Dynamic trees against static ones of the same size: tokens per sweep, drafting time; packaged pair, resident.

Nothing streams, so what is compared is what a sweep yields and what the draft takes for it. Trees take turns prompt by
prompt. Every token is proved to be the original model's float32 draw, up to bf16 rounding.

    offload bench grown --tree 64x16 --tree 128x20 --temp 0 --temp 0.6
"""

from typing import Annotated, Any

import numpy as np
import typer
from transformers.utils import logging

from offload.bench import setting as common
from offload.bench.draft import say_draft_ceiling
from offload.bench.gate import draws_hold
from offload.bench.main_job import PROMPT_TOKENS, held_out_prompts
from offload.bench.record import new_result
from offload.bench.tree_walk import Steps, ratio_of
from offload.cli.demo import PAIR
from offload.config import Sampling, require
from offload.engine.decoder import Decoder
from offload.engine.generation import Generation
from offload.engine.load import load
from offload.tree.spec import parse_tree
from offload.tuning.audit import draw_gaps

Row = dict[str, Any]


def compare(decoder: Decoder, size: str, temperature: float, prompts: list[list[int]], num_tokens: int) -> Row:
    """One size at one temperature; prompt b has seed b."""
    runs: dict[str, list[Generation]] = {size: [], f"grown:{size}": []}
    for seed, prompt in enumerate(prompts):
        sampling = Sampling(temperature=temperature, seed=seed)
        for tree, results in runs.items():
            run = decoder.run(prompt, sampling, max_new_tokens=num_tokens, tree=tree)
            list(run)
            results.append(run.result())
            draws_hold(draw_gaps(PAIR / "target", prompt, results[-1].token_ids, sampling), sampling)
    fixed, grown = (_steps(results) for results in runs.values())
    ratio, error = ratio_of(grown, fixed)
    return {
        "size": size,
        "temperature": temperature,
        "ratio": ratio,
        "standard_error": error,
        "fixed": {**fixed.as_dict(), "draft_s": _draft_s(runs[size])},
        "grown": {**grown.as_dict(), "draft_s": _draft_s(runs[f"grown:{size}"])},
    }


def _steps(results: list[Generation]) -> Steps:
    counts = [(sum(run.stats.accepted_per_sweep), run.stats.num_sweeps) for run in results]
    return Steps(*np.array(counts, dtype=np.float64).T)


def _draft_s(results: list[Generation]) -> float:
    """Per step; a text that ends in its first burst has none."""
    return sum(run.stats.draft_s for run in results) / max(1, sum(run.stats.num_sweeps for run in results))


def main(
    tree: Annotated[
        list[str] | None, typer.Option(metavar="NxD", help="several; default: 64x16, 128x20 and 256x24")
    ] = None,
    temp: Annotated[list[float] | None, typer.Option(metavar="T", help="several; default: 0, 0.6 and 1")] = None,
    num_prompts: Annotated[int, typer.Option(metavar="N", min=1, help="held-out files to begin from")] = 16,
    max_tokens: Annotated[
        int, typer.Option("-n", "--max-tokens", metavar="N", min=2, help="new ones after each prompt")
    ] = 96,
    json_file: common.Json = None,
) -> None:
    """How much more does a sweep yield when the draft's scores shape each tree?"""
    logging.disable_progress_bar()
    sizes, rows = tree or ["64x16", "128x20", "256x24"], []
    for text in sizes:
        require(parse_tree(text).kind == "best", "--tree must be NxD", repr(text), "try --tree 64x16")
    rate, floor_s = say_draft_ceiling(PAIR / "draft")
    largest = max(sizes, key=lambda text: parse_tree(text).num_nodes)
    how: dict[str, Any] = {"device": "cpu", "context": 512, "threads": 1, "profile": "none"}
    with load(PAIR / "target", PAIR / "draft", "2GiB", largest, **how) as decoder:
        ids = [decoder.encode(text, raw=True)[:PROMPT_TOKENS] for text in held_out_prompts(num_prompts)]
        for temperature in temp or [0.0, 0.6, 1.0]:
            for one in sizes:
                rows.append(compare(decoder, one, temperature, ids, max_tokens))
                print(_line(rows[-1]), flush=True)
    settings = {"num_prompts": num_prompts, "num_prompt_tokens": PROMPT_TOKENS, "num_new_tokens": max_tokens}
    ceiling = {"bytes_per_s": rate, "draft_step_s": floor_s}
    common.finish(new_result("grown", settings=settings, ceiling=ceiling, rows=rows, guards={}), json_file, None)


def _line(row: Row) -> str:
    kinds = (
        f"{kind} {row[kind]['tokens_per_step']:5.2f} tokens, drafted in {1e3 * row[kind]['draft_s']:.1f} ms"
        for kind in ("fixed", "grown")
    )
    gain = f"ratio {row['ratio']:.3f} +- {row['standard_error']:.3f}"
    return f"T = {row['temperature']} {row['size']:>7}: {'; '.join(kinds)}; {gain}"


if __name__ == "__main__":
    from offload.bench.suite import run_alone

    run_alone("grown")
