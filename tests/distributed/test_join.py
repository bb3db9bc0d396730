"""Ranks that find each other, or learn why not: who has not come, who is another or has other weights; headers."""

import json
import os
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
from msgspec import structs
from processes import Ranks
from tiny import FAMILIES, Pair, build, save

from offload.checkpoint import identity
from offload.checkpoint.checkpoint import ModelFiles
from offload.checkpoint.identity import PARTS, ModelIdentity
from offload.checkpoint.open import open_checkpoint
from offload.cli.launch import free_port
from offload.distributed import join as meeting
from offload.distributed.join import RankHandshake, compare, joined, leave_reason, meet, require_same_weights
from offload.engine.hooks import Hooks
from offload.engine.setup import Setup
from offload.errors import TOLD, RankError, UserError
from offload.model.headers import describe
from offload.planning import load_options as options
from offload.planning.budget import budget_of
from offload.planning.load_options import LoadOptions
from offload.rank_roles import RankInfo
from offload.streaming.device import HOST

SHORT_S = 1.5


def model(weights: str, **proofs: str) -> ModelIdentity:
    return ModelIdentity({**dict.fromkeys(PARTS, "same"), "weights": weights}, proofs)


def test_a_rank_that_does_not_come_is_named_in_time() -> None:
    reports = Ranks(4, _join, absent=(1, 3)).reports()
    [(kind, line, is_told, waited_s)] = reports[0]
    assert kind == "UserError" and is_told
    assert line == "all 4 ranks must come within 1.5 s, got none of ranks 1 and 3: see why there"
    assert waited_s < SHORT_S + 10 and len(reports[2]) == 1, "which is refused as well, or sees rank 0 leave"
    port = free_port()
    with pytest.raises(UserError, match=rf"rank 1 must reach 127\.0\.0\.1:{port} within 1 s, .*is it started there"):
        meet(RankInfo(1, 2, 0, 1, 2, "127.0.0.1", port), 1.0)


def _join(place: RankInfo, report) -> None:
    began_s = time.monotonic()
    try:
        with joined(place, model("same"), "same", [], limit_s=SHORT_S if place.num_ranks == 4 else 30):
            report("joined")
    except (UserError, RankError) as error:
        is_told = TOLD in getattr(error, "__notes__", ())
        report((type(error).__name__, str(error), is_told, time.monotonic() - began_s))


def test_a_rank_that_fails_before_it_joins_is_heard() -> None:
    reports = Ranks(2, _fail_early).reports()
    assert reports[1] == [True]
    [(kind, line, _, waited_s)] = reports[0]
    assert (kind, line) == ("UserError", "rank 1: --ram must be a size") and waited_s < 10


def _fail_early(place: RankInfo, report) -> None:
    if place.rank == 0:
        _join(place, report)
    else:
        report(leave_reason(place, "--ram must be a size", meet_s=20, heard_s=20))


def test_ranks_that_are_not_alike_are_refused_everywhere() -> None:
    reports = Ranks(2, _join_unlike).reports()
    for rank in (0, 1):
        [(line, is_told)] = reports[rank]
        rule = "ranks must have the same weights, got 'of 0' on rank 0 and 'of 1' on rank 1"
        assert (line, is_told) == (f"{rule}: give both the same files", True)


def _join_unlike(place: RankInfo, report) -> None:
    with pytest.raises(UserError) as refused, joined(place, model(f"of {place.rank}"), "same", [], limit_s=30):
        pass
    report((str(refused.value), TOLD in refused.value.__notes__))


@pytest.mark.parametrize("field", ["offload", "torch", "protocol", "options", *PARTS])
def test_each_difference_is_named_with_both_values(field: str) -> None:
    first = RankHandshake.of_this(model("abc"), "--ranks shards", [])
    other = structs.replace(first, must_agree={**first.must_agree, field: "another"})
    compare([first, first])
    with pytest.raises(
        UserError, match="same options, got '--ranks shards' on rank 0 and '--ranks stages:0,1' on rank 1"
    ):
        compare([first, RankHandshake.of_this(model("abc"), "--ranks stages:0,1", [])])
    with pytest.raises(UserError, match=f"same {field}, got '.*' on rank 0 and 'another' on rank 2: "):
        compare([first, first, other])
    less = structs.replace(first, must_agree={key: value for key, value in first.must_agree.items() if key != field})
    with pytest.raises(UserError, match=f"same {field}, got .* and 'none' on rank 1"):
        compare([first, less])
    longer = [structs.replace(first, must_agree={**first.must_agree, field: 90 * "a" + end}) for end in ("b", "c")]
    with pytest.raises(UserError, match=f"same {field}, got 'a*b' on rank 0 and 'a*c' on rank 1"):
        compare(longer)


def test_other_weights_are_refused_as_soon_as_that_is_known() -> None:
    """Files that differ may hold the same; sums that differ do not, and in the end one of them must prove it."""
    first, copy, other = {"files": "a", "xxh3": "1"}, {"files": "b"}, {"files": "c", "xxh3": "2"}
    cards = [RankHandshake.of_this(model("abc", **identity), "", []) for identity in (first, copy, other)]
    compare(cards[:2])
    with pytest.raises(UserError, match="same weights, to the last byte, got others on rank 2 than on rank 0"):
        compare(cards)
    with pytest.raises(UserError, match="others on rank 1"):
        require_same_weights([first, copy], is_final=True)
    require_same_weights([first, {**copy, "xxh3": "1"}, {"files": "a"}], is_final=True)


def test_cards_of_strangers_are_checked() -> None:
    card = RankHandshake.of_this(model("abc"), "text", [])
    fields = structs.asdict(card)
    assert RankHandshake.parse(json.dumps(fields).encode(), 1) == card
    odd = [{"more": 1}, {"host": 7}, {"disks": {}}, {"disks": [["1"]]}, {"proofs": []}, {"proofs": {"xxh3": []}},
           {"must_agree": {"torch": 2}}, {"host": "x" * 70_000}]  # fmt: skip
    cards = [json.dumps({**fields, **change}).encode() for change in odd]
    for content in (b"", b"\xff", b"[]", b"{}", b"null", b"[" * 50_000, *cards):
        with pytest.raises(UserError, match="rank 1 says of itself what is no handshake"):
            RankHandshake.parse(content, 1)


def test_a_store_that_closes_is_rank_0_leaving() -> None:
    reports = Ranks(2, _leave_the_store).reports()
    [(kind, line, _, waited_s)] = reports[1]
    assert kind == "RankError" and line.startswith("rank 0 is gone") and waited_s < 20


def _leave_the_store(place: RankInfo, report) -> None:
    if place.rank == 1:
        _join(place, report)
        return
    store = meet(place, 20)
    while not store.check(["card/1"]):
        time.sleep(0.05)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a copy of it, and one of which a single byte differs."""
    folder = tmp_path_factory.mktemp("ranks")
    save(build(FAMILIES["llama"](), 0), folder / "0")
    for name in ("copy", "edited", "template"):
        shutil.copytree(folder / "0", folder / name)
    checkpoint = open_checkpoint(folder / "edited")
    vector = min(checkpoint.tensors.values(), key=lambda entry: entry.hi - entry.lo)  # which is sampled whole
    path = checkpoint.shards[vector.shard]
    content = bytearray(path.read_bytes())
    content[vector.lo] ^= 1
    path.write_bytes(content)
    (folder / "template" / "chat_template.jinja").write_text("a")
    return folder


def _meet(place: RankInfo, report, folder: Path, *, has_samples: bool) -> None:
    phases = list[str]()
    checkpoint = describe(folder)
    with patch.object(options, "require_place", lambda: place):
        shards = LoadOptions(ranks="shards")
    setup = Setup(
        files=ModelFiles(checkpoint, None),
        options=shards,
        tree=shards.tree_spec(),
        device=HOST,
        budget=budget_of(shards),
        hooks=Hooks(phases.append),
    )
    samples = identity._sampled if has_samples else lambda checkpoint: "0" * 32
    with patch.object(meeting, "require_place", lambda: place), patch.object(identity, "_sampled", samples):
        try:
            with ExitStack() as resources:
                meeting.meet_ranks(setup, resources, None)
                report(("met", len(phases)))
        except UserError as error:
            report((str(error), len(phases)))
        except RankError as error:
            # a rank that comes to the same verdict later may hear it from the other one first
            assert error.is_refusal
            report((str(error).split(": ", 1)[1], len(phases)))


def _by_rank(place: RankInfo, report, pair: Pair, cache: Path, has_samples: bool) -> None:
    os.environ["XDG_CACHE_HOME"] = str(cache)
    _meet(place, report, pair[place.rank], has_samples=has_samples)


@pytest.mark.parametrize(
    ("other", "has_samples", "words", "num_phases"),
    [
        ("0", True, "met", 1),
        ("copy", True, "met", 2),
        ("edited", True, "ranks must have the same weights, got '", 1),
        ("edited", False, "ranks must have the same weights, to the last byte, got others on rank 1 than on rank 0", 2),
        ("template", True, "ranks must have the same chat template, got '", 1),
    ],
)
def test_ranks_have_the_same_model(
    other: str, has_samples: bool, words: str, num_phases: int, folders: Path, tmp_path: Path
) -> None:
    """Files that cannot have changed are not read; a copy is, once."""
    reports = Ranks(2, _by_rank, (folders / "0", folders / other), tmp_path, has_samples).reports()
    for rank in (0, 1):
        [(line, phases)] = reports[rank]
        assert line.startswith(words) and phases == num_phases
