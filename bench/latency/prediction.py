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
from typing import NamedTuple

from offload.bench.harness.command import Bench, command, say_table
from offload.bench.harness.record import Row
from offload.checkpoint.hub import checkpoint_of_config
from offload.checkpoint.sizes import model_shape
from offload.memory.planner import Budgets, make_plan
from offload.planning.cost_model import Traffic, costs_on, step_time
from offload.planning.hardware import KNOWN
from offload.planning.options import LoadOptions
from offload.reports.estimate import Estimate, estimate
from offload.trees.topology import DEFAULT_ACCEPTANCE, Topology, best_first, chain

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
    # all layers streamed while computing, as here but for resident layers and reading ahead
    overlapped: float
    # as this program plans and runs
    here: float


def predict_l40(topology: Topology, tokens_per_step: float) -> Predicted:
    """Predict a Llama-2-70B with a 7B draft on the known L40, at the paper's length of text."""
    gpu = KNOWN["l40"]
    file = Path("config.json")
    target, draft = (
        model_shape(checkpoint_of_config(config, file)) for config in (_LLAMA_2_70B, _LLAMA_2_7B)
    )
    costs = costs_on(gpu, target, draft, _CONTEXT)
    small = draft if topology.depth > 0 else None
    budgets = Budgets(gpu.ram_bytes, gpu.gpu_bytes)
    plan = make_plan(target, small, budgets, context=_CONTEXT, num_nodes=topology.num_nodes)
    streamed = step_time(costs, Traffic(sum(target.layer_bytes), 0), topology)
    in_turn_s = streamed.draft_s + streamed.link_s + streamed.compute_s + streamed.verify_s
    here_s = step_time(costs, Traffic.of(plan, gpu), topology).total_s
    return Predicted(
        *(step_s / tokens_per_step for step_s in (in_turn_s, streamed.total_s, here_s))
    )


def paper_rows() -> list[Row]:
    """Return the baseline and Table 5, measured by the paper and predicted."""
    base = predict_l40(chain(0), 1.0)
    rows: list[Row] = [
        {"row": "no tree", "tokens_per_step": 1.0, "paper_s": PAPER_BASE_S, **base._asdict()}
    ]
    for name, (num_nodes, depth, tokens_per_step, paper_s) in TABLE_5.items():
        predicted = predict_l40(best_first(DEFAULT_ACCEPTANCE, num_nodes, depth), tokens_per_step)
        figures = {"tokens_per_step": tokens_per_step, "paper_s": paper_s, **predicted._asdict()}
        rows.append({"row": f"{name}, {num_nodes}x{depth}", **figures})
    return rows


BILLED = ("768x24", "dynamic:768x24", "auto")
_BILL_CONTEXT = 4096
_TERMS = ("link_s", "hidden_s", "draft_s", "host_s", "verify_s", "ends_s", "compute_s", "step_s")


def bill_of(
    models: tuple[str, str],
    hardware: str,
    tree: str,
    *,
    context: int = _BILL_CONTEXT,
    profile: Path | None = None,
) -> Estimate:
    """Return what a pair is expected to cost on that machine with one tree."""
    options = LoadOptions(
        context=context, tree=tree, profile=None if profile is None else str(profile)
    )
    return estimate(*models, options, hardware=hardware, has_packing=False)


def bill_rows(hardware: str = "l40") -> list[Row]:
    """Return every term of a step, tree by tree, and the step over what its link needs."""
    rows = list[Row]()
    with tempfile.TemporaryDirectory(prefix="offload-bench-") as name:
        folders = [Path(name) / one for one in ("target", "draft")]
        for folder, config in zip(folders, (_LLAMA_2_70B, _LLAMA_2_7B), strict=True):
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config))
        for tree in BILLED:
            target, draft = (str(folder / "config.json") for folder in folders)
            rows.append(_bill_row(tree, bill_of((target, draft), hardware, tree)))
    return rows


def _bill_row(tree: str, found: Estimate) -> Row:
    one = found.predictions[-1]
    step = one.step
    link_s = found.plan.streamed_bytes / (found.link_bytes_per_s or 1.0)
    terms = {"link_s": link_s, "hidden_s": link_s - step.link_s, "step_s": step.total_s}
    terms |= {name: getattr(step, name) for name in _TERMS if name not in terms}
    name = tree if tree == one.label else f"{tree}, {one.label}"
    told = {"tokens_per_sweep": one.tokens_per_sweep, "s_per_token": one.s_per_token}
    told |= {"over_link": step.total_s / link_s, "num_resident": found.plan.num_resident}
    return {"row": f"a step on an L40 with {name}", **terms, **told}


def bill_cells(row: Row) -> list[str]:
    terms = [f"{row[name]:.3f}" for name in _TERMS]
    return [
        row["row"],
        str(row["num_resident"]),
        *terms,
        f"{row['over_link']:.3f}",
        f"{row['s_per_token']:.3f}",
    ]


def cells(row: Row) -> list[str]:
    others = (
        f"{row[key]:.3f} ({row[key] / row['paper_s'] - 1:+.1%})"
        for key in ("in_turn", "overlapped")
    )
    return [
        row["row"],
        f"{row['tokens_per_step']:.2f}",
        f"{row['paper_s']:.2f}",
        *others,
        f"{row['here']:.3f}",
    ]


@command("prediction")
def main(bench: Bench) -> None:
    """What the plan promises beside what the paper measured on an L40; measures nothing."""
    rows = [bench.row(row) for row in paper_rows()]
    say_table(
        ["L40, Llama-2-70B with 7B", "tokens", "paper", "in turn", "overlapped", "here"],
        map(cells, rows),
    )
    bill = [bench.row(row) for row in bill_rows()]
    heads = [
        "link",
        "hidden",
        "draft",
        "host",
        "verify",
        "ends",
        "compute",
        "step",
        "step / link",
        "s/token",
    ]
    say_table(["context 4096, seconds", "resident", *heads], map(bill_cells, bill))
    bench.end({"bench": "prediction", "rows": rows, "bill": bill})
