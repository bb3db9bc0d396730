"""What experts on demand are worth: tokens/s beside whole layers with the same memory.

Room for experts is a share of their bytes, beside all that a run on demand needs at least with its
dense layers staying; whole layers get the same budget. Each way runs in a process and a memory
group of its own, tree after tree on every text, and `auto` in another one right behind.

Invariant: all runs behind one prompt have written the same ids, and these are the original model's,
before a speed is printed.
"""

import math
import sys
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import typer

from offload.bench.harness.command import Bench, command, say_link, say_table
from offload.bench.harness.gate import Written
from offload.bench.harness.record import Row
from offload.bench.harness.setting import PROMPT_TOKENS, Setting, find_setting
from offload.bench.harness.wanted import say_wanted, wanted_row
from offload.bench.moe_pair.make import moe_setting
from offload.bench.peers.child import Order, rate
from offload.bench.peers.run import Outcome, run_child
from offload.checkpoint.hub import open_headers
from offload.engine.text import encode_prompt, load_tokenizer
from offload.errors import UserError
from offload.memory.plan import MemoryPlan
from offload.memory.planner import ModelFiles, least_budget, plan_memory
from offload.trees.spec import parse_tree
from offload.units import Sampling

CONTEXT = 512
AUTO = "auto"
ROOMS = (5, 10, 20, 30, 60)  # percent
TREES = {
    "demand": ("none", "chain:1", "4x3", "8x5", "16x8", "dynamic:64x16"),
    "layers": ("none", "8x5", "32x12", "dynamic:64x16"),
    "auto": (),  # as a user runs it: the tree is chosen, too
}
LARGEST = "dynamic:64x16"
# over the best tree of whole layers, anywhere and near a third of the model's bytes
LEAST_SPEEDUP = 0.98
SPEEDUP = 3.0
# the most that the best of the grid / auto should be
CHOICE = 1.07
_ENOUGH = "1TiB"  # until the budget of each room is known
_BESIDE_BYTES = 640 << 20  # what a process holds before it loads a model, and may keep of files


class Effort(NamedTuple):
    """How much is measured."""

    num_prompts: int
    num_tokens: int
    # seconds after which a run is cut
    limit_s: float
    rounds: int


FULL = Effort(3, 96, 25.0, 2)
QUICK = Effort(1, 32, 12.0, 1)


def room_bytes(setting: Setting, percent: int) -> int:
    """Return the least budget for all dense layers and so many routed experts.

    Raises `UserError`.
    """
    files = ModelFiles(
        open_headers(setting.target), None if setting.draft is None else open_headers(setting.draft)
    )

    def plan(ram: int) -> MemoryPlan:
        num_nodes = parse_tree(LARGEST).num_nodes
        found = plan_memory(
            files, ram=ram, dtype="auto", context=CONTEXT, num_nodes=num_nodes, experts="demand"
        )
        if found.num_slots or found.num_expert_slots < math.ceil(found.num_experts * percent / 100):
            raise UserError("it is too little")
        return found

    return least_budget(plan)


def measure(
    setting: Setting, prompts: Sequence[list[int]], ram_bytes: int, effort: Effort
) -> list[Row]:
    """Return a row for each way and tree with that budget; one without runs says why."""
    rows = dict[tuple[str, str], Row]()
    for _ in range(effort.rounds):
        for way, trees in TREES.items():
            for tried in filter(None, (trees, (AUTO,))):
                outcome = _run(setting, prompts, {"experts": way, "ram": ram_bytes}, tried, effort)
                for place, tree in enumerate(tried):
                    row = rows.setdefault((way, tree), {"experts": way, "tree": tree, "runs": []})
                    own = outcome.runs[place :: len(tried)]
                    row["runs"] += [run._replace(prompt=run.prompt // len(tried)) for run in own]
                    row |= {
                        "reason": outcome.reason,
                        "is_capped": outcome.is_capped,
                        "peak_bytes": outcome.peak_bytes,
                    }
    return [*rows.values()]


def _run(
    setting: Setting,
    prompts: Sequence[list[int]],
    options: Row,
    trees: Sequence[str],
    effort: Effort,
) -> Outcome:
    """Run all trees behind one prompt, then behind the next."""
    named = (
        {"tree": AUTO} if trees == (AUTO,) else {"tree": LARGEST, "trees": [*trees] * len(prompts)}
    )
    order = Order(
        "offload.bench.peers.ours",
        {**options, **named},
        str(setting.target),
        str(setting.draft),
        [ids for ids in prompts for _ in trees],
        effort.num_tokens,
        effort.limit_s,
        threads=[],
        cap_bytes=options["ram"] + _BESIDE_BYTES,
        group=None,
    )
    return run_child(sys.executable, order)


def _written(rows: Sequence[Row], prompts: Sequence[list[int]]) -> list[Written]:
    """Return what all runs have written, each text once, to be proved.

    Raises `UserError` where experts on demand failed.
    """
    if failed := [row["reason"] for row in rows if row["reason"] and row["experts"] != "layers"]:
        raise UserError(f"experts on demand: {failed[0]}")
    texts = {(run.prompt, tuple(run.token_ids)) for row in rows for run in row["runs"]}
    return [
        Written(prompts[at], [*ids], Sampling(), "match", is_invariant=True)
        for at, ids in sorted(texts)
    ]


def _finished(row: Row) -> Row:
    """Replace runs by figures; none where no run came to a second pass."""
    runs = row.pop("runs")
    sweeps = sum(len(run.bursts) - 1 for run in runs)
    if not sweeps:
        return row
    row |= {"tokens_per_s": rate(runs), "tokens_per_s_by_run": [rate([run]) for run in runs]}
    return {**row, "tokens_per_pass": sum(run.num_decoded for run in runs) / sweeps}


def promises(rows: Sequence[Row], model_bytes: int) -> list[Row]:
    """Return what was wanted of `auto`, by room, beside the best tree, and of whole layers."""
    found = []
    third = min(rows, key=lambda row: abs(row["ram_bytes"] - model_bytes / 3))["room"]
    for room in dict.fromkeys(row["room"] for row in rows):
        speed = {
            (row["experts"], row["tree"]): row["tokens_per_s"]
            for row in rows
            if row["room"] == room and row.get("tokens_per_s")
        }
        whole = [one for (way, _), one in speed.items() if way == "layers"]
        grid = [one for (_, tree), one in speed.items() if tree != AUTO]
        if (auto := speed.get((AUTO, AUTO))) is None:  # cut before its second pass
            continue
        if whole:
            ratio = auto / max(whole)
            name = f"auto / best of whole layers, {room} %"
            found.append(wanted_row(name, ratio, LEAST_SPEEDUP, [ratio], "higher"))
            if room == third:
                found.append(
                    wanted_row(
                        f"{name}, near a third of the model", ratio, SPEEDUP, [ratio], "higher"
                    )
                )
        if grid:
            ratio = max(grid) / auto
            found.append(
                wanted_row(f"best of the grid / auto, {room} %", ratio, CHOICE, [ratio], "lower")
            )
    return found


Size = Annotated[str, typer.Option(metavar="SIZE", help="how large to make the packaged mixture")]
Rooms = Annotated[
    list[int] | None, typer.Option("--room", metavar="PERCENT", help="of all experts stay; several")
]


@command(
    "experts",
    "model draft source quick compare",
    examples=["offload bench experts --quick --size 600MB"],
)
def main(bench: Bench, size: Size = "3GB", room: Rooms = None) -> None:
    """Experts on demand beside whole layers: an hour on two cores, ten minutes with --quick."""
    model = bench.given("model")
    draft = bench.given("draft")
    rooms = room or ROOMS
    screen = bench.screen
    found = (
        find_setting(model, draft, size, _ENOUGH, screen)
        if model
        else moe_setting(size, _ENOUGH, screen)
    )
    setting = found._replace(ram_bytes=room_bytes(found, max(rooms)))
    effort = QUICK if bench.quick else FULL
    rows = []
    tokenizer = load_tokenizer(setting.origin)
    if tokenizer is None or setting.draft is None:
        raise UserError(
            "bench experts compares trees behind texts: give a model with a tokenizer, and --draft"
        )
    (texts, names), written = bench.prompts(effort.num_prompts), list[Written]()
    prompts = [encode_prompt(tokenizer, one.text, raw=True)[:PROMPT_TOKENS] for one in texts]
    bench.check_same(setting, prompts=names)
    ceiling = say_link(setting)
    for percent in rooms:
        ram_bytes = room_bytes(setting, percent)
        print(f"room for {percent} % of the experts: {ram_bytes / 1e9:.2f} GB", file=sys.stderr)
        measured = measure(setting, prompts, ram_bytes, effort)
        written += _written(measured, prompts)
        rows += [{"room": percent, "ram_bytes": ram_bytes, **_finished(row)} for row in measured]
    proof = bench.prove(setting, written)
    for row in rows:
        bench.row(row)
    say_table(["tokens/s", *_columns()], _lines(rows))
    guards = say_wanted(promises(rows, open_headers(setting.target).num_bytes))
    bench.finish(
        rows,
        settings={**setting.as_dict(), "prompts": names},
        ceiling={"bytes_per_s": ceiling},
        guards=guards,
        proof=proof,
    )


def _columns() -> list[str]:
    return [*dict.fromkeys(tree for trees in TREES.values() for tree in trees), AUTO]


def _lines(rows: Sequence[Row]) -> list[list[str]]:
    """Return tokens per second by tree, a line for each room and way, or why there are none."""
    lines = []
    for room, way in dict.fromkeys((row["room"], row["experts"]) for row in rows):
        own = {row["tree"]: row for row in rows if (row["room"], row["experts"]) == (room, way)}
        head = f"{room} % in {own[AUTO]['ram_bytes'] / 1e9:.2f} GB, {way}"
        if reasons := [row["reason"] for row in own.values() if row["reason"]]:
            lines.append([head, reasons[0]])
            continue
        speeds = [
            f"{speed:.2f}" if (speed := own.get(tree, {}).get("tokens_per_s")) else ""
            for tree in _columns()
        ]
        lines.append([head, *speeds])
    return lines
