"""What a resident 4-bit copy of the target is worth: as a draft in tiers, and as half of the file.

The packaged target is inflated, packed without loss, and packed beside its copy. In each study all
cases are open at once and take turns, prompt by prompt, with the same memory each. Each case has a
decoder of its own, since it would learn from the passes of others.
"""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, NamedTuple, cast

import torch

from offload.bench.harness.command import Bench, Effort, Findings, command, flag, one_of
from offload.bench.harness.gate import Written
from offload.bench.harness.metrics import per_pass
from offload.bench.harness.prompts import Prompt, encoded
from offload.bench.harness.rates import plain_write_s
from offload.bench.harness.setting import PROMPT_TOKENS, Setting
from offload.bench.harness.tables import Better, Column, Row, check, medians, ratios, values
from offload.bench.latency.quantised import BESIDE, PACKED, PLAIN, quantised
from offload.bench.peers.child import drop_pages
from offload.engine.decoder import Decoder
from offload.packing.pack import pack
from offload.sampling_options import Sampling
from offload.timer import timed

COPY = "self:int4"
SMALL = "small"
_CONTEXT = 512
_LARGEST = "dynamic:128x64"
_RESIDENT = "resident"
_LEAST_PASSES = 4
# what the context has room for behind a prompt, and the largest tree
_MOST_TOKENS = 256
_WRITE_BYTES = 400_000_000
FULL = Effort(num_prompts=3, num_tokens=96, num_plain=8, limit_s=40.0)
QUICK = Effort(num_prompts=1, num_tokens=48, num_plain=5, limit_s=10.0)


class Case(NamedTuple):
    """One way to write a text, with the same memory as the others."""

    name: str
    form: str = PLAIN  # of the target, see `quantised`
    draft: str = COPY
    tree: str = "auto"
    lookup: bool | None = None  # None: as the program has it


class Wanted(NamedTuple):
    """The best of some cases over the best of others, at every place and temperature.

    Args:
        chosen_by: the figure by which the first one is chosen, where that is not the one compared.
    """

    name: str
    figure: str
    ours: Sequence[str]
    others: Sequence[str]
    limit: float
    better: Better = "lower"
    chosen_by: str = ""

    def checks(self, rows: Sequence[Row], runs: Sequence[Row]) -> list[Row]:
        """Return the ratio of medians, with those of every prompt, for each setting of `rows`."""
        best = min if self.better == "lower" else max
        verdicts = []
        for place, temperature in dict.fromkeys((row["place"], row["temperature"]) for row in rows):
            where = {"place": place, "temperature": temperature}
            row_of = {row["case"]: row for row in rows if where.items() <= row.items()}
            medians_of = {case: row[self.figure] for case, row in row_of.items()}
            ours = best(self.ours, key=lambda case: row_of[case][self.chosen_by or self.figure])
            other = best(self.others, key=medians_of.__getitem__)
            samples = (values(runs, self.figure, case=case, **where) for case in (ours, other))
            name = f"{self.name}, {place}, T = {temperature:g}"
            value = medians_of[ours] / medians_of[other]
            verdict = check(name, ratios(*samples), self.limit, self.better, value)
            verdicts.append({**verdict, "notes": [f"{ours} / {other}"]})
        return verdicts


class Study(NamedTuple):
    cases: Sequence[Case]
    wanted: Sequence[Wanted]
    # limits of the link, or what is else of a place
    places: Sequence[str]
    temperatures: Sequence[float] = (0.0, 0.7)


_FIXED = (
    *("dynamic:8x7", "dynamic:16x15", "dynamic:32x31"),
    *("dynamic:64x16", "dynamic:64x63", _LARGEST),
)
_HALF_FIXED = ("dynamic:32x31", "dynamic:64x63")
_OTHERS = ("bf16, small", "packed, small", "bf16, copy")
_WAYS = ("residual, copy", *_OTHERS)
_LINKS = ("250MB/s", "100MB/s")
_FREE = "free link"
_ALONE, _LOOKUP, _SCOUT = "copy alone", "and lookup", "and small"
STUDIES = {
    "tiers": Study(
        [
            Case(_ALONE, tree="dynamic:64x63", lookup=False),
            Case(_LOOKUP, tree="dynamic:64x63", lookup=True),
            Case(_SCOUT, draft=f"{COPY}+{SMALL}", tree="dynamic:64x63", lookup=True),
        ],
        [
            Wanted("tokens a pass", "tokens_per_pass", [_SCOUT], [_ALONE], 0.95, "higher"),
            Wanted("passes of the copy a step", "copy_passes", [_SCOUT], [_ALONE], 0.35),
            Wanted("drafting of a step", "draft_s", [_SCOUT], [_ALONE], 0.40),
        ],
        [_FREE],
    ),
    "pass": Study(
        [
            Case("residual", BESIDE, tree="none"),
            Case("bf16", draft=SMALL, tree="none"),
            Case("bf16, copy", tree="none"),
        ],
        [
            Wanted("pass", "pass_s", ["residual"], ["bf16"], 0.60),
            Wanted("pass, a copy in both", "pass_s", ["residual"], ["bf16, copy"], 0.60),
        ],
        _LINKS,
        [0.0],
    ),
    "token": Study(
        [
            Case("residual, copy", BESIDE),
            Case("residual, copy, small", BESIDE, f"{COPY}+{SMALL}"),
            *(Case(tree, BESIDE, f"{COPY}+{SMALL}", tree) for tree in _HALF_FIXED),
            Case("bf16, small", draft=SMALL),
            Case("packed, small", PACKED, SMALL),
            Case("bf16, copy"),
        ],
        [
            Wanted("s a token", "token_s", ["residual, copy"], _OTHERS, 0.60),
            Wanted("... in tiers", "token_s", ["residual, copy, small"], _OTHERS, 0.60),
            Wanted("... best fixed tree", "token_s", _HALF_FIXED, _OTHERS, 0.60),
        ],
        _LINKS,
    ),
    "auto": Study(
        [Case("auto"), *(Case(tree, tree=tree) for tree in _FIXED)],
        [Wanted("s a token", "token_s", ["auto"], _FIXED, 1.07)],
        ["250MB/s", _FREE, _RESIDENT],
        [0.7],
    ),
    "planner": Study(
        [
            Case("residual, copy", BESIDE),
            Case("bf16, small", draft=SMALL),
            Case("packed, small", PACKED, SMALL),
            Case("bf16, copy"),
        ],
        [Wanted("planned / best", "token_s", _WAYS, _WAYS, 1.07, chosen_by="predicted_s")],
        [*_LINKS, _FREE, _RESIDENT],
        [0.7],
    ),
}
PACKING = "packing"
PASSES = "passes"
_PASS_ROWS = (1, 8, 16)
_PASSES_A_ROUND = 5
_READING = "reading as many bytes"
# bytes written over the disk's own rate
_LEAST_PACKING = 0.7


_EVERY = (*STUDIES, PASSES, PACKING)


def opened(setting: Setting, case: Case, place: str) -> Decoder:
    """Open a decoder for a case. Raises `UserError`."""
    draft = case.draft.replace(SMALL, str(setting.draft))
    ram = setting.ram_bytes
    if place == _RESIDENT:
        ram += 2 * sum(path.stat().st_size for path in setting.shards)
    limit = None if place in (_FREE, _RESIDENT) else place
    target = quantised(setting.target, case.form)
    # `load` takes a name as well
    used = setting._replace(target=target, draft=cast(Path, draft), ram_bytes=ram)
    return used.open(case.tree, context=_CONTEXT, lookup=case.lookup, link_limit=limit)


def measured(
    decoder: Decoder, case: Case, prompt: Prompt, sampling: Sampling, effort: Effort
) -> tuple[Row, Written]:
    """Return the figures of a text behind its prompt's pass, and the text.

    It ends when it is long enough or has taken long enough, but has some passes in any case.
    """
    ids = encoded(decoder, prompt, PROMPT_TOKENS)
    run = decoder.run(ids, sampling, max_new_tokens=_MOST_TOKENS, tree=case.tree)
    stats = run.sequence.stats
    copy_passes = 0
    for _ in run:
        copy_passes += len(decoder.drafter.widths) if stats.num_sweeps else 0
        is_long = run.sequence.num_new >= effort.length(case.tree)
        if stats.num_sweeps >= _LEAST_PASSES and (is_long or stats.decode_s > effort.limit_s):
            break
    got = run.result()
    tree = f"{got.stats.tree_num_nodes}x{got.stats.tree_depth}"
    mean_passes = copy_passes / max(1, got.stats.num_sweeps)
    row: Row = {"tree": tree, **per_pass(got.stats), "copy_passes": mean_passes}
    return row, Written.from_result(ids, got)


def compare(
    bench: Bench, setting: Setting, study: Study, prompts: Sequence[Prompt], effort: Effort
) -> tuple[list[Row], list[Written]]:
    """Return a row for every text of a study, at all its places, and the texts."""
    rows = list[Row]()
    written = list[Written]()
    for place in study.places:
        with ExitStack() as stack:
            decoders = dict[Case, Decoder]()
            for case in study.cases:
                bench.screen.wait(f"{place}: opening {case.name}")
                decoders[case] = stack.enter_context(opened(setting, case, place))
            predicted = {
                (case, temperature): predicted_s(decoders[case], temperature)
                for case, temperature in product(study.cases, study.temperatures)
            }
            rounds = product(enumerate(prompts), study.temperatures)
            for ((seed, prompt), temperature), case in bench.turns(rounds, study.cases, place):
                sampling = Sampling(temperature=temperature, seed=seed)
                row, text = measured(decoders[case], case, prompt, sampling, effort)
                head = {"place": place, "temperature": temperature, "case": case.name}
                row["predicted_s"] = predicted[case, temperature]
                rows.append({**head, "prompt": prompt.name, **row})
                bench.note(rows[-1])
                written.append(text)
    return rows, written


def predicted_s(decoder: Decoder, temperature: float) -> float | None:
    """Return the seconds of a token that are predicted at load; None where no tree is chosen."""
    candidates = decoder.tree_choice(Sampling(temperature=temperature)).candidates
    return candidates[0].s_per_token if candidates else None


def packed(bench: Bench, target: Path, rounds: int) -> list[Row]:
    """Return the rate at which each form is written, beside the disk's own in the same minutes."""
    rows = list[Row]()
    write_s = [plain_write_s(target.parent, _WRITE_BYTES)]
    for number, form in bench.turns(range(rounds), (PACKED, BESIDE), "packing"):
        with tempfile.TemporaryDirectory(dir=target.parent) as name:
            drop_pages(target)
            began_s = perf_counter()
            beside = "int4" if form == BESIDE else None
            done = pack(target, Path(name) / form, beside=beside, progress=lambda *_: None)
            seconds = perf_counter() - began_s
        write_s.append(plain_write_s(target.parent, _WRITE_BYTES))
        disk = _WRITE_BYTES / median(write_s[-2:])
        rate = done.packed_bytes / seconds
        rows.append({"case": form, "round": number, "bytes_per_s": rate, "disk_bytes_per_s": disk})
        rows[-1]["of_disk"] = rate / disk
        bench.note(rows[-1])
    return rows


def pass_times(bench: Bench, setting: Setting, rounds: int) -> list[Row]:
    """Return the seconds of the copy's passes by their rows, and of reading its bytes from memory."""
    rows = list[Row]()
    with opened(setting, Case(COPY), _FREE) as decoder:
        model = decoder.drafter.model
        assert model is not None, "a copy is one"
        num_bytes = decoder.drafter.num_bytes
        memory = torch.ones(num_bytes // 8, dtype=torch.int64)
        cache = model.new_cache(_CONTEXT)
        model.forward_chain(torch.arange(PROMPT_TOKENS), cache, num_logits=1)
        cache.commit(range(PROMPT_TOKENS))
        for number, num_rows in bench.turns(range(rounds), (0, *_PASS_ROWS), PASSES):

            def work(num_rows: int = num_rows) -> None:
                if num_rows:
                    model.forward_chain(torch.arange(num_rows), cache)
                    cache.commit(())
                else:
                    memory.sum()

            seconds = min(timed(work) for _ in range(_PASSES_A_ROUND))
            name = f"{num_rows} rows" if num_rows else _READING
            rows.append({"case": name, "round": number, "pass_s": seconds})
            rows[-1]["bytes_per_s"] = num_bytes / seconds
            bench.note(rows[-1])
    return rows


def pass_checks(rows: Sequence[Row]) -> list[Row]:
    """Return the times of passes over those that bound them."""
    seconds = {case: values(rows, "pass_s", case=case) for case in {row["case"] for row in rows}}
    bounds = (("1 rows", _READING, 1.2), ("8 rows", "1 rows", 1.5), ("16 rows", "1 rows", 2.2))
    return [
        check(f"{case} / {other}", ratios(seconds[case], seconds[other]), limit, "lower")
        for case, other, limit in bounds
    ]


COLUMNS = (
    Column("place", "place"),
    Column("T", "temperature", "g"),
    Column("case", "case"),
    Column("tree", "tree"),
    Column("s a token", "token_s", ".4f"),
    Column("as predicted", "predicted_s", ".4f"),
    Column("tokens a pass", "tokens_per_pass", ".2f"),
    Column("s a pass", "pass_s", ".3f"),
    Column("waiting s", "stall_s", ".3f"),
    Column("GB a pass", "pass_bytes", ".2f", 1e9),
    Column("drafting s", "draft_s", ".3f"),
    Column("passes of the draft", "copy_passes", ".1f"),
)
WRITING = (
    Column("packed", "case"),
    Column("MB/s written", "bytes_per_s", ".0f", 1e6),
    Column("the disk, MB/s", "disk_bytes_per_s", ".0f", 1e6),
    Column("of it", "of_disk", ".2f"),
)


TIMES = (
    Column("pass of the copy", "case"),
    Column("ms", "pass_s", ".1f", 1e-3),
    Column("its GB/s", "bytes_per_s", ".1f", 1e9),
)


@command(
    *("copy", "size ram source num_prompts max_tokens quick compare"),
    examples=["offload bench copy --only tiers", "offload bench copy --only pass --ram 1600MiB"],
)
def main(
    bench: Bench,
    only: Annotated[
        list[str] | None,
        flag("STUDY", f"of {', '.join(_EVERY)}; several", "--only"),
    ] = None,
    place: Annotated[
        list[str] | None, flag("PLACE", f"a limit of the link, '{_FREE}' or {_RESIDENT}; several")
    ] = None,
    temp: Annotated[list[float] | None, flag("T", "temperature; several")] = None,
) -> Findings:
    """Passes, drafting and seconds of a token with a 4-bit copy of the target, in turns."""
    one_of(only or (), _EVERY, "--only")
    chosen = only or _EVERY
    effort = bench.effort(FULL, QUICK)
    effort = replace(effort, num_tokens=bench.given.max_tokens or effort.num_tokens)
    prompts = bench.prompts(effort.num_prompts)
    setting = bench.setting(ram=bench.given.ram or "1500MiB")
    bench.begin(setting, num_new_tokens=effort.num_tokens)
    findings = Findings(rows=[])
    checks = list[Row]()
    written = list[Written]()
    with bench.screen:
        for name in filter(STUDIES.__contains__, chosen):
            study = STUDIES[name]
            study = study._replace(
                places=place or study.places, temperatures=temp or study.temperatures
            )
            runs, texts = compare(bench, setting, study, prompts, effort)
            rows = medians(runs, "place", "temperature", "case")
            findings.add([{"study": name, **row} for row in rows], COLUMNS)
            checks += [each for wanted in study.wanted for each in wanted.checks(rows, runs)]
            written += texts
        if PASSES in chosen:
            rows = pass_times(bench, setting, effort.num_prompts + 2)
            times = medians(rows, "case")
            findings.add([{"study": PASSES, **row} for row in times], TIMES)
            checks += pass_checks(rows)
        if PACKING in chosen:
            rows = packed(bench, setting.target, effort.num_prompts)
            findings.add([{"study": PACKING, **row} for row in rows], WRITING)
            for form in (PACKED, BESIDE):
                shares = values(rows, "of_disk", case=form)
                name = f"{form}: bytes written / the disk's own rate"
                checks.append(check(name, shares, _LEAST_PACKING, "higher"))
    return replace(findings, checks=checks, written=written)
