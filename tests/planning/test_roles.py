"""Who does what among many ranks: what adds up, and what is refused."""

import re
from typing import Any

import pytest

from offload.errors import UserError
from offload.planning.options import LoadOptions, check_models
from offload.rank_roles import (
    RankInfo,
    Roles,
    find_place,
    own_value,
    parse_roles,
    require_exact_rule,
)


@pytest.mark.parametrize(
    ("text", "num_ranks", "roles"),
    [
        ("shards", 1, Roles(1)),
        ("shards", 5, Roles(5)),
        ("stages:0-2,draft:3", 4, Roles(4, (0, 1, 2), 3)),
        ("stages:0,1,2", 3, Roles(3, (0, 1, 2))),
        ("draft:1,stages:2,0", 3, Roles(3, (2, 0), 1)),
        ("stages:0-2,4,draft:3", 5, Roles(5, (0, 1, 2, 4), 3)),
        ("stages:0", 1, Roles(1, (0,))),
    ],
)
def test_roles_that_add_up(text: str, num_ranks: int, roles: Roles) -> None:
    assert parse_roles(text, num_ranks) == roles
    assert roles.is_sharded == (text == "shards")


@pytest.mark.parametrize(
    ("text", "words"),
    [
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
    ],
)
def test_roles_that_do_not_add_up_are_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match="`ranks`") as refused:
        parse_roles(text, 4)
    assert words in str(refused.value)


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
    assert LoadOptions(ranks="stages:0,draft:1").roles() == Roles(2, (0,), 1)
    assert LoadOptions().roles() is None
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
        ({"slow_layer_s": 0.1}, "`slow_layer_s` is of stages, got `ranks` none"),
        ({"ranks": "shards", "slow_layer_s": 0.1}, "`slow_layer_s` is of stages, got `ranks` shards"),
        ({"ranks": "stages:0-1", "tree": "64x16"}, "`tree` is for one pass at a time"),
        ({"ranks": "shards", "pipeline": "plain"}, "`pipeline` says how stages run"),
    ],
)
def test_what_ranks_cannot_do_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        LoadOptions(**options)


@pytest.mark.usefixtures("_two_ranks")
def test_stages_guess_where_there_is_a_draft_and_a_tree_is_not_ruled_out() -> None:
    def found(has_draft: bool, **options: Any) -> tuple[str, int | None]:
        roles, pipeline = LoadOptions(**options).pipeline_roles(has_draft=has_draft)
        return pipeline.mode, roles.draft

    assert found(True, ranks="stages:0-1") == ("async", 0) and found(True, ranks="stages:0,draft:1") == ("async", 1)
    assert found(True, ranks="stages:0-1", tree="none") == found(False, ranks="stages:0-1") == ("plain", None)
    assert found(True, ranks="stages:0-1", tree="none", pipeline="plain") == ("plain", None)
    with pytest.raises(UserError, match="rank 1 of `ranks` drafts, got no draft: give `draft`"):
        found(False, ranks="stages:0,draft:1")
    for mode in ("async", "sync"):
        with pytest.raises(UserError, match=f"`pipeline` {mode} guesses, got `tree` none"):
            found(True, ranks="stages:0-1", tree="none", pipeline=mode)
    with pytest.raises(UserError, match="`pipeline` sync guesses with a draft"):
        found(False, ranks="stages:0-1", pipeline="sync")
    with pytest.raises(UserError, match="rank 1 of `ranks` drafts"):
        check_models("nowhere/at-all", None, LoadOptions(ranks="stages:0,draft:1"))


@pytest.mark.usefixtures("_two_ranks")
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "2", "RANK must be less than WORLD_SIZE 2, got 2"),
        ("RANK", "-1", "RANK must be a whole number"),
        ("WORLD_SIZE", "many", "WORLD_SIZE must be a whole number"),
        ("MASTER_ADDR", "", "MASTER_ADDR must be set"),
        ("MASTER_PORT", "9" * 20, "MASTER_PORT must be a whole number"),
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
