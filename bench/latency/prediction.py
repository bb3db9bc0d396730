"""The plan beside the paper's offloading on an L40 (2402.12374, Table 5); a second, from data sheets alone.

The paper's rows are given their tokens per step, so that seconds alone are compared, and are predicted twice: all
layers crossing the link, one thing after the other, which is what the paper's own figures add up to, and as this
program would run, with as many layers resident as fit and everything overlapped.
"""

from pathlib import Path
from typing import NamedTuple

from offload.bench.harness.command import Bench, command, say_table
from offload.bench.harness.record import Row
from offload.checkpoint.hub import checkpoint_of_config
from offload.checkpoint.sizes import model_shape
from offload.memory.planner import Budgets, make_plan
from offload.planning.cost_model import Traffic, costs_on, step_time
from offload.planning.hardware import KNOWN
from offload.tree.topology import DEFAULT_ACCEPTANCE, Topology, best_first, chain

_LLAMA_2_70B = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
                "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 32000,
                "max_position_embeddings": 4096, "torch_dtype": "float16"}  # fmt: skip
_LLAMA_2_7B = {**_LLAMA_2_70B, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
               "num_key_value_heads": 32, "intermediate_size": 11008}  # fmt: skip
_CONTEXT = 256  # 128 prompt tokens and as many new ones, as in the paper
PAPER_BASE_S = 5.6  # the paper's own system, one token per sweep
TABLE_5 = {  # text and temperature: nodes, depth, tokens per step, seconds per token
    "C4, T = 0": (768, 22, 12.18, 0.56),
    "C4, T = 0.6": (768, 23, 10.12, 0.69),
    "OpenWebText, T = 0": (768, 18, 9.83, 0.69),
    "OpenWebText, T = 0.6": (768, 19, 9.05, 0.76),
    "CNN Daily, T = 0": (768, 17, 10.46, 0.64),
    "CNN Daily, T = 0.6": (768, 18, 9.58, 0.70),
}


class Predicted(NamedTuple):
    """Seconds per token on an L40."""

    in_turn: float  # all layers streamed, nothing overlapped
    overlapped: float  # all layers streamed while computing, as here but for resident layers and reading ahead
    here: float  # as this program plans and runs


def predict_l40(topology: Topology, tokens_per_step: float) -> Predicted:
    """A Llama-2-70B with a 7B draft on the known L40, at the paper's length of text."""
    gpu, file = KNOWN["l40"], Path("config.json")
    target, draft = (model_shape(checkpoint_of_config(config, file)) for config in (_LLAMA_2_70B, _LLAMA_2_7B))
    costs, small = costs_on(gpu, target, draft, _CONTEXT), draft if topology.depth > 0 else None
    budgets = Budgets(gpu.ram_bytes, gpu.gpu_bytes)
    plan = make_plan(target, small, budgets, context=_CONTEXT, num_nodes=topology.num_nodes)
    streamed = step_time(costs, Traffic(sum(target.layer_bytes), 0), topology)
    in_turn_s = streamed.draft_s + streamed.link_s + streamed.compute_s + streamed.verify_s
    here_s = step_time(costs, Traffic.of(plan, gpu), topology).total_s
    return Predicted(*(step_s / tokens_per_step for step_s in (in_turn_s, streamed.total_s, here_s)))


def paper_rows() -> list[Row]:
    """The baseline and Table 5, measured by the paper and predicted."""
    base = predict_l40(chain(0), 1.0)
    rows: list[Row] = [{"row": "no tree", "tokens_per_step": 1.0, "paper_s": PAPER_BASE_S, **base._asdict()}]
    for name, (num_nodes, depth, tokens_per_step, paper_s) in TABLE_5.items():
        predicted = predict_l40(best_first(DEFAULT_ACCEPTANCE, num_nodes, depth), tokens_per_step)
        figures = {"tokens_per_step": tokens_per_step, "paper_s": paper_s, **predicted._asdict()}
        rows.append({"row": f"{name}, {num_nodes}x{depth}", **figures})
    return rows


def cells(row: Row) -> list[str]:
    others = (f"{row[key]:.3f} ({row[key] / row['paper_s'] - 1:+.1%})" for key in ("in_turn", "overlapped"))
    return [row["row"], f"{row['tokens_per_step']:.2f}", f"{row['paper_s']:.2f}", *others, f"{row['here']:.3f}"]


@command("prediction")
def main(bench: Bench) -> None:
    """What the plan promises beside what the paper measured on an L40; measures nothing."""
    rows = [bench.row(row) for row in paper_rows()]
    say_table(["L40, Llama-2-70B with 7B", "tokens", "paper", "in turn", "overlapped", "here"], map(cells, rows))
    bench.end({"bench": "prediction", "rows": rows})
