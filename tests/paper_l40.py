"""The plan beside Sequoia's offloading on an L40 (2402.12374, Table 5), from data sheets.

The paper's rows are given their tokens per step, so that seconds alone are compared.
"""

from typing import Any

from test_device_planner import SHAPES

from offload.memory.plan import MemoryBudget
from offload.memory.planner import make_plan
from offload.planning.cost_model import Traffic, costs_on, step_time
from offload.planning.hardware import KNOWN
from offload.trees.topology import DEFAULT_ACCEPTANCE, Topology, best_first, chain

CONTEXT = 256  # 128 prompt tokens and as many new ones, as in the paper
PAPER_BASE_S = 5.6  # the paper's own system, one token per sweep
TABLE_5 = {  # text and temperature: nodes, depth, tokens per step, seconds per token
    "C4, T = 0": (768, 22, 12.18, 0.56),
    "C4, T = 0.6": (768, 23, 10.12, 0.69),
    "OpenWebText, T = 0": (768, 18, 9.83, 0.69),
    "OpenWebText, T = 0.6": (768, 19, 9.05, 0.76),
    "CNN Daily, T = 0": (768, 17, 10.46, 0.64),
    "CNN Daily, T = 0.6": (768, 18, 9.58, 0.70),
}


def predict_l40(topology: Topology, tokens_per_step: float) -> dict[str, float]:
    """Seconds per token of a Llama-2-70B with a 7B draft.

    `in_turn` with all layers streamed and nothing overlapped, which is what the paper's own figures add up to;
    `overlapped` while computing; `here` as this program plans and runs, with as many layers resident as fit.
    """
    gpu, target, draft = KNOWN["l40"], SHAPES["Llama-2-70B"], SHAPES["Llama-2-7B"]
    costs = costs_on(gpu, target, draft, CONTEXT)
    budget = MemoryBudget(ram_bytes=gpu.ram_bytes, gpu_bytes=gpu.gpu_bytes, context=CONTEXT)
    plan = make_plan(target, draft if topology.depth > 0 else None, budget, topology.num_nodes)
    streamed = step_time(costs, Traffic(sum(target.layer_bytes), 0), topology)
    in_turn_s = streamed.draft_s + streamed.link_s + streamed.compute_s + streamed.verify_s
    here_s = step_time(costs, Traffic.from_plan(plan, gpu), topology).total_s
    steps = {"in_turn": in_turn_s, "overlapped": streamed.total_s, "here": here_s}
    return {name: step_s / tokens_per_step for name, step_s in steps.items()}


def paper_rows() -> list[dict[str, Any]]:
    """One token per sweep, then the rows of the table."""
    rows: list[dict[str, Any]] = [{"row": "no tree", "paper_s": PAPER_BASE_S, **predict_l40(chain(0), 1.0)}]
    for name, (num_nodes, depth, tokens_per_step, paper_s) in TABLE_5.items():
        predicted = predict_l40(best_first(DEFAULT_ACCEPTANCE, num_nodes, depth), tokens_per_step)
        rows.append({"row": name, "paper_s": paper_s, **predicted})
    return rows
