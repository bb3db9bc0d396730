"""Many texts at a time: tokens per second over all, beside the same texts one after another.

The same prompts are written with every number of places, in turns, because disks drift. A text must
have the ids that it has alone where its bits are promised, else it is proved like any other.
"""

from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter
from typing import Annotated, NamedTuple

from offload.bench.harness.command import Bench, Effort, Findings, command, flag
from offload.bench.harness.gate import Written
from offload.bench.harness.prompts import Prompt, encoded
from offload.bench.harness.setting import PROMPT_TOKENS, Need, Setting
from offload.bench.harness.tables import Column, Guard, Row, medians, ratios, values
from offload.engine.generation import Generation, Run
from offload.engine.request import Request
from offload.engine.scheduler import write_all
from offload.errors import UserError
from offload.sampling_options import Sampling

CONTEXT = 512
ALONE = "alone"
FOREST = "forest"


FULL = Effort(rounds=5, num_plain=24, num_tokens=96)
QUICK = Effort(rounds=1, num_plain=8, num_tokens=48)


class Case(NamedTuple):
    name: str
    tree: str
    parallel: int


def run_case(
    setting: Setting, case: Case, prompts: Sequence[Prompt], num_new: int
) -> tuple[Row, list[Written]]:
    """Return figures of all texts, and the texts.

    What counts are the passes behind the first tokens while all texts are under way, as a queue
    would see them.
    """
    by_number = dict[int, Generation]()
    marks = list[tuple[float, dict[int, int]]]()
    with setting.open(case.tree, parallel=case.parallel, context=CONTEXT) as decoder:
        ids = [encoded(decoder, prompt, PROMPT_TOKENS) for prompt in prompts]
        places = min(decoder.num_parallel, len(ids))

        def on_pass(runs: Sequence[Run]) -> None:
            news = {id(run): run.sequence.num_new for run in runs if run.is_writing}
            are_under_way = len(news) == places and all(news.values())
            marks.append((perf_counter(), news if are_under_way else {}))

        requests = [Request(text_ids, Sampling(), num_new) for text_ids in ids]
        for number, outcome in write_all(decoder, requests, on_pass):
            assert isinstance(outcome, Generation), str(outcome)
            by_number[number] = outcome
        is_invariant = decoder.invariance.holds
    results = [by_number[number] for number in range(len(ids))]
    steps = [
        (after_s - before_s, sum(after.values()) - sum(less.values()))
        for (before_s, less), (after_s, after) in pairwise(marks)
        if less and less.keys() == after.keys()
    ]
    if not steps:
        requirement = (
            "bench many counts passes in which every text is under way, and there was none"
        )
        raise UserError(
            f"{requirement}: give --prompts that are gone on with for longer, or less --parallel"
        )
    seconds = sum(step_s for step_s, _ in steps)
    num_tokens = sum(num_more for _, num_more in steps)
    sweep_s = sum(result.stats.sweep_s for result in results)
    row = {
        **case._asdict(),
        "tokens_per_s": num_tokens / seconds,
        "tokens_per_pass": num_tokens / len(steps),
        "pass_s": seconds / len(steps),
        "num_nodes": results[0].stats.tree_num_nodes,
        "is_invariant": is_invariant,
        "stall_share": sum(result.stats.stall_s for result in results) / max(1e-9, sweep_s),
    }
    return row, [
        Written.from_result(text_ids, result) for text_ids, result in zip(ids, results, strict=True)
    ]


COLUMNS = (
    Column("texts", "name"),
    Column("tree", "tree"),
    Column("at a time", "parallel"),
    Column("tokens/s", "tokens_per_s", ".2f"),
    Column("tokens a pass", "tokens_per_pass", ".2f"),
    Column("s a pass", "pass_s", ".3f"),
    Column("waiting", "stall_share", ".0%"),
)


@command(
    *("many", "model draft size ram device gpu_mem source quick"),
    examples=["offload bench many --quick --size 2GB"],
)
def main(
    bench: Bench,
    parallel: Annotated[int, flag("B", "texts at a time", min=2)] = 8,
    tree: Annotated[str, flag("TREE", "of each text; auto is the best for each case")] = "auto",
) -> Findings:
    """Tokens per second over many texts, written at a time and one after another."""
    need = Need(tree, context=CONTEXT, parallel=parallel)
    effort = bench.effort(FULL, QUICK)
    prompts = bench.prompts(parallel)
    setting = bench.setting(needs_draft=True, need=need)
    bench.begin(setting, parallel=parallel, tree=tree)
    if setting.opened.has_own_memory:
        with setting.open(tree, parallel=parallel, context=CONTEXT) as decoder:
            bench.say_link(setting, decoder.plan)
    cases = [
        Case(name, shape, places)
        for shape in dict.fromkeys(("none", tree))
        for name, places in ((ALONE, 1), (FOREST, parallel))
    ]
    rows = list[Row]()
    written = list[Written]()
    for number, case in bench.turns(range(effort.rounds), cases, "writing"):
        row, texts = run_case(setting, case, prompts, effort.length(case.tree))
        rows.append({**row, "round": number})
        bench.note(rows[-1])
        written += texts
    guards = dict[str, Guard]()
    # how many times as many tokens a second, round by round
    for shape in dict.fromkeys(case.tree for case in cases):
        speeds = (values(rows, "tokens_per_s", tree=shape, name=name) for name in (FOREST, ALONE))
        label = "no tree" if shape == "none" else f"tree {shape}"
        guards[f"{parallel} texts / one, {label}"] = Guard(ratios(*speeds), "higher")
    return Findings(
        rows=rows,
        tables=[(COLUMNS, medians(rows, *Case._fields))],
        written=written,
        guards=guards,
    )
