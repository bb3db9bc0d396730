"""Predictions beside measurements: the paper's offloading on an L40 (2402.12374, Table 5), and this machine's decoding.

The first needs data sheets only. The paper's rows are given their tokens per step, so that seconds alone are compared,
and are predicted twice: all layers crossing the link, one thing after the other, which is what the paper's own figures
add up to, and as this program would run, with as many layers resident as fit and everything overlapped. The second
measures the curves on this machine, as `offload tune` does, predicts, decodes other text, and compares; the link is
measured before and after every run, because disks drift. No speed is printed for a token that was not proved right.

    offload bench prediction              both; two or three minutes on two cores
    offload bench prediction --paper      the first alone, a second
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any, NamedTuple

import typer

from offload.bench import setting as common
from offload.bench.gate import Written
from offload.bench.prompts import Prompt, encoded, prompts
from offload.bench.record import Guard, new_result
from offload.bench.setting import PROMPT_TOKENS, Setting
from offload.bench.text_table import aligned
from offload.calibration.link import link_bytes_per_s
from offload.checkpoint.hub import checkpoint_of_config
from offload.checkpoint.sizes import ModelShape, model_shape
from offload.cli.console import Console
from offload.config import Sampling
from offload.errors import UserError
from offload.memory.planner import Budgets, make_plan
from offload.planning.cost_model import Traffic, costs_on, step_time, traffic_on
from offload.planning.hardware import KNOWN
from offload.stats import Stats
from offload.tree.spec import parse_tree
from offload.tree.topology import DEFAULT_ACCEPTANCE, Topology, best_first, chain
from offload.tuning.time_steps import measure_costs

Row = dict[str, Any]
_LLAMA_2_70B = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
                "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 32000,
                "max_position_embeddings": 4096, "torch_dtype": "float16"}  # fmt: skip
_LLAMA_2_7B = {**_LLAMA_2_70B, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
               "num_key_value_heads": 32, "intermediate_size": 11008}  # fmt: skip
_CONTEXT = 256  # 128 prompt tokens and as many new ones, as in the paper
PAPER_BASE_S = 5.6  # the paper's own system, one token per sweep
TREES = ("none", "64x16", "128x20")
PLAIN_TOKENS, TREE_TOKENS, NUM_PROMPTS = 8, 48, 4
_LINK_S = 0.5  # of one look at the link


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
    budgets = Budgets(card.ram_bytes, card.gpu_bytes)
    plan = make_plan(target, draft if is_drafted else None, budgets, context=_CONTEXT, num_nodes=topology.num_nodes)
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


class Runs:
    """Runs with one tree, each with what was predicted for it."""

    def __init__(self, tree: str) -> None:
        shape = parse_tree(tree).build()
        assert isinstance(shape, Topology), "curves are of fixed trees"
        self.tree, self.topology = tree, shape
        self.links, self.predicted, self.measured = list[float](), list[float](), list[float]()
        self._num_tokens = self._num_sweeps = 0

    def add(self, predicted_step_s: float, link: float, stats: Stats) -> None:
        """One run; a text that ended in its first burst has no step to compare."""
        num_tokens = sum(stats.accepted_per_sweep)
        if not num_tokens:
            return
        self.links.append(link)
        self.predicted.append(predicted_step_s * stats.num_sweeps / num_tokens)
        self.measured.append(stats.decode_s / num_tokens)  # whole bursts: what is cut off at the end was paid for
        self._num_tokens, self._num_sweeps = self._num_tokens + num_tokens, self._num_sweeps + stats.num_sweeps

    def row(self) -> Row:
        """Medians over the runs."""
        if not self.measured:
            raise UserError(f"every text ended within its first burst with --tree {self.tree}: give other --prompts")
        ratios = [guess / seen for guess, seen in zip(self.predicted, self.measured, strict=True)]
        return {
            "row": self.tree,
            "tokens_per_step": self._num_tokens / self._num_sweeps,
            "measured_s_per_token": median(self.measured),
            "predicted_s_per_token": median(self.predicted),
            "predicted_over_measured": median(ratios),
            "ratios": ratios,
            "link_bytes_per_s": self.links,
        }


def machine_runs(setting: Setting, found: Sequence[Prompt], screen: Console) -> tuple[list[Runs], list[Written]]:
    """Decoding without a tree and with ever larger ones on this machine, predicted and as it was; unproved.

    Every run is predicted from the curves measured at first and the link measured just before and just after it.
    """
    runs, written = [Runs(tree) for tree in TREES], list[Written]()
    with setting.open(TREES[-1]) as decoder:
        first_ids, told = encoded(decoder, found[0], PROMPT_TOKENS), partial(screen.count, label="measuring the curves")
        costs = measure_costs(decoder, first_ids, Sampling(), told)
        traffic, links = Traffic.of(decoder.plan), [link_bytes_per_s(setting.shards[0], budget_s=_LINK_S)]
        for prompt in found:
            ids = encoded(decoder, prompt, PROMPT_TOKENS)
            for one in runs:
                num_tokens = PLAIN_TOKENS if one.tree == "none" else TREE_TOKENS
                result = decoder.generate(ids, max_new_tokens=num_tokens, tree=one.tree)
                links.append(link_bytes_per_s(setting.shards[0], budget_s=_LINK_S))
                now = replace(costs, link_bytes_per_s=mean(links[-2:]))
                one.add(step_time(now, traffic, one.topology).total_s, now.link_bytes_per_s, result.stats)
                written.append(Written(ids, result.token_ids, result.sampling, result.rule))
                screen.count(len(written), len(found) * len(runs), "decoding")
    return runs, written


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
    cells = [
        [row["row"], f"{row['tokens_per_step']:.2f}", f"{row['measured_s_per_token']:.3f}",
         f"{row['predicted_s_per_token']:.3f}", f"{row['predicted_over_measured']:.3f}"] for row in rows
    ]  # fmt: skip
    print(aligned([["this machine", "tokens/sweep", "measured s", "predicted s", "ratio"], *cells]))


app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(
    epilog="""Examples:

    offload bench prediction --paper

    offload bench prediction --size 1GB --json now.json"""
)
def main(
    model: common.Model = None,
    draft: common.Draft = None,
    size: common.Size = "1GB",
    ram: common.Ram = None,
    source: common.Prompts = None,
    paper: Annotated[bool, typer.Option("--paper", help="the paper's table alone")] = False,
    json_file: common.Json = None,
    compare: common.Compare = None,
) -> None:
    """Does the plan keep its word? Predicted and measured seconds per token; two to three minutes on two cores."""
    rows = paper_rows()
    if paper and (json_file or compare):
        raise UserError("--paper measures nothing: leave out --json and --compare")
    if paper:
        _print_paper(rows)
        print(json.dumps({"bench": "prediction", "rows": rows}))
        return
    old = common.earlier("prediction", compare)
    with Console(is_quiet=False) as screen:
        setting = common.find_setting(model, draft, size, ram, screen)
        if setting.draft is None:
            raise UserError("bench prediction compares trees, which a draft fills: give --draft")
        found = prompts(source or ["code"], NUM_PROMPTS)
        names = [prompt.name for prompt in found]
        common.check_same(old, setting, prompts=names)
        ceiling = common.say_link(setting.shards)
        runs, written = machine_runs(setting, found, screen)
    proof = setting.prove(written)
    here = [one.row() for one in runs]
    _print_paper(rows)
    _print_machine(here)
    print(common.proof_line(proof))
    result = new_result(
        "prediction",
        settings=setting.as_dict() | {"proof": proof._asdict(), "prompts": names},
        ceiling={"bytes_per_s": ceiling},
        rows=rows + here,
        guards={f"prediction, {row['row']}": Guard([abs(one - 1) for one in row["ratios"]], "lower") for row in here},
    )
    common.finish(result, json_file, old)


if __name__ == "__main__":
    from offload.bench.suite import run_alone

    run_alone("prediction")
