"""The plan beside the paper's offloading on an L40 (2402.12374, Table 5), from data sheets.

The paper's rows are given their tokens per step, so that seconds alone are compared, and are
predicted twice: all layers crossing the link, one thing after the other, which is what the paper's
own figures add up to, and as this program would run, with as many layers resident as fit and
everything overlapped. The bill has every term of a step beside what the link needs: the largest
share of it that a step can be.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from offload.bench.harness.command import Bench, command
from offload.bench.harness.record import Row
from offload.bench.harness.tables import Column, say_table
from offload.checkpoint.hub import checkpoint_of_config
from offload.checkpoint.sizes import model_shape
from offload.memory.planner import MemoryBudget, make_plan
from offload.planning.cost_model import Traffic, costs_on, step_time
from offload.planning.hardware import KNOWN
from offload.planning.load_options import LoadOptions
from offload.reports.estimate import Estimate, estimate
from offload.trees.topology import DEFAULT_ACCEPTANCE, Topology, best_first, chain


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "torch_dtype": "float16",
    }


_LLAMA_2_70B = _llama(8192, 80, 64, 8, 28672)
_LLAMA_2_7B = _llama(4096, 32, 32, 32, 11008)
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
BILLED = ("768x24", "dynamic:768x24", "auto")
_BILL_CONTEXT = 4096
_TERMS = ("link_s", "hidden_s", "draft_s", "host_s", "verify_s", "ends_s", "compute_s", "step_s")


def predict_l40(topology: Topology, tokens_per_step: float) -> Row:
    """Predict seconds per token of a Llama-2-70B with a 7B draft at the paper's length of text.

    `in_turn` with all layers streamed and nothing overlapped; `overlapped` while computing, as here
    but for resident layers and reading ahead; `here` as this program plans and runs.
    """
    gpu = KNOWN["l40"]
    file = Path("config.json")
    target = model_shape(checkpoint_of_config(_LLAMA_2_70B, file))
    draft = model_shape(checkpoint_of_config(_LLAMA_2_7B, file))
    costs = costs_on(gpu, target, draft, _CONTEXT)
    small = draft if topology.depth > 0 else None
    budget = MemoryBudget(ram=gpu.ram_bytes, gpu=gpu.gpu_bytes, context=_CONTEXT)
    plan = make_plan(target, small, budget, topology.num_nodes)
    streamed = step_time(costs, Traffic(sum(target.layer_bytes), 0), topology)
    in_turn_s = streamed.draft_s + streamed.link_s + streamed.compute_s + streamed.verify_s
    here_s = step_time(costs, Traffic.of(plan, gpu), topology).total_s
    steps = {"in_turn": in_turn_s, "overlapped": streamed.total_s, "here": here_s}
    return {name: step_s / tokens_per_step for name, step_s in steps.items()}


def paper_rows() -> list[Row]:
    base: Row = {"row": "no tree", "tokens_per_step": 1.0, "paper_s": PAPER_BASE_S}
    rows = [{**base, **predict_l40(chain(0), 1.0)}]
    for name, (num_nodes, depth, tokens_per_step, paper_s) in TABLE_5.items():
        tree = best_first(DEFAULT_ACCEPTANCE, num_nodes, depth)
        told = {"row": f"{name}, {num_nodes}x{depth}", "tokens_per_step": tokens_per_step}
        predicted = predict_l40(tree, tokens_per_step)
        rows.append({**told, "paper_s": paper_s, **predicted})
    return rows


def bill_of(
    models: tuple[str, str],
    hardware: str,
    tree: str,
    *,
    context: int = _BILL_CONTEXT,
    profile: Path | None = None,
) -> Estimate:
    """Return what a pair is expected to cost on that machine with one tree."""
    path = None if profile is None else str(profile)
    options = LoadOptions(context=context, tree=tree, profile=path)
    return estimate(*models, options, hardware=hardware, has_packing=False)


def bill_rows(hardware: str = "l40") -> list[Row]:
    """Return every term of a step, tree by tree, and the step over what its link needs."""
    rows = list[Row]()
    with tempfile.TemporaryDirectory(prefix="offload-bench-") as name:
        models = [Path(name) / one / "config.json" for one in ("target", "draft")]
        for path, config in zip(models, (_LLAMA_2_70B, _LLAMA_2_7B), strict=True):
            path.parent.mkdir()
            path.write_text(json.dumps(config))
        target, draft = map(str, models)
        for tree in BILLED:
            found = bill_of((target, draft), hardware, tree)
            one = found.predictions[-1]
            step = one.step
            link_s = found.plan.streamed_bytes / (found.link_bytes_per_s or 1.0)
            terms = {"link_s": link_s, "hidden_s": link_s - step.link_s, "step_s": step.total_s}
            terms |= {name: getattr(step, name) for name in _TERMS if name not in terms}
            label = tree if tree == one.label else f"{tree}, {one.label}"
            told = {"tokens_per_sweep": one.tokens_per_sweep, "s_per_token": one.s_per_token}
            told |= {"over_link": step.total_s / link_s, "num_resident": found.plan.num_resident}
            rows.append({"row": f"a step on an L40 with {label}", **terms, **told})
    return rows


def _beside_paper(key: str) -> Column:
    def told(row: Row) -> str:
        return f"{row[key]:.3f} ({row[key] / row['paper_s'] - 1:+.1%})"

    return Column(key.replace("_", " "), told)


PAPER_COLUMNS = (
    Column("L40, Llama-2-70B with 7B", "row"),
    Column("tokens", "tokens_per_step", ".2f"),
    Column("paper", "paper_s", ".2f"),
    _beside_paper("in_turn"),
    _beside_paper("overlapped"),
    Column("here", "here", ".3f"),
)
BILL_COLUMNS = (
    Column("context 4096, seconds", "row"),
    Column("resident", "num_resident"),
    *(Column(name.removesuffix("_s"), name, ".3f") for name in _TERMS),
    Column("step / link", "over_link", ".3f"),
    Column("s/token", "s_per_token", ".3f"),
)


@command("prediction")
def main(bench: Bench) -> None:
    """What the plan promises beside what the paper measured on an L40; measures nothing."""
    rows = [bench.row(row) for row in paper_rows()]
    say_table(PAPER_COLUMNS, rows)
    bill = [bench.row(row) for row in bill_rows()]
    say_table(BILL_COLUMNS, bill)
    bench.end({"bench": "prediction", "rows": rows, "bill": bill})
