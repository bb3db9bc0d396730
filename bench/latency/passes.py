"""Seconds of one pass against its rows: the target beside its link, the draft beside its memory.

Passes of all sizes take turns on one text, round after round, with a plain reader of as many bytes
in between (on a device: copies to it): the time that it takes is the floor under every pass. A pass
costs the same up to the size at which computing becomes the slower side. The draft reads its
weights once per pass, so it cannot be faster than memory, unless they stay in the processor's
cache: its share of the ceiling may lie above 1. The prompt's pass stands beside the others.
"""

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from offload.bench.gpu.rates import flops_per_s, memory_bytes_per_s
from offload.bench.harness.command import (
    MODELS,
    PLACE,
    Bench,
    Tell,
    command,
    say_floor,
    say_nothing,
    say_table,
)
from offload.bench.harness.gate import Written
from offload.bench.harness.plain_reader import plain_read_s
from offload.bench.harness.prompts import Prompt, encoded, prompts
from offload.bench.harness.record import Guard, Row
from offload.bench.harness.setting import PRETEND, PROMPT_TOKENS, Need, Setting
from offload.bench.harness.steps import Pass, PassRunner, draft_passes
from offload.checkpoint.hub import open_headers
from offload.checkpoint.sizes import model_shape
from offload.engine.decoder import Decoder

# the link counts as the slower side where a pass waits for it longer than this share
_STALLED_SHARE = 0.05
_CONTEXT = 512


class Effort(NamedTuple):
    """How much is measured."""

    sizes: tuple[int, ...]
    rounds: int
    # passes of every size in a round
    passes: int
    draft_s: float  # time for the draft's curve


FULL = Effort((1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512), 6, 3, 6.0)
QUICK = Effort((1, 16, 64, 128, 256), 3, 2, 1.5)
REHEARSAL = Effort((1, 8, 24), 1, 2, 0.5)
ON_DEVICE = Effort((1, 64, 768, 2048), 1, 3, 6.0)


class Measured(NamedTuple):
    """All rounds, unproved."""

    passes: list[Pass]
    # seconds of the passes that take a prompt in
    prompt_s: list[float]
    # a plain reader or copies of a sweep's bytes, before every round and after the last
    read_s: list[float]
    written: list[Written]

    @property
    def floor_s(self) -> float:
        """The median reading, or less where a pass took less: that shows what the link gave."""
        sizes = {one.num_rows for one in self.passes}
        sweeps = [
            median(one.seconds for one in self.passes if one.num_rows == size) for size in sizes
        ]
        return min(median(self.read_s), median(self.prompt_s), *sweeps)


def measure(
    setting: Setting,
    decoder: Decoder,
    texts: Sequence[Prompt],
    effort: Effort,
    note: Callable[[Row], Any] = bool,
    tell: Tell = say_nothing,
) -> Measured:
    found = Measured([], [], [_floor_s(setting, decoder)], [])
    for index in range(effort.rounds):
        ids = encoded(decoder, texts[index % len(texts)], PROMPT_TOKENS)
        # finds the slots that were filled while the plain reader ran
        PassRunner(decoder, ids[:1]).run(1)
        runner = PassRunner(decoder, ids)
        found.prompt_s.append(runner.run(1).seconds)
        for size in effort.sizes:
            done = [runner.run(size) for _ in range(effort.passes)]
            found.passes.extend(done)
            note(
                {
                    "name": f"sweep of {size} rows",
                    "sweep_s": median(one.seconds for one in done),
                    "is_proved": False,
                }
            )
        found.written.append(runner.written())
        found.read_s.append(_floor_s(setting, decoder))
        tell(index + 1, effort.rounds, "timing passes")
    return found


def _floor_s(setting: Setting, decoder: Decoder) -> float:
    num_bytes = max(1, decoder.plan.streamed_bytes)
    if setting.opened is None:
        return plain_read_s(setting.shards, num_bytes)
    return num_bytes / setting.ceiling(decoder.plan)


def rows_of(measured: Measured, streamed_bytes: int) -> Iterator[Row]:
    """Return medians for every size, the prompt's pass last."""
    floor_s = measured.floor_s
    for size in sorted({one.num_rows for one in measured.passes}):
        of_size = [one for one in measured.passes if one.num_rows == size]
        sweep_s, stall_s = (
            median(getattr(one, name) for one in of_size) for name in ("seconds", "stall_s")
        )
        limit = "link" if streamed_bytes and stall_s > _STALLED_SHARE * sweep_s else "compute"
        more = {
            "stall_s": stall_s,
            "compute_s": sweep_s - stall_s,
            "bytes_moved": of_size[0].num_bytes,
            "limit": limit,
        }
        yield _row(f"sweep of {size} rows", size, [one.seconds for one in of_size], floor_s) | more
    yield _row("sweep of a prompt", PROMPT_TOKENS, measured.prompt_s, floor_s)


def _row(name: str, num_nodes: int, seconds: list[float], floor_s: float) -> Row:
    told = {
        "name": name,
        "num_nodes": num_nodes,
        "sweep_s": median(seconds),
        "sweep_s_samples": seconds,
    }
    return {**told, "link_utilisation": floor_s / median(seconds)}


def draft_rows(
    setting: Setting, decoder: Decoder, prompt_ids: Sequence[int], budget_s: float
) -> Iterator[Row]:
    """Return a pass of the draft against its rows, beside reading its weights once."""
    assert setting.draft is not None, "there is a draft"
    shape = model_shape(open_headers(setting.draft))
    rate = memory_bytes_per_s(setting.opened)
    least_s = (sum(shape.layer_bytes) + shape.head_bytes) / rate
    curve = draft_passes(decoder, prompt_ids, budget_s)
    for width, seconds in zip(curve.sizes, curve.seconds, strict=True):
        yield {
            "name": f"draft pass of {width} rows",
            "num_draft_rows": width,
            "draft_step_s": seconds,
            "weights_s": least_s,
            "memory_bytes_per_s": rate,
            "of_ceiling": least_s / seconds,
        }


def compute_s(setting: Setting, num_rows: int) -> float:
    """Return the least time of so many rows' products, at the rate of the largest matrix."""
    target = open_headers(setting.target)
    rate = flops_per_s(
        setting.opened, target.config["intermediate_size"], target.config["hidden_size"]
    )
    return 2 * model_shape(target).num_weights * num_rows / rate


def _cells(row: Row) -> list[str]:
    if "draft_step_s" in row:
        return [
            row["name"],
            f"{row['draft_step_s']:.4f}",
            "-",
            "-",
            f"{row['of_ceiling']:.3f}",
            "memory",
        ]
    parts = [f"{row[name]:.3f}" if name in row else "-" for name in ("stall_s", "compute_s")]
    return [
        row["name"],
        f"{row['sweep_s']:.3f}",
        *parts,
        f"{row['link_utilisation']:.3f}",
        row.get("limit", "-"),
    ]


@command(
    "passes",
    MODELS,
    PLACE,
    "source quick compare",
    examples=["offload bench passes --quick --json passes.json"],
)
def main(bench: Bench) -> None:
    """How long does a forward of target and draft take for many rows, and is the link busy?"""
    setting = bench.setting(need=Need(f"{max(FULL.sizes)}x24", context=_CONTEXT))
    on = {"cpu": QUICK if bench.quick else FULL, PRETEND: REHEARSAL}
    effort = on.get(setting.device, ON_DEVICE)
    sizes = effort.sizes if setting.draft is not None or setting.device != "cpu" else (1,)
    bench.check_same(setting)
    texts = prompts(["code"], effort.rounds)
    rows = list[Row]()
    tree = f"{max(sizes)}x24" if max(sizes) > 1 and setting.draft is not None else "none"
    say_floor(setting)
    with bench.screen as screen, setting.open(tree, context=_CONTEXT) as decoder:
        plan = decoder.plan
        num_threads = decoder.num_threads
        say_floor(setting, plan)
        measured = measure(
            setting, decoder, texts, effort._replace(sizes=sizes), bench.row, screen.count
        )
        if setting.draft is not None:
            rows = list(
                draft_rows(setting, decoder, encoded(decoder, texts[0], 32), effort.draft_s)
            )
    proof = bench.prove(setting, measured.written)
    rows = [bench.row(row) for row in (*rows_of(measured, plan.streamed_bytes), *rows)]
    say_table(
        ["forward", "s", "stall s", "compute s", "of the ceiling", "slower side"], map(_cells, rows)
    )
    floor_s = measured.floor_s
    print(
        f"the ceiling takes {floor_s:.3f} s for the {plan.streamed_bytes / 1e9:.3f} GB of a sweep"
    )
    timed = {row["name"]: row["sweep_s_samples"] for row in rows if "sweep_s_samples" in row}
    bench.finish(
        rows,
        settings={**setting.as_dict(), **effort._asdict(), "num_threads": num_threads},
        ceiling={
            "bytes_per_s": plan.streamed_bytes / floor_s,
            "sweep_s": floor_s,
            "samples": measured.read_s,
        },
        guards={
            f"{name} / ceiling": Guard([s / floor_s for s in timed[name]], "lower")
            for name in timed
        },
        proof=proof,
    )
