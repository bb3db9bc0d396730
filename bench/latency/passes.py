"""Seconds of one pass against its rows: the target beside its link, the draft beside its memory.

Passes of all sizes take turns on one text, round after round, with a plain reader of as many bytes
in between (on a device: copies to it): the time that it takes is the floor under every pass. The
draft reads its weights once per pass, so it cannot be faster than memory, unless they stay in the
processor's cache: its share of the ceiling may lie above 1.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from offload.bench.harness.command import Bench, Findings, command, link_ceiling
from offload.bench.harness.gate import Written
from offload.bench.harness.models import PRETEND
from offload.bench.harness.prompts import Prompt, encoded
from offload.bench.harness.rates import flops_per_s, memory_bytes_per_s, plain_read_s
from offload.bench.harness.setting import PROMPT_TOKENS, Need, Setting
from offload.bench.harness.steps import Pass, PassRunner, draft_passes
from offload.bench.harness.tables import Column, Guard, Row
from offload.checkpoint.sizes import model_shape
from offload.engine.decoder import Decoder
from offload.model.headers import describe

# the link counts as the slower side where a pass waits for it longer than this share
_STALLED_SHARE = 0.05
_CONTEXT = 512


class Effort(NamedTuple):
    sizes: tuple[int, ...]
    rounds: int
    # passes of every size in a round
    passes: int
    draft_s: float  # time for the draft's curve


FULL = Effort((1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512), 6, 3, 6.0)
QUICK = Effort((1, 16, 64, 128, 256), 3, 2, 1.5)
REHEARSAL = Effort((1, 8, 24), 1, 2, 0.5)
ON_DEVICE = Effort((1, 64, 768, 2048), 1, 3, 6.0)


class Measured(NamedTuple):
    passes: list[Pass]
    # seconds of the passes that take a prompt in
    prompt_s: list[float]
    # a plain reader or copies of a sweep's bytes, before every round and after the last
    read_s: list[float]
    written: list[Written]

    def by_size(self) -> dict[int, list[Pass]]:
        sizes = sorted({timed.num_rows for timed in self.passes})
        return {size: [timed for timed in self.passes if timed.num_rows == size] for size in sizes}

    @property
    def floor_s(self) -> float | None:
        """The median reading, or less where a pass took less: that shows what the link gave.

        None where nothing is streamed.
        """
        if not self.read_s:
            return None
        sweeps = [
            median(timed.seconds for timed in timed_passes)
            for timed_passes in self.by_size().values()
        ]
        return min(median(self.read_s), median(self.prompt_s), *sweeps)


def measure(
    setting: Setting,
    decoder: Decoder,
    texts: Sequence[Prompt],
    effort: Effort,
    bench: Bench | None = None,
) -> Measured:
    """Measure all rounds; with a bench each size is noted when it was measured."""

    measured = Measured([], [], [], [])

    def read_once() -> None:
        num_bytes = decoder.plan.streamed_bytes
        is_read = num_bytes and not setting.opened.has_own_memory and not setting.is_synthetic
        if is_read:
            measured.read_s.append(plain_read_s(setting.shards, num_bytes))
        elif rate := link_ceiling(setting, decoder.plan):
            measured.read_s.append(num_bytes / rate)

    read_once()
    for index in range(effort.rounds):
        ids = encoded(decoder, texts[index % len(texts)], PROMPT_TOKENS)
        # finds the slots that were filled while the plain reader ran
        PassRunner(decoder, ids[:1]).run(1)
        runner = PassRunner(decoder, ids)
        measured.prompt_s.append(runner.run(1).seconds)
        for size in effort.sizes:
            done = [runner.run(size) for _ in range(effort.passes)]
            measured.passes.extend(done)
            if bench is not None:
                sweep_s = median(timed.seconds for timed in done)
                bench.note({"name": f"sweep of {size} rows", "sweep_s": sweep_s})
        measured.written.append(runner.written())
        read_once()
        if bench is not None:
            bench.screen.count(index + 1, effort.rounds, "timing passes")
    return measured


def rows_of(measured: Measured, streamed_bytes: int) -> Iterator[Row]:
    """Return medians for every size, the prompt's pass last."""
    floor_s = measured.floor_s

    def row(name: str, num_nodes: int, seconds: list[float]) -> Row:
        figures = {"name": name, "num_nodes": num_nodes, "sweep_s": median(seconds)}
        used = floor_s and floor_s / median(seconds)
        return {**figures, "sweep_s_samples": seconds, "link_utilisation": used}

    for size, timed_passes in measured.by_size().items():
        figures = row(f"sweep of {size} rows", size, [timed.seconds for timed in timed_passes])
        stall_s = median(timed.stall_s for timed in timed_passes)
        is_linked = streamed_bytes > 0 and stall_s > _STALLED_SHARE * figures["sweep_s"]
        yield figures | {
            "stall_s": stall_s,
            "compute_s": figures["sweep_s"] - stall_s,
            "bytes_moved": timed_passes[0].num_bytes,
            "limit": "link" if is_linked else "compute",
        }
    yield row("sweep of a prompt", PROMPT_TOKENS, measured.prompt_s)


def draft_rows(
    setting: Setting, decoder: Decoder, prompt_ids: Sequence[int], budget_s: float
) -> Iterator[Row]:
    """Return a pass of the draft against its rows, beside reading its weights once."""
    assert setting.draft is not None, "there is a draft"
    shape = model_shape(describe(setting.draft))
    weight_bytes = sum(shape.layer_bytes) + shape.head_bytes
    rate = memory_bytes_per_s(setting.opened, weight_bytes)
    least_s = weight_bytes / rate
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
    """Return the least time of this many rows' products, at the rate of the largest matrix."""
    target = describe(setting.target)
    sizes = target.config["intermediate_size"], target.config["hidden_size"]
    return 2 * model_shape(target).num_weights * num_rows / flops_per_s(setting.opened, *sizes)


COLUMNS = (
    Column("forward", "name"),
    Column("s", lambda row: row.get("sweep_s", row.get("draft_step_s")), ".4f"),
    Column("stall s", "stall_s", ".3f"),
    Column("compute s", "compute_s", ".3f"),
    Column("of the ceiling", lambda row: row.get("link_utilisation", row.get("of_ceiling")), ".3f"),
    Column("slower side", lambda row: "memory" if "draft_step_s" in row else row.get("limit")),
)


@command(
    *("passes", "models place source quick compare"),
    examples=["offload bench passes --quick --json passes.json"],
)
def main(bench: Bench) -> Findings:
    """How long does a forward of target and draft take for many rows, and is the link busy?"""
    setting = bench.setting(need=Need(f"{max(FULL.sizes)}x24", context=_CONTEXT))
    on = {"cpu": bench.effort(FULL, QUICK), PRETEND: REHEARSAL}
    effort = on.get(setting.device, ON_DEVICE)
    if setting.draft is None:
        # memory is planned for no tree
        effort = effort._replace(sizes=(1,))
    texts = bench.prompts(effort.rounds)
    bench.begin(setting, **effort._asdict())
    drafted = list[Row]()
    tree = "none" if setting.draft is None else f"{max(effort.sizes)}x24"
    with bench.screen, setting.open(tree, context=_CONTEXT) as decoder:
        plan = decoder.plan
        num_threads = decoder.num_threads
        bench.say_link(setting, plan)
        measured = measure(setting, decoder, texts, effort, bench)
        if setting.draft is not None:
            ids = encoded(decoder, texts[0], 32)
            drafted += draft_rows(setting, decoder, ids, effort.draft_s)
    timed = [*rows_of(measured, plan.streamed_bytes)]
    note = "nothing is streamed: no link is a ceiling"
    ceiling: Row = {"bytes_per_s": None}
    guards = dict[str, Guard]()
    if (floor_s := measured.floor_s) is not None:
        moved = f"the {plan.streamed_bytes / 1e9:.3f} GB of a sweep"
        note = f"the ceiling takes {floor_s:.3f} s for {moved}"
        rate = plan.streamed_bytes / floor_s
        ceiling = {"bytes_per_s": rate, "sweep_s": floor_s, "samples": measured.read_s}
        for row in timed:
            over = [sample_s / floor_s for sample_s in row["sweep_s_samples"]]
            guards[f"{row['name']} / ceiling"] = Guard(over, "lower")
    rows = [*timed, *drafted]
    return Findings(
        rows=rows,
        tables=[(COLUMNS, rows)],
        written=measured.written,
        notes=[note],
        settings={"num_threads": num_threads},
        ceiling=ceiling,
        guards=guards,
    )
