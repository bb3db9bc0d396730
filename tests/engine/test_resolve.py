"""What `resolve` decides holds for all who ask: a plan is that of the run; and what cannot run is refused early."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import FAMILIES, save_pair, streaming_ram

import offload
from offload.engine.request import Request
from offload.engine.resolve import resolve
from offload.errors import UserError
from offload.planning.hardware import KNOWN, Assumptions
from offload.planning.knowledge import LinkRate, Provenance
from offload.planning.load_options import LoadOptions
from offload.reports.estimate import estimate
from offload.sampling_options import Sampling
from offload.streaming.device import HOST
from offload.streaming.disk import DiskReader

LINK = 1e9
HOW: dict[str, Any] = {"context": 128, "threads": 1, "profile": "none"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, draft = save_pair(FAMILIES["llama"](), tmp_path_factory.mktemp("pair"))
    return str(target), str(draft)


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """With what the link was measured; it is always as fast."""
    results = list[dict[str, Any]]()
    monkeypatch.setattr("offload.calibration.link.link_bytes_per_s", lambda _, **asked: results.append(asked) or LINK)
    monkeypatch.setattr("offload.calibration.rates.known_flops_per_s", lambda *_: 1e9)
    return results


class Elsewhere(DiskReader):
    """What brings weights from another place."""


# with which no tree is larger
TIGHT: dict[str, Any] = {"context": 128, "num_nodes": 64, "num_slots": 2, "rule": "match"}
RUNS: dict[str, dict[str, Any]] = {
    "a tree": {"tree": "8x3"},
    "a tree with fewer nodes than its name": {"tree": "40x1"},
    "several texts": {"tree": "8x3", "parallel": 3},
    "streamed": {"tree": "8x3", "ram": 0},
    "streamed slowly": {"tree": "8x3", "ram": 0, "link_limit": "1MB"},
}


def plans(pair: tuple[str, str], **options: Any) -> tuple[object, object]:
    if options.get("ram") == 0:
        options["ram"] = streaming_ram(*pair, **TIGHT)
    settings = {"ram": "1GiB", **HOW, **options}
    planned = estimate(LoadOptions(*pair, **settings)).plan
    with offload.load(*pair, **settings) as decoder:
        return planned, decoder.plan


@pytest.mark.parametrize("name", RUNS)
def test_a_plan_is_that_of_the_run(name: str, pair: tuple[str, str]) -> None:
    planned, run = plans(pair, **RUNS[name])
    assert planned == run


def test_a_tree_that_is_chosen_is_planned_as_large_as_memory_has_room_for(pair: tuple[str, str]) -> None:
    """A plan used to refuse what loads with a smaller tree."""
    options = LoadOptions(*pair, ram=streaming_ram(*pair, **{**TIGHT, "num_nodes": 8}), **HOW)
    predicted = estimate(options)
    assert 1 < predicted.plan.num_nodes <= 8
    with pytest.raises(UserError, match="needs"):
        estimate(replace(options, tree="64x16"))


def test_what_one_refuses_the_others_refuse(pair: tuple[str, str], tmp_path: Path) -> None:
    options = {**HOW, "context": 8, "ram": "1GiB", "tree": "64x16"}
    for ask in (lambda: estimate(LoadOptions(*pair, **options)), lambda: offload.load(*pair, **options)):
        with pytest.raises(UserError, match=r"the tree is \d+ deep, the context has 8 positions"):
            ask()
    (tmp_path / "text").write_text("word " * 100)
    with pytest.raises(UserError, match="`draft_dtype` must be int8 or int4"):
        LoadOptions(*pair, draft_dtype="int3")


def test_the_link_is_measured_once_as_the_run_will_use_it(pair: tuple[str, str], asked: list[dict[str, Any]]) -> None:
    options = LoadOptions(*pair, ram=streaming_ram(*pair, **TIGHT), link_limit="1MB", **HOW)
    estimate(options)
    assert [(call["limit_bytes_per_s"], call["open_source"]) for call in asked] == [(1_000_000, DiskReader)]
    resolve(options, open_source=Elsewhere).link(1)
    assert asked[-1]["open_source"] is Elsewhere, "weights that come from elsewhere come at another rate"


def test_another_machine_stands_in_for_this_one(pair: tuple[str, str]) -> None:
    machine = KNOWN["l40"]
    setup = resolve(LoadOptions(*pair, context=128), assumed=Assumptions(machine))
    assert not setup.is_here and setup.device is HOST and setup.budget.gpu_bytes == machine.gpu_bytes
    assert setup.link(1) == LinkRate(machine.feed_bytes_per_s, Provenance.GIVEN) and not setup.notes
    profile, why = setup.find_profile(Sampling(), "match")
    assert profile is None and why
    with pytest.raises(UserError, match="is of this machine"):
        resolve(LoadOptions(*pair, device="cpu"), assumed=Assumptions(machine))


@pytest.mark.usefixtures("_no_weights")
@pytest.mark.parametrize(
    ("request_", "words"),
    [
        pytest.param(
            Request([5] * 60), "60 tokens and 128 new ones exceed the context of 64", marks=pytest.mark.always
        ),
        (Request([]), "the prompt is empty"),
        (Request([10**6]), "prompt ids must lie in"),
        (Request(["a"]), r"must be text, messages or token ids, got \['a'\]"),  # type: ignore[list-item]
        (Request([1.5]), r"must be text, messages or token ids, got \[1.5\]"),  # type: ignore[list-item]
        (Request(7), "must be text, messages or token ids, got 7"),  # type: ignore[arg-type]
        (Request("Count: caf\udce9"), "text must be Unicode, got half a character at 10"),
        (5, "a request must be a Request, got 5: make one of `offload.Request`"),
    ],
)
def test_the_first_request_is_checked_by_load(request_: Request, words: str, sound: Path) -> None:
    with pytest.raises(UserError, match=words):
        offload.load(sound, sound, "1GiB", context=64, threads=1, request=request_)


@pytest.mark.parametrize("models", [(None,), (5,), (["a"],), ("",), ("no/such", 5), ("no/such", "")])
def test_a_model_that_is_no_name_is_refused(models: tuple[Any, ...], sound: Path) -> None:
    with pytest.raises(UserError, match="a model must be a folder, a GGUF file or a hub id"):
        offload.load(*(str(sound) if name == "no/such" else name for name in models), ram="1GiB")


def test_arguments_of_another_type_are_named(sound: Path) -> None:
    with offload.load(sound, sound, "1GiB", "4x2", context=64, threads=1) as decoder:
        for name in ("tree", "rule"):
            with pytest.raises(UserError, match=f"`{name}` must be"):
                decoder.generate("Count:", max_new_tokens=2, **{name: 5})
        for prompt in (5, None, b"Count:", [5, "a"], [None], {"role": "user"}):
            with pytest.raises(UserError, match="a prompt must be text, messages or token ids"):
                decoder.generate(prompt, max_new_tokens=2)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="a message must have a role and a content of text"):
            decoder.generate([{"role": "user", "content": [5]}], max_new_tokens=2)
