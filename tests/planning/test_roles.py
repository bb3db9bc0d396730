"""Who does what among many ranks, and how their runs follow each other: what adds up, and what is refused."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from offload.errors import UserError
from offload.planning.load_options import LoadOptions
from offload.rank_roles import (
    FixedCutoff,
    PipelineOptions,
    RankInfo,
    Roles,
    find_place,
    free_rows,
    own_value,
    parse_pipeline,
    parse_roles,
    require_exact_rule,
)

READ: list[tuple[Callable[..., object], tuple[Any, ...], object]] = [
    (parse_roles, ("shards", 1), Roles(1)),
    (parse_roles, ("shards", 5), Roles(5)),
    (parse_roles, ("stages:0-2,draft:3", 4), Roles(4, (0, 1, 2), 3)),
    (parse_roles, ("stages:0,1,2", 3), Roles(3, (0, 1, 2))),
    (parse_roles, ("draft:1,stages:2,0", 3), Roles(3, (2, 0), 1)),
    (parse_roles, ("stages:0-2,4,draft:3", 5), Roles(5, (0, 1, 2, 4), 3)),
    (parse_roles, ("stages:0", 1), Roles(1, (0,))),
    (parse_pipeline, ("async",), PipelineOptions()),
    (parse_pipeline, (" Plain ",), PipelineOptions(mode="plain")),
    (parse_pipeline, ("sync,rows=128",), PipelineOptions(mode="sync", micro_batch=128)),
    (parse_pipeline, ("async,rows=8, runs=3",), PipelineOptions(micro_batch=8, credits=3)),
    (parse_pipeline, ("async,cut=0.3/0.4/0.01",), PipelineOptions(cut=FixedCutoff(0.3, 0.4, 0.01))),
    (parse_pipeline, ("async,cut=1/0/0",), PipelineOptions(cut=FixedCutoff(1, 0, 0))),
    (
        parse_pipeline,
        ("async,rows=1024,cut=0/1/0.001",),
        PipelineOptions(micro_batch=1024, cut=FixedCutoff(0, 1, 0.001)),
    ),
    (parse_pipeline, ("async,no-cancel,no-continuous",), PipelineOptions(cancels=False, is_continuous=False)),
]


@pytest.mark.parametrize(("parse", "given", "wanted"), READ)
def test_forms_are_read(parse: Callable[..., object], given: tuple[Any, ...], wanted: object) -> None:
    assert parse(*given) == wanted
    assert not isinstance(wanted, Roles) or wanted.is_sharded == (given[0] == "shards")


ROLES = [
    ("halves", "must be shards or such as stages:0-2,draft:3"),
    ("", "ranks are numbers"),
    ("stages:", "ranks are numbers"),
    ("stages:a-b", "ranks are numbers"),
    ("stages:0-1-2", "ranks are numbers"),
    ("stages:0,,1", "ranks are numbers"),
    ("stages:-1", "ranks are numbers"),
    ("0-2", "ranks are numbers"),
    ("draft:3", "name the stages"),
    ("stages:0-1,draft:2,3", "one draft rank"),
    ("stages:0-1,stages:2-3", "name each role once"),
    ("stage:0-3", "stage is no role"),
    ("shards,draft:3", "ranks are numbers"),
    ("stages:0-1,1-3", "name each rank once"),
    ("stages:0-3,draft:0", "must be no stage"),
    ("stages:0-4", "from 0 to 3, got stages:0-4: start 5 ranks"),
    ("stages:0-2,draft:99", "from 0 to 3"),
    ("stages:0-1", "a role for each of 4 ranks, got stages:0-1: name 2, 3 too"),
    ("stages:3-0", "must rise"),
    ("stages:1-3", "rank 0 in `ranks` must be a stage"),
    ("stages:1-3,draft:0", "name 0 among the stages"),
]


def test_what_stages_cannot_verify_is_refused_and_shards_can() -> None:
    stages, shards = Roles(2, (0, 1)), Roles(2)
    for rule in ("sequoia", "specinfer", "spectr"):
        require_exact_rule(shards, rule, 0.5)
        with pytest.raises(UserError, match=f"`rule` {rule} compares .*use `rule` match"):
            require_exact_rule(stages, rule, 1.0)
    for rule in ("match", "topk"):
        require_exact_rule(stages, rule, 1.0)
        with pytest.raises(UserError, match=r"`lenience` 0\.5 changes .*leave it out"):
            require_exact_rule(stages, rule, 0.5)


@pytest.fixture
def _two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("_two_ranks")
def test_options_know_the_ranks_that_were_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LoadOptions(draft="small", ranks="stages:0,draft:1").roles() == Roles(2, (0,), 1)
    assert LoadOptions().roles() is None and LoadOptions(ranks="shards").experts == "auto"
    with pytest.raises(UserError, match="from 0 to 1"):
        LoadOptions(ranks="stages:0-2")
    with pytest.raises(UserError, match="`rule` sequoia"):
        LoadOptions(ranks="stages:0,1", rule="sequoia")
    monkeypatch.delenv("RANK")
    assert LoadOptions().roles() is None
    with pytest.raises(UserError, match=r"`ranks` needs several processes.*offload launch -n 2 -- generate"):
        LoadOptions(ranks="shards")


@pytest.mark.usefixtures("_two_ranks")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": "shards", "invariant": True}, "`invariant` is promised by one process, got `ranks` shards"),
        ({"ranks": "stages:0-1", "invariant": True}, "`invariant` is promised by one process, got `ranks` stages:0-1"),
        ({"ranks": "stages:0-1", "tree": "64x16"}, "`tree` is for one pass at a time"),
        ({"ranks": "shards", "experts": "demand"}, "`experts` demand works in one process alone, got `ranks` shards"),
        ({"ranks": "shards", "pipeline": "plain"}, "`pipeline` says how stages run"),
    ],
)
def test_what_ranks_cannot_do_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        LoadOptions(**options)


@pytest.mark.usefixtures("_two_ranks")
def test_stages_guess_where_there_is_a_draft_and_a_tree_is_not_ruled_out() -> None:
    def roles(has_draft: bool, **options: Any) -> tuple[str, int | None]:
        roles, pipeline = LoadOptions(draft="small" if has_draft else None, **options).pipeline_roles()
        return pipeline.mode, roles.draft

    assert roles(True, ranks="stages:0-1") == ("async", 0) and roles(True, ranks="stages:0,draft:1") == ("async", 1)
    assert roles(True, ranks="stages:0-1", tree="none") == roles(False, ranks="stages:0-1") == ("plain", None)
    assert roles(True, ranks="stages:0-1", tree="none", pipeline="plain") == ("plain", None)
    with pytest.raises(UserError, match="rank 1 of `ranks` drafts, got no draft: give `draft`"):
        roles(False, ranks="stages:0,draft:1")
    for mode in ("async", "sync"):
        with pytest.raises(UserError, match=f"`pipeline` {mode} guesses, got `tree` none"):
            roles(True, ranks="stages:0-1", tree="none", pipeline=mode)
    with pytest.raises(UserError, match="`pipeline` sync guesses with a draft"):
        roles(False, ranks="stages:0-1", pipeline="sync")


@pytest.mark.usefixtures("_two_ranks")
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "2", "RANK must be less than WORLD_SIZE 2, got 2"),
        ("RANK", "-1", "RANK must be a whole number"),
        ("WORLD_SIZE", "many", "WORLD_SIZE must be a whole number"),
        ("MASTER_ADDR", "", "MASTER_ADDR must be set"),
        ("MASTER_PORT", "9" * 20, "MASTER_PORT must be a whole number"),
        ("MASTER_PORT", "65536", "MASTER_PORT must lie in 1 to 65535, got 65536"),
    ],
)
def test_an_environment_that_cannot_be_is_refused(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_place() == RankInfo(1, 2, 0, 1, 2, "here", 29500)
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words):
        find_place()


def test_of_a_list_each_rank_has_its_own() -> None:
    place = RankInfo(1, 2, 0, 1, 2, "here", 29500)
    assert own_value("8GiB,16GiB", "--ram", place) == "16GiB"
    assert own_value("8GiB", "--ram", place) == "8GiB"
    assert own_value("8GiB,16GiB", "--ram", None) == "8GiB,16GiB", "refused as a size"
    with pytest.raises(UserError, match="--ram must have one value, or one for each of 2 ranks, got 1,2,3"):
        own_value("1,2,3", "--ram", place)


PIPELINES = [
    ("", "plain, sync or async"),
    ("fast", "plain, sync or async"),
    ("async,fast", "settings, each once"),
    ("async,rows=4,rows=5", "settings, each once"),
    ("async,", "settings, each once"),
    ("async,rows=four", "rows of `pipeline` cannot be 'four'"),
    ("async,rows=" + "9" * 5000, "rows of `pipeline`"),
    ("async,rows=0", "rows of `pipeline` must be 1 to 1024"),
    ("sync,rows=1025", "rows of `pipeline` must be 1 to 1024"),
    ("async,runs=-1", "runs of `pipeline` must be 1 to 1024"),
    ("async,no-cancel=yes", "no-cancel of `pipeline` cannot be 'yes'"),
    ("async,cut=0.3", "cut of `pipeline` cannot be '0.3'"),
    ("async,cut=0.3/nan/0", "must lie in [0, 1]"),
    ("async,cut=0.3/2/0", "must lie in [0, 1]"),
    ("async,cut=0.3/0.4/1e-9", "decay of `pipeline` must be 0 or 0.001 at least, got 1e-09"),
    ("sync,runs=2", "runs of `pipeline` goes with async"),
    ("sync,no-cancel", "no-cancel of `pipeline` goes with async"),
    ("plain,no-continuous", "no-continuous of `pipeline` goes with async"),
    ("plain,rows=4", "rows of `pipeline` goes with sync or async"),
    ("plain,cut=0/0/0", "cut of `pipeline` goes with sync or async"),
]
REFUSED = [*((parse_roles, (text, 4), words) for text, words in ROLES),
           *((parse_pipeline, (text,), words) for text, words in PIPELINES)]  # fmt: skip


@pytest.mark.parametrize(("parse", "given", "words"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(
    parse: Callable[..., object], given: tuple[Any, ...], words: str
) -> None:
    with pytest.raises(UserError, match=r"`ranks`|`pipeline`") as refusal:
        parse(*given)
    line = str(refusal.value)
    assert words in line and "\n" not in line and len(line) < 400


def test_free_rows_and_numbers_of_runs() -> None:
    assert [free_rows(times) for times in ([1, 1, 1, 1, 1], [1, 1.1, 1.2, 2, 4], [1, 2], [1])] == [32, 4, 1, 1]
    # Numbers follow from the mode where none are named.
    assert [PipelineOptions(mode=mode).num_runs(3) for mode in ("plain", "sync", "async")] == [1, 1, 4]
    assert [PipelineOptions(mode=mode).num_rows(16) for mode in ("plain", "sync", "async")] == [1, 64, 16]
    assert parse_pipeline("async,rows=2,runs=9").num_rows(16) == 2
    assert parse_pipeline("async,rows=2,runs=9").num_runs(3) == 9
    assert not PipelineOptions(mode="plain").speculates
