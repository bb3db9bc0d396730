"""Profiles hold for what they name, and nothing else is ever used."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import FAMILIES, save_pair

from offload.checkpoint.layer_sizes import ExpertShape
from offload.checkpoint.open import open_checkpoint
from offload.errors import UserError
from offload.planning.acceptance import DynamicYield
from offload.planning.cost_model import Costs, Curve
from offload.planning.profile import (
    SCHEMA,
    ExpertUses,
    Identity,
    Machine,
    Profile,
    find_profile,
    format_json,
    parse_profile,
    profiles_folder,
    require_same_run,
    save_profile,
    write_atomically,
)
from offload.sampling_options import Sampling

MACHINE = Machine(cpu="one", num_cores=2, torch="2.9", dtype="float32", device="cpu")
IDENTITY = Identity(target="a" * 32, draft="b" * 32, rule="match", temperature=0.6, top_p=0.9, top_k=0, machine=MACHINE)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def profile(**changes: Any) -> Profile:
    curves = {"compute_s": Curve((1, 16), (0.1, 0.2)), "draft_step_s": Curve((1,), (0.01,))}
    names = {"target_name": "big", "draft_name": "small", "created": "2026-01-01T00:00:00+00:00"}
    measured = {"num_tokens": 6, "num_threads": 2}
    p = {"acceptance": (0.5, 0.25), "standard_error": (0.1, 0.05)}
    numbers = {
        "costs": Costs(**curves, verify_s=0.001, link_bytes_per_s=1e9),
        "dynamic_yields": (DynamicYield(num_nodes=16, depth=8, tokens_per_sweep=2.5, num_sweeps=40),),
    }
    return Profile(**{"identity": IDENTITY, **names, **measured, **p, **numbers, **changes})  # type: ignore[arg-type]


def test_what_is_saved_is_found_again(cache: Path) -> None:
    path = save_profile(profile())
    assert path.parent == profiles_folder() == cache / "offload" / "profiles"
    assert find_profile(IDENTITY) == (profile(), str(path))
    assert parse_profile(path) == profile()
    assert [p.name for p in path.parent.iterdir()] == [path.name], "a scratch file was left behind"


def test_uses_of_experts_are_kept_where_there_are_any() -> None:
    uses = ExpertUses(((5, 0, 10), (2, 8, 5)), 10)
    path = save_profile(profile(expert_uses=uses))
    assert parse_profile(path).expert_uses == uses
    assert uses.uses_B == [0.5, 0, 1, 0.2, 0.8, 0.5]
    assert "  [5, 0, 10]," in path.read_text().splitlines(), "a line for each layer"
    path = save_profile(profile())
    assert "expert_uses" not in path.read_text(), "the file of a dense target is the one it was"
    assert parse_profile(path).expert_uses is None


def test_uses_of_other_experts_are_refused_where_they_were_named_and_else_passed_over() -> None:
    known = profile(expert_uses=ExpertUses(((5, 0, 10), (2, 8, 5)), 10))
    right = ExpertShape(num_layers=2, num_experts=3, num_chosen=1, slot_bytes=64, dense_bytes=(64, 64))
    for is_named in (True, False):
        assert known.of_experts(right, is_named=is_named) is known.of_experts(None, is_named=is_named) is known
        assert profile().of_experts(right, is_named=is_named) == profile()
    for wrong in ({"num_layers": 3, "num_experts": 2}, {"num_experts": 4}, {"num_layers": 1}):
        other = right._replace(**wrong)
        assert known.of_experts(other) == profile()
        with pytest.raises(UserError, match=r"2 layers of 3 experts, not \d of \d: run offload tune again"):
            known.of_experts(other, is_named=True)


def test_the_file_is_for_people_and_its_keys_stay() -> None:
    """Files of this schema lie on disks."""
    text = save_profile(profile()).read_text()
    assert ' "acceptance": [0.5, 0.25],' in text.splitlines()
    values = json.loads(text)
    assert values["dynamic_yields"] == [{"num_nodes": 16, "depth": 8, "tokens_per_sweep": 2.5, "num_sweeps": 40}]
    assert list(values["costs"]) == ["compute_s", "draft_step_s", "verify_s", "link_bytes_per_s"]
    assert values["schema"] == SCHEMA == 4
    saved, _ = find_profile(IDENTITY)
    assert saved is not None and saved.dynamic_yields


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"target": "c" * 32}, "target model aaaaaaaaaaaa, not cccccccccccc"),
        ({"draft": "c" * 32}, "draft model bbbbbbbbbbbb, not cccccccccccc"),
        ({"rule": "sequoia"}, "rule match, not sequoia"),
        ({"temperature": 0.0}, "temperature 0.6, not 0.0"),
        ({"top_p": 1.0}, "top_p 0.9, not 1.0"),
        ({"top_k": 5}, "top_k 0, not 5"),
        ({"machine": replace(MACHINE, cpu="two")}, "cpu one, not two"),
        ({"machine": replace(MACHINE, num_cores=4)}, "core count 2, not 4"),
        ({"machine": replace(MACHINE, torch="3.0")}, "torch 2.9, not 3.0"),
        ({"machine": replace(MACHINE, dtype="bfloat16")}, "compute type float32, not bfloat16"),
        ({"machine": replace(MACHINE, device="cuda:0")}, "device cpu, not cuda:0"),
    ],
)
def test_profile_of_another_run_is_refused(change: dict[str, Any], reason: str) -> None:
    path, other = save_profile(profile()), replace(IDENTITY, **change)
    with pytest.raises(UserError, match=f"measured for another run .*{reason}.*run offload tune again"):
        require_same_run(parse_profile(path), other, path)
    known, note = find_profile(other)
    assert known is None and "offload tune" in note
    assert other.file_name != IDENTITY.file_name, "the key must tell them apart"


def test_what_cannot_be_used_is_passed_over_with_the_reason() -> None:
    path, warm = save_profile(profile()), replace(IDENTITY, temperature=1.0)
    assert "temperature 0.6, not 1.0" in find_profile(warm)[1], "a near miss"
    assert "no profile for this pair" in find_profile(replace(IDENTITY, target="c" * 64))[1]
    path.write_text(path.read_text()[:100])
    known, note = find_profile(IDENTITY)
    assert known is None and "not valid JSON" in note
    save_profile(profile()).rename(path.with_name(warm.file_name))
    known, note = find_profile(warm)
    assert known is None and "temperature 0.6, not 1.0" in note, "a renamed file stays what it is"


COSTS = json.loads(format_json(profile().as_dict()))["costs"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *(
            ({"schema": schema}, f"has schema {schema}, this version reads {SCHEMA}: run offload tune again")
            for schema in (1, 3, SCHEMA + 1, None)
        ),
        *(
            ({"identity": {"proofs": proofs}}, "malformed")
            for proofs in ({"target": 5}, {"target": {"xxh3": 5}}, [], 7)
        ),
        ({"acceptance": [1.5, 0.0]}, r"must lie in \[0, 1\]"),
        ({"acceptance": [0.9, 0.2]}, "sum to 1 at most"),
        ({"acceptance": [float("nan"), 0.0]}, "NaN is no number"),
        ({"acceptance": []}, "one entry per rank"),
        ({"standard_error": [0.1]}, "one standard error per"),
        ({"standard_error": [0.1, -0.1]}, r">= 0.0 - at `\$.standard_error\[1\]`"),
        ({"costs": {**COSTS, "link_bytes_per_s": 0}}, "> 0.0 - at .*link_bytes_per_s"),
        ({"costs": {**COSTS, "link_bytes_per_s": float("inf")}}, "<= .*link_bytes_per_s"),
        ({"costs": {**COSTS, "verify_s": -1}}, ">= 0.0 - at .*verify_s"),
        ({"costs": {**COSTS, "friction": 0.0}}, "'friction' is no key of it"),
        ({"costs": {**COSTS, "compute_s": {"sizes": [1, 2], "seconds": [1, -1]}}}, "must be positive"),
        ({"costs": {**COSTS, "compute_s": {"sizes": [1, 2], "seconds": [1, float("inf")]}}}, "<= .*seconds"),
        ({"costs": {**COSTS, "draft_step_s": {"sizes": [-1, 2], "seconds": [1, 1]}}}, ">= 1 - at .*sizes"),
        ({"costs": {**COSTS, "compute_s": {"sizes": [2, 1], "seconds": [1, 1]}}}, "rising sizes"),
        ({"costs": {**COSTS, "compute_s": {"sizes": [], "seconds": []}}}, "rising sizes"),
        ({"costs": {**COSTS, "speed": 1}}, "'speed' is no key of it"),
        ({"costs": 3}, "malformed"),
        ({"num_tokens": 0.5}, "`int`, got `float`"),
        ({"num_threads": 2**63}, "<= 4096 - at .*num_threads"),
        (
            {"dynamic_yields": [{"num_nodes": 10**12, "depth": 8, "tokens_per_sweep": 2.5, "num_sweeps": 40}]},
            "num_nodes",
        ),
        ({"identity": {}}, "malformed"),
        ({"expert_uses": {"uses_LE": [], "num_rows": 3}}, "of length >= 1 - at .*uses_LE"),
        ({"expert_uses": {"uses_LE": [[]], "num_rows": 3}}, r"of length >= 1 - at .*uses_LE\[0\]"),
        ({"expert_uses": {"uses_LE": [[1, 2], [1]], "num_rows": 3}}, "as many experts"),
        ({"expert_uses": {"uses_LE": [[1, 2.5]], "num_rows": 3}}, "`int`, got `float`"),
        ({"expert_uses": {"uses_LE": [[True, 2]], "num_rows": 3}}, "`int`, got `bool`"),
        ({"expert_uses": {"uses_LE": [[1, -2]], "num_rows": 3}}, ">= 0 - at .*uses_LE"),
        ({"expert_uses": {"uses_LE": [[1, 4]], "num_rows": 3}}, "once for each row"),
        ({"expert_uses": {"uses_LE": [[0, 0]], "num_rows": 0}}, ">= 1 - at .*num_rows"),
        ({"expert_uses": {"uses_LE": [[0, 0]]}}, "malformed"),
        ({"expert_uses": {"uses_LE": 7, "num_rows": 3}}, "malformed"),
        ({"expert_uses": [1]}, "malformed"),
        ({"extra": 1}, "'extra' is no key of it"),
    ],
)
def test_malformed_profiles_are_refused(change: dict[str, Any], reason: str) -> None:
    path = save_profile(profile())
    values = json.loads(path.read_text())
    changed = {name: values[name] | value if name == "identity" and value else value for name, value in change.items()}
    path.write_text(json.dumps(values | changed))
    with pytest.raises(UserError, match=reason):
        parse_profile(path)


@pytest.mark.parametrize("text", ["", "[]", "3", '{"schema": 1}', "null", "[" * 100_000, None])
def test_files_that_are_no_profile_are_refused(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match="some.json" if text is not None else "cannot read the profile .*some.json"):
        parse_profile(path)


def test_a_user_without_a_home_or_a_folder_to_write_in_has_no_profiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in containers: no HOME, and no entry in the list of users."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot write .*set XDG_CACHE_HOME"):
        save_profile(profile())
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert find_profile(IDENTITY) == (None, "this user has no home folder: set XDG_CACHE_HOME to a folder")
    with pytest.raises(UserError, match="set XDG_CACHE_HOME"):
        save_profile(profile())


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    write_atomically(path, "old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("offload.planning.profile.os.replace", full)
    with pytest.raises(UserError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_copy_of_a_model_has_its_profile_until_sums_tell_them_apart(tmp_path: Path) -> None:
    """A profile decides no token: weights that look the same are enough, and a sum that differs is not."""
    pair = save_pair(FAMILIES["llama"](), tmp_path / "one")
    for folder in pair:
        shutil.copytree(folder, tmp_path / "two" / folder.name)
    mine, copy = (
        Identity.from_models(
            *(open_checkpoint(tmp_path / name / folder.name) for folder in pair), Sampling(), "match", MACHINE
        )
        for name in ("one", "two")
    )
    path = save_profile(profile(identity=mine))
    assert mine.proofs != copy.proofs, "the files are others"
    assert find_profile(copy) == (profile(identity=mine), str(path))
    proofs = {part: {**proof, "xxh3": "a"} for part, proof in mine.proofs.items()}
    save_profile(profile(identity=replace(mine, proofs=proofs)))
    copied = {part: {**proof, "xxh3": "a"} for part, proof in copy.proofs.items()}
    assert find_profile(replace(copy, proofs=copied))[0] is not None
    copied["target"]["xxh3"] = "b"
    known, why = find_profile(replace(copy, proofs=copied))
    assert known is None and "other target weights, by their checksums" in why


def test_greedy_settings_are_one_identity(tmp_path: Path) -> None:
    pair = [open_checkpoint(path) for path in save_pair(FAMILIES["llama"](), tmp_path)]
    greedy, filtered, warm = (
        Identity.from_models(*pair, sampling, "match", MACHINE)
        for sampling in (Sampling(), Sampling(top_p=0.5, top_k=3, seed=4), Sampling(temperature=0.1, top_p=0.5))
    )
    assert greedy == filtered != warm
