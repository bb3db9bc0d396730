"""Predictions beside measurements: the paper's offloading on an L40 (2402.12374, Table 5), and this machine's decoding.

The first needs data sheets only. The paper's rows are given their tokens per step, so that seconds alone are compared,
and are predicted twice: all layers crossing the link, one thing after the other, which is what the paper's own figures
add up to, and as this program would run, with as many layers resident as fit and everything overlapped. The second
measures the curves on this machine, as `offload tune` does, predicts, decodes other text, and compares; the link is
measured anew before every run, because disks drift. No speed is printed for a token that was not proved right.

    python -m offload.bench.prediction                both; two or three minutes on two cores
    python -m offload.bench.prediction --paper        the first alone, a second
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer

from offload.costs import Costs, Traffic, step_time
from offload.device_plan import Card, make_device_plan
from offload.hardware import KNOWN
from offload.headers import checkpoint_of_config
from offload.model_shape import ModelShape, model_shape
from offload.predict import costs_on, traffic_on
from offload.topology import DEFAULT_ACCEPTANCE, Topology, best_first, chain

Row = dict[str, Any]
_LLAMA_2_70B = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
                "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 32000,
                "max_position_embeddings": 4096, "torch_dtype": "float16"}  # fmt: skip
_LLAMA_2_7B = {**_LLAMA_2_70B, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
               "num_key_value_heads": 32, "intermediate_size": 11008}  # fmt: skip
_CONTEXT = 256  # 128 prompt tokens and as many new ones, as in the paper
PAPER_BASE_S = 5.6  # the paper's own system, one token per sweep
TREE, PLAIN_TOKENS, TREE_TOKENS, NUM_PROMPTS = "64x16", 8, 72, 4


class PaperRow(NamedTuple):
    """One row of Table 5."""

    text: str
    temperature: float
    num_nodes: int
    depth: int
    tokens_per_step: float
    s_per_token: float


TABLE_5 = (
    PaperRow("C4", 0.0, 768, 22, 12.18, 0.56),
    PaperRow("C4", 0.6, 768, 23, 10.12, 0.69),
    PaperRow("OpenWebText", 0.0, 768, 18, 9.83, 0.69),
    PaperRow("OpenWebText", 0.6, 768, 19, 9.05, 0.76),
    PaperRow("CNN Daily", 0.0, 768, 17, 10.46, 0.64),
    PaperRow("CNN Daily", 0.6, 768, 18, 9.58, 0.70),
)


class Predicted(NamedTuple):
    """Seconds per token on an L40."""

    in_turn: float  # all layers streamed, nothing overlapped
    overlapped: float  # all layers streamed while computing, as here but for resident layers and reading ahead
    here: float  # as this program plans and runs


def predict_l40(topology: Topology, tokens_per_step: float) -> Predicted:
    """A Llama-2-70B with a 7B draft on the known L40, at the paper's length of text."""
    card, (target, draft) = KNOWN["l40"], _shapes()
    costs, is_drafted = costs_on(card, target, draft, _CONTEXT), topology.depth > 0
    budgets = Card(card.gpu_bytes, card.ram_bytes)
    plan = make_device_plan(
        target, draft if is_drafted else None, budgets, context=_CONTEXT, num_nodes=topology.num_nodes
    )
    streamed = step_time(costs, Traffic(sum(target.layer_bytes), 0), topology)
    in_turn_s = streamed.draft_s + streamed.link_s + streamed.compute_s + streamed.verify_s
    here_s = step_time(costs, traffic_on(card, plan), topology).total_s
    return Predicted(*(step_s / tokens_per_step for step_s in (in_turn_s, streamed.total_s, here_s)))


def paper_rows() -> list[Row]:
    """The baseline and Table 5, measured by the paper and predicted."""
    base = predict_l40(chain(0), 1.0)
    rows: list[Row] = [{"row": "no tree", "tokens_per_step": 1.0, "paper_s": PAPER_BASE_S, **base._asdict()}]
    for paper in TABLE_5:
        topology = best_first(DEFAULT_ACCEPTANCE, paper.num_nodes, paper.depth)
        name = f"{paper.text}, T = {paper.temperature:g}, {paper.num_nodes}x{paper.depth}"
        figures = {"tokens_per_step": paper.tokens_per_step, "paper_s": paper.s_per_token}
        rows.append({"row": name, **figures, **predict_l40(topology, paper.tokens_per_step)._asdict()})
    return rows


def machine_rows(size: str) -> list[Row]:
    """Decoding without a tree and with one on this machine, as predicted from measured curves and as it was."""
    from offload.bench.main_job import _SILENT, _proved_gaps, _shards, _target, held_out_prompts
    from offload.calibrate import link_bytes_per_s
    from offload.config import Sampling, parse_size
    from offload.demo import PROMPT, open_demo
    from offload.meter import measure_costs

    target, found = _target(size), {"none": _Runs(), TREE: _Runs()}
    with open_demo(target, parse_size(size, "--size") // 4, TREE, _SILENT) as decoder:
        costs = measure_costs(decoder, decoder.encode(PROMPT, raw=True)[:64], Sampling())
        for text in held_out_prompts(NUM_PROMPTS):
            ids = decoder.encode(text, raw=True)[:128]
            for tree, runs in found.items():
                link = link_bytes_per_s(_shards(target)[0])
                num_tokens = PLAIN_TOKENS if tree == "none" else TREE_TOKENS
                result = decoder.generate(ids, max_new_tokens=num_tokens, tree=tree)
                _proved_gaps(ids, result.token_ids)
                runs.add(link, result.stats.tpot_s, result.stats.tokens_per_sweep)
        traffic = Traffic.of(decoder.plan)
    topologies = {"none": chain(0), TREE: best_first(DEFAULT_ACCEPTANCE, 64, 16)}
    return [runs.row(tree, costs, traffic, topologies[tree]) for tree, runs in found.items()]


class _Runs:
    """Runs with one tree, and the link just before each."""

    def __init__(self) -> None:
        self.links: list[float] = []
        self.tpots: list[float] = []
        self.yields: list[float] = []

    def add(self, link: float, tpot_s: float, tokens_per_sweep: float) -> None:
        self.links.append(link)
        self.tpots.append(tpot_s)
        self.yields.append(tokens_per_sweep)

    def row(self, name: str, costs: Costs, traffic: Traffic, topology: Topology) -> Row:
        from dataclasses import replace

        predicted = []
        for link, tokens in zip(self.links, self.yields, strict=True):
            predicted.append(step_time(replace(costs, link_bytes_per_s=link), traffic, topology).total_s / tokens)
        ratios = [guess / seen for guess, seen in zip(predicted, self.tpots, strict=True)]
        return {
            "row": name,
            "tokens_per_step": sum(self.yields) / len(self.yields),
            "measured_s_per_token": median(self.tpots),
            "predicted_s_per_token": median(predicted),
            "predicted_over_measured": median(ratios),
            "ratios": ratios,
            "link_bytes_per_s": self.links,
        }


def _shapes() -> tuple[ModelShape, ModelShape]:
    configs = (_LLAMA_2_70B, _LLAMA_2_7B)
    target, draft = (model_shape(checkpoint_of_config(config, Path("config.json"))) for config in configs)
    return target, draft


def _print_paper(rows: Sequence[Row]) -> None:
    print(f"{'L40, Llama-2-70B with 7B':<30} {'tokens':>7} {'paper':>7} {'in turn':>14} {'overlapped':>14} {'here':>7}")
    for row in rows:
        others = (f"{row[key]:.3f} ({row[key] / row['paper_s'] - 1:+.1%})" for key in ("in_turn", "overlapped"))
        print(f"{row['row']:<30} {row['tokens_per_step']:>7.2f} {row['paper_s']:>7.2f} " +
              " ".join(f"{text:>14}" for text in others) + f" {row['here']:>7.3f}")  # fmt: skip


def _print_machine(rows: Sequence[Row]) -> None:
    print(f"{'this machine':<12} {'tokens/sweep':>12} {'measured s':>11} {'predicted s':>12} {'ratio':>6}")
    for row in rows:
        seconds = f"{row['measured_s_per_token']:>11.3f} {row['predicted_s_per_token']:>12.3f}"
        print(f"{row['row']:<12} {row['tokens_per_step']:>12.2f} {seconds} {row['predicted_over_measured']:>6.3f}")


def main(
    size: Annotated[str, typer.Option(metavar="SIZE", help="of the inflated target")] = "1GB",
    paper: Annotated[bool, typer.Option("--paper", help="the paper's table alone")] = False,
) -> None:
    """Predicted and measured seconds per token, side by side."""
    figures = {"paper": paper_rows(), "machine": [] if paper else machine_rows(size)}
    _print_paper(figures["paper"])
    if figures["machine"]:
        _print_machine(figures["machine"])
    print(json.dumps(figures))


if __name__ == "__main__":
    from offload.bench.suite import run_alone

    run_alone("prediction")
