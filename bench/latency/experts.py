"""What experts on demand are worth: tokens/s beside whole layers with the same memory.

Room for experts is a share of their bytes, beside all that a run on demand needs at least with its
dense layers staying; whole layers get the same budget. Each way runs in a process and a memory
group of its own, tree after tree on every text, and `auto` in another one right behind. Invariant:
all runs behind one prompt wrote the same ids, the original model's.
"""

import math
import sys
from collections.abc import Sequence
from typing import Annotated

from offload.bench.harness.command import Bench, Effort, Findings, command, flag
from offload.bench.harness.gate import Written
from offload.bench.harness.prompts import raw_ids
from offload.bench.harness.setting import PROMPT_TOKENS, Setting, least_ram
from offload.bench.harness.tables import Column, Row, check, values
from offload.bench.pairs.moe_pair import moe_setting
from offload.bench.peers.child import Order, rate
from offload.bench.peers.peers import run_child
from offload.checkpoint.open import open_headers
from offload.errors import UserError
from offload.memory.plan import MemoryPlan
from offload.trees.spec import parse_tree

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


FULL = Effort(3, 96, rounds=2, limit_s=25.0)
QUICK = Effort(1, 32, limit_s=12.0)


def room_bytes(setting: Setting, percent: int) -> int:
    """Return the least budget for dense layers and this many experts. Raises `UserError`."""

    def holds(plan: MemoryPlan) -> bool:
        least = math.ceil(plan.num_experts * percent / 100)
        return not plan.num_layer_slots and plan.num_expert_slots >= least

    num_nodes = parse_tree(LARGEST).num_nodes
    return least_ram(setting.files, num_nodes, holds, context=CONTEXT, experts="demand")


def measure(
    setting: Setting, prompts: Sequence[list[int]], ram_bytes: int, effort: Effort
) -> tuple[list[Row], list[Written]]:
    """Return a row for each way and tree with that budget, and each text once, to be proved.

    A row says why no run came to a second pass. Raises `UserError` where experts on demand failed.
    """
    rows = dict[tuple[str, str], Row]()
    for way, trees in [*TREES.items()] * effort.rounds:
        for tried in filter(None, (trees, (AUTO,))):
            named: Row = {"tree": AUTO}
            if tried != (AUTO,):
                named = {"tree": LARGEST, "trees": [*tried] * len(prompts)}
            # all trees behind one prompt, then behind the next
            order = Order(
                "offload.bench.peers.ours",
                {"experts": way, "ram": ram_bytes, **named},
                str(setting.target),
                str(setting.draft),
                [ids for ids in prompts for _ in tried],
                effort.num_tokens,
                effort.limit_s,
                threads=[],
                cap_bytes=ram_bytes + _BESIDE_BYTES,
            )
            outcome = run_child(sys.executable, order)
            for place, tree in enumerate(tried):
                row = rows.setdefault((way, tree), {"experts": way, "tree": tree, "runs": []})
                tree_runs = outcome.runs[place :: len(tried)]
                row["runs"] += [run._replace(prompt=run.prompt // len(tried)) for run in tree_runs]
                for name in ("reason", "is_capped", "peak_bytes"):
                    row[name] = getattr(outcome, name)
    texts = set[tuple[int, tuple[int, ...]]]()
    for row in rows.values():
        if row["reason"] and row["experts"] != "layers":
            raise UserError(f"experts on demand: {row['reason']}")
        runs = row.pop("runs")
        texts |= {(run.prompt, (*run.token_ids,)) for run in runs}
        if num_sweeps := sum(len(run.bursts) - 1 for run in runs):
            row["tokens_per_s"] = rate(runs)
            row["tokens_per_s_by_run"] = [rate([run]) for run in runs]
            row["tokens_per_pass"] = sum(run.num_decoded for run in runs) / num_sweeps
    written = [Written(prompts[at], [*ids], is_invariant=True) for at, ids in sorted(texts)]
    return [*rows.values()], written


def checks(rows: Sequence[Row], model_bytes: int) -> list[Row]:
    """Return the targets for `auto`, by room, beside the best tree, and for whole layers."""
    verdicts = []
    third = min(rows, key=lambda row: abs(row["ram_bytes"] - model_bytes / 3))["room"]
    # without those that were cut before their second pass
    timed = [row for row in rows if row.get("tokens_per_s")]
    for room in dict.fromkeys(row["room"] for row in rows):
        room_rows = [row for row in timed if row["room"] == room]
        whole = values(room_rows, "tokens_per_s", experts="layers")
        grid = [row["tokens_per_s"] for row in room_rows if row["tree"] != AUTO]
        for auto in values(room_rows, "tokens_per_s", experts=AUTO):
            if whole:
                ratio = auto / max(whole)
                name = f"auto / best of whole layers, {room} %"
                verdicts.append(check(name, [ratio], LEAST_SPEEDUP, "higher"))
                if room == third:
                    name = f"{name}, near a third of the model"
                    verdicts.append(check(name, [ratio], SPEEDUP, "higher"))
            if grid:
                name = f"best of the grid / auto, {room} %"
                verdicts.append(check(name, [max(grid) / auto], CHOICE, "lower"))
    return verdicts


def table_of(rows: Sequence[Row]) -> tuple[list[Column], list[Row]]:
    """Return tokens per second by tree, a line for each room and way, or why there are none."""
    lines = dict[tuple[int, str], Row]()
    for row in rows:
        head = f"{row['room']} % in {row['ram_bytes'] / 1e9:.2f} GB, {row['experts']}"
        line = lines.setdefault((row["room"], row["experts"]), {"head": head, "reason": ""})
        line[row["tree"]] = row.get("tokens_per_s")
        line["reason"] = line["reason"] or row["reason"]
    trees = dict.fromkeys([*(tree for tried in TREES.values() for tree in tried), AUTO])
    columns = [Column("tokens/s", "head"), *(Column(tree, tree, ".2f") for tree in trees)]
    return columns, [*lines.values()]


@command(
    *("experts", "model draft source quick compare"),
    examples=["offload bench experts --quick --size 600MB"],
)
def main(
    bench: Bench,
    size: Annotated[str, flag("SIZE", "how large to make the packaged mixture")] = "3GB",
    room: Annotated[
        list[int] | None, flag("PERCENT", "of all experts stay; several", "--room", min=1, max=100)
    ] = None,
) -> Findings:
    """Experts on demand beside whole layers: an hour on two cores, ten minutes with --quick."""
    rooms = [*dict.fromkeys(room or ROOMS)]
    effort = bench.effort(FULL, QUICK)
    texts = bench.prompts(effort.num_prompts)
    is_named = bench.given.model is not None
    setting = bench.setting(ram=_ENOUGH) if is_named else moe_setting(size, _ENOUGH, bench.screen)
    setting = setting._replace(ram_bytes=room_bytes(setting, max(rooms)))
    if setting.draft is None:
        raise UserError("bench experts compares trees behind texts: give --draft")
    prompts = raw_ids(setting.origin, texts, PROMPT_TOKENS)
    bench.begin(setting)
    rows = list[Row]()
    written = list[Written]()
    for percent in rooms:
        ram_bytes = room_bytes(setting, percent)
        print(f"room for {percent} % of the experts: {ram_bytes / 1e9:.2f} GB", file=sys.stderr)
        measured, proved = measure(setting, prompts, ram_bytes, effort)
        written += proved
        for row in measured:
            rows.append({"room": percent, "ram_bytes": ram_bytes, **row})
            bench.note(rows[-1])
    return Findings(
        rows=rows,
        tables=[table_of(rows)],
        checks=checks(rows, open_headers(setting.target).num_bytes),
        written=written,
    )
