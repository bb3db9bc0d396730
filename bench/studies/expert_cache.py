"""How many experts must a token read, by the room for them and by the rows of a pass?

Routing is made up, or with --model recorded while that model reads texts of --prompts, one after
the other; then the same passes are replayed with every way of keeping experts
(`harness/replay.py`). No weights are streamed: misses alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

from offload.bench.harness.command import Bench, command, say_table
from offload.bench.harness.record import Row
from offload.bench.harness.replay import expected, optimal, ours, recent
from offload.bench.harness.routing import MadeUp, Routing, made_up, passes, recorded
from offload.engine.text import load_tokenizer
from offload.errors import UserError

# tokens that a text must have
LEAST_TOKENS = 16


class Effort(NamedTuple):
    """How much is replayed."""

    made_up: MadeUp
    num_prompts: int
    # shares of all experts that there is room for
    rooms: tuple[float, ...] = (0.03, 0.05, 0.1, 0.2, 0.3, 0.6)
    num_rows: tuple[int, ...] = (1, 4, 16)


FULL = Effort(MadeUp(), 8)
QUICK = Effort(MadeUp(num_layers=6, num_experts=64, num_chosen=4, num_tokens=150), 3)


def replayed(routing: Routing, rooms: Sequence[float], num_rows: Sequence[int]) -> list[Row]:
    """Return experts that were read for each layer and token, by rows and room."""
    rows = list[Row]()
    for count in num_rows:
        run = list(passes(routing, count))
        uses = routing.chosen_TLK.shape[1] * sum(one.num_tokens for one in run)
        for room in rooms:
            num_slots = max(2, int(room * routing.num_blocks))
            read = {
                "ours": ours(run, routing.num_blocks, num_slots),
                "recent": recent(run, num_slots),
                "optimal": optimal(run, num_slots),
                "expected": expected(run, routing.num_blocks, num_slots, count),
            }
            rows.append(
                {
                    "num_rows": count,
                    "room": room,
                    **{how: misses / uses for how, misses in read.items()},
                }
            )
    return rows


def recorded_from(model: str, bench: Bench, num_prompts: int) -> tuple[Routing, list[str]]:
    """Return the routing of prompts that the model reads whole.

    Raises `UserError` where it has no experts, or no tokenizer.
    """
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer, (prompts, names) = load_tokenizer(model), bench.prompts(num_prompts)
    if tokenizer is None:
        raise UserError(f"{model} has no tokenizer: name a folder with one")
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    ).eval()
    texts = [tokenizer(prompt.text)["input_ids"] for prompt in prompts]
    return recorded(loaded, [text for text in texts if len(text) >= LEAST_TOKENS]), names


@command(
    "expert-cache",
    "model source quick",
    examples=["offload bench expert-cache --quick", "offload bench expert-cache -m MOE"],
)
def main(bench: Bench) -> None:
    """Experts that a token has to read, as we keep them and otherwise; ten minutes, half a one with
    --quick.
    """
    effort = QUICK if bench.quick else FULL
    model = bench.given("model")
    settings: Row = {"model": model, **effort.made_up._asdict()}
    routing = made_up(effort.made_up)
    if model is not None:
        with bench.screen:
            bench.screen.wait("recording what texts are routed to")
            routing, names = recorded_from(model, bench, effort.num_prompts)
        settings = {"model": model, "prompts": names, "num_tokens": len(routing.chosen_TLK)}
    rows = [bench.row(row) for row in replayed(routing, effort.rooms, effort.num_rows)]
    print(f"experts read by each layer for a token, of {routing.chosen_TLK.shape[2]} that it uses")
    head = ["rows, room", "ours", "LRU", "optimum", "expected", "ours / LRU", "ours / optimum"]
    say_table(head, map(_cells, rows))
    bench.finish(rows, settings=settings, ceiling={})


def _cells(row: Row) -> list[str]:
    read = [row[how] for how in ("ours", "recent", "optimal", "expected")]
    ratios = [row["ours"] / max(row[how], 1e-9) for how in ("recent", "optimal")]
    return [
        f"{row['num_rows']}, {100 * row['room']:.0f} %",
        *(f"{one:.2f}" for one in (*read, *ratios)),
    ]
