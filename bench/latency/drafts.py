"""What is the quickest way to draft, and does `--draft auto` take it?

The packaged target is inflated with its MTP layer, and a small draft lies beside it. No draft,
lookup, the carried layer, the small draft and the target's own copy take turns on three places: a
slow link, a fast one, and memory for all. What `auto` chose is read off what it says; the seconds
are those of the way that it chose, in the same turns.
"""

import shutil
from typing import Annotated, Any, NamedTuple

from offload.bench.harness.command import Bench, Effort, Findings, command, flag
from offload.bench.harness.gate import Written
from offload.bench.harness.prompts import Prompt, encoded
from offload.bench.harness.setting import PROMPT_TOKENS, Setting
from offload.bench.harness.tables import Column, Row, check, medians, values
from offload.checkpoint.packaged import PAIR, inflated_target
from offload.engine.decoder import Decoder
from offload.engine.request import Request
from offload.sampling_options import Sampling
from offload.units import parse_rate, parse_size

NONE, LOOKUP, CARRIED, COPY, SMALL = "none", "lookup", "mtp", "self:int4", "small"
WAYS = (NONE, LOOKUP, CARRIED, SMALL, COPY)
LEAST_SHARE = 0.95
MOST_OFF = 1.07
_CONTEXT = 512
_SMALL_FOLDER = "demo-small-draft"
_LEAST_PASSES = 4
FULL = Effort(rounds=3, num_tokens=160, limit_s=20.0)
QUICK = Effort(rounds=1, num_tokens=48, limit_s=6.0)


class Place(NamedTuple):
    """Where ways are compared: how quick the link is, and whether all of the target stays."""

    name: str
    link_limit: str | None = None
    is_resident: bool = False


PLACES = (Place("slow link", "250MB/s"), Place("fast link"), Place("resident", is_resident=True))


def opened(setting: Setting, place: Place, way: str, sampling: Sampling) -> Decoder:
    """Open a decoder for such texts that drafts in this way, or by trials. Raises `UserError`."""
    drafts: dict[str, Any] = {NONE: None, LOOKUP: None, SMALL: setting.draft}
    ram = setting.ram_bytes
    if place.is_resident:
        ram += 2 * sum(path.stat().st_size for path in setting.shards)
    chosen = setting._replace(draft=drafts.get(way, way), ram_bytes=ram)
    limit = parse_rate(place.link_limit, "--link-limit")
    return chosen.open(
        "none" if way == NONE else "auto",
        context=_CONTEXT,
        lookup=way != NONE,
        link_limit=limit,
        request=Request(sampling=sampling),
    )


def measured(
    decoder: Decoder, prompt: Prompt, sampling: Sampling, effort: Effort
) -> tuple[Row, Written]:
    """Return seconds of a token behind the first passes, cut after a while, and the text."""
    ids = encoded(decoder, prompt, PROMPT_TOKENS)
    run = decoder.run(ids, sampling, max_new_tokens=effort.num_tokens)
    for _ in run:
        stats = run.sequence.stats
        if stats.num_sweeps >= _LEAST_PASSES and stats.decode_s > effort.limit_s:
            break
    got = run.result()
    tree = f"{got.stats.tree_num_nodes}x{got.stats.tree_depth}"
    row: Row = {
        "token_s": got.stats.tpot_s,
        "tokens_per_pass": got.stats.tokens_per_sweep,
        "pass_s": got.stats.sweep_s / max(1, got.stats.num_sweeps),
        "draft_s": got.stats.draft_s / max(1, got.stats.num_sweeps),
        "tree": tree,
    }
    return row, Written.from_result(ids, got)


def chosen_by_trials(setting: Setting, place: Place, sampling: Sampling) -> str:
    """Return the way that `auto` takes; its lookup alone is what it calls none."""
    with opened(setting, place, "auto", sampling) as decoder:
        (said,) = (note for note in decoder.notes if note.startswith("draft "))
    name = said.removeprefix("draft ").partition(",")[0]
    return {NONE: LOOKUP, _SMALL_FOLDER: SMALL}.get(name, name)


COLUMNS = (
    Column("place", "place"),
    Column("draft", "way"),
    Column("tree", "tree"),
    Column("s a token", "token_s", ".4f"),
    Column("of the best", "of_best", ".2f"),
    Column("tokens a pass", "tokens_per_pass", ".2f"),
    Column("s a pass", "pass_s", ".3f"),
    Column("drafting s", "draft_s", ".3f"),
    Column("auto", lambda row: "*" if row["is_chosen"] else ""),
)


@command("drafts", "quick source", examples=["offload bench drafts --quick"])
def main(
    bench: Bench,
    size: Annotated[str, flag("SIZE", "of the target")] = "1GB",
    ram: Annotated[str, flag("SIZE", "memory budget where layers stream")] = "750MB",
    temperature: Annotated[float, flag("T", "of all texts")] = 0.7,
) -> Findings:
    """Seconds of a token with each way to draft, in turns, and which of them `auto` takes."""
    effort = bench.effort(FULL, QUICK)
    prompt = bench.prompts(1)[0]
    with bench.screen as screen:
        num_bytes = parse_size(size, "--size")
        target = inflated_target(num_bytes, screen.make_target)
    small = target.with_name(_SMALL_FOLDER)
    shutil.copytree(PAIR / "draft", small, dirs_exist_ok=True)
    setting = Setting(target, small, PAIR / "target", parse_size(ram, "--ram"))
    bench.begin(setting, temperature=temperature)
    sampling = Sampling(temperature=temperature, seed=1)
    rows = list[Row]()
    written = list[Written]()
    for place in PLACES:
        every = list[Row]()
        for _, way in bench.turns(range(effort.rounds), WAYS, f"{place.name}: decoding"):
            with opened(setting, place, way, sampling) as decoder:
                row, text = measured(decoder, prompt, sampling, effort)
            every.append({"way": way, **row})
            written.append(text)
        bench.screen.wait(f"{place.name}: trials")
        choice = chosen_by_trials(setting, place, sampling)
        by_way = medians(every, "way")
        best_s = min(values(by_way, "token_s"))
        for row in by_way:
            row |= {"place": place.name, "of_best": row["token_s"] / best_s}
            row["is_chosen"] = row["way"] == choice
            rows.append(row)
            bench.note(row)
    (share,) = (
        values(rows, "token_s", place="fast link", way=CARRIED)[0] / other_s
        for other_s in values(rows, "token_s", place="fast link", way=SMALL)
    )
    off = values(rows, "of_best", is_chosen=True)
    return Findings(
        rows=rows,
        tables=[(COLUMNS, rows)],
        written=written,
        checks=[
            check("fast link: mtp / small draft, s a token", [share], LEAST_SHARE, "lower", share),
            check("auto / best of five, s a token", off, MOST_OFF, "lower", max(off)),
        ],
    )
