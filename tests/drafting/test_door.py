"""The door of proposers: a new one is a file and a row; who has none asks for none."""

import math
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from carried_models import carrying
from made_up_drafter import Recalling, first_layer
from plans import specified_files

import offload
from offload import load
from offload.checkpoint.open import open_checkpoint
from offload.checkpoint.packaged import PAIR
from offload.engine import draft_choice
from offload.engine.decoder import Decoder
from offload.engine.resolve import resolve
from offload.errors import UserError
from offload.memory.plan import MemoryBudget
from offload.memory.planner import least_budget, plan_memory
from offload.model.headers import specified
from offload.planning.draft_kinds import KINDS, DraftKind, DraftSpec, files_of
from offload.planning.load_options import LoadOptions
from offload.sampling_options import Sampling

# of a draft of its own files: what names it, what is assumed of it, and ranks that draft for others
HOLDERS = {
    "planning/load_options",
    "planning/acceptance",
    "distributed/pipeline_rank",
    "distributed/draft",
    "drafting/registry",
    "reports/drafts",
}
PROMPT = [1, 5, 9, 5, 9, 7, 3, 5, 9, 11]


def test_a_drafter_that_reads_hidden_states_is_a_file_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model, _ = carrying("deepseek_v3")
    with load(folder, None, dtype="float32", tree="none", lookup=False) as decoder:
        wanted = [
            decoder.generate(PROMPT, max_new_tokens=24, temperature=heat, seed=3).token_ids for heat in (0.0, 0.7)
        ]
    monkeypatch.setitem(KINDS, "recalling", DraftKind("made_up_drafter", of_target=first_layer))
    with load(folder, "recalling", dtype="float32", tree="chain:4", lookup=False) as decoder:
        assert isinstance(decoder.drafter, Recalling) and decoder.drafter.num_bytes
        texts = [decoder.generate(PROMPT, max_new_tokens=24, temperature=heat, seed=3) for heat in (0.0, 0.7)]
        assert [text.token_ids for text in texts] == wanted
        rows = decoder.begin([*PROMPT, *wanted[1]], Sampling(), keeps=True).caches.draft.rows
        states_TD = model.model(torch.tensor([[*PROMPT, *wanted[1]][: len(rows)]])).last_hidden_state[0].detach()
        assert len(rows) > 20 and float((torch.stack(rows) - states_TD).abs().max()) < 1e-4


def test_auto_tries_each_way_once_and_says_which(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is carried is right by construction here, so it is the quickest where passes take long."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, *_ = carrying("mellum", is_right=True)
    tried = list[bool]()

    def passes_a_token(decoder: Decoder, sampling: Sampling, best_s: float) -> float:
        tried.append(decoder.drafter.needs is not None)
        done = decoder.generate(PROMPT, max_new_tokens=24, temperature=sampling.temperature)
        return 1 / done.stats.tokens_per_sweep

    monkeypatch.setattr(draft_choice, "_s_per_token", passes_a_token)
    with load(folder, "auto", dtype="float32", tree="chain:4", lookup=False) as decoder:
        assert decoder.drafter.needs is not None and tried[:2] == [False, True]
        (note,) = [note for note in decoder.notes if note.startswith("draft mtp, by trials")]
        assert "none" in note
    num_tried = len(tried)
    with load(folder, "auto", dtype="float32", tree="chain:4", lookup=False) as decoder:
        assert decoder.drafter.needs is not None and len(tried) == num_tried
    (kept,) = (tmp_path / "offload" / "drafts").iterdir()
    kept.write_text("{")
    with load(folder, "auto", dtype="float32", tree="chain:4", lookup=False):
        assert len(tried) > num_tried


def test_trials_that_cannot_win_are_cut_or_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, *_ = carrying("mellum", is_right=True)
    with load(folder, "mtp", dtype="float32", tree="none", lookup=False) as decoder:
        num_passes = list[int]()
        right = decoder.step
        monkeypatch.setattr(decoder, "step", lambda text: num_passes.append(1) or right(text))
        draft_choice._s_per_token(decoder, Sampling(), math.inf)
        num_whole = len(num_passes)
        draft_choice._s_per_token(decoder, Sampling(), 1e-9)
        assert len(num_passes) - num_whole <= draft_choice._LEAST_PASSES + 1 < num_whole
        took = iter([1.0, 2.0])
        monkeypatch.setattr(draft_choice, "_s_per_token", lambda *_: next(took))
        predicted = iter([0.0, 2.4, 2.6])
        monkeypatch.setattr(draft_choice, "_predicted_s", lambda *_: next(predicted))
        of_link = {"mtp": 2.4, "self:int4": 2.4, "small": 2.7}
        opened = list[str]()
        names = ["none", "mtp", "self:int4", "small"]
        trials = draft_choice._run_trials(
            names,
            Sampling(),
            lambda name: SimpleNamespace(name=name, link_s=lambda _: of_link[name]),
            lambda setup: opened.append(setup.name) or nullcontext(decoder),
        )
    assert opened == names[:3], "what the link alone rules out is not read"
    assert trials.s_per_token == {"none": 1.0, "mtp": 2.0, "self:int4": None, "small": None}
    assert trials.why.endswith("none 1, mtp 2; not tried, as predicted: self:int4 2.6, small 2.7")


def test_what_the_link_alone_takes_follows_from_headers() -> None:
    """A pass has at least one token, and fewer than its tree has nodes."""
    rate = 50_000_000
    files = specified_files(*files_of([specified(open_checkpoint(PAIR / "target"))], "mtp", None))
    budget = {"dtype": "bfloat16", "context": 256}
    least = least_budget(lambda ram: plan_memory(files, MemoryBudget(ram_bytes=ram, **budget), 1))
    options = LoadOptions(PAIR / "target", "mtp", least + 3_000_000, **budget, link_limit=f"{rate}B", device="cpu")
    setup = resolve(options)
    pass_s = setup.plan_for(1).streamed_bytes / rate
    assert pass_s / 64 < setup.link_s(Sampling()) < pass_s
    assert resolve(replace(options, ram="1GiB")).link_s(Sampling()) == 0, "where nothing streams"


def test_files_of_a_draft_are_asked_for_in_few_places() -> None:
    root = Path(offload.__file__).parent
    asks = {str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.py")
            if re.search(r"files\.draft\b|has_draft", path.read_text())}  # fmt: skip
    assert asks <= HOLDERS


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        ("eagle3:", "eagle3:PATH names a head, got 'eagle3:'"),
        ("dflash", "dflash:PATH names a head, got 'dflash'"),
        ("self:int4+assistant:", "assistant:PATH names a head"),
        ("store:", "store:PATH names a store, got 'store:'"),
        ("store", "store:PATH names a store, got 'store'"),
        ("auto:x", "auto has no value, got 'auto:x'"),
        ("mtp+lookup:", "lookup has no value, got 'lookup:'"),
        ("mtp+lookup+lookup", "joins one draft, .* got lookup and lookup"),
        ("mtp+store:a+store:b", "joins one draft, .* got a and b"),
    ],
)
def test_a_name_without_what_it_needs_or_named_twice_is_refused(draft: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        DraftSpec.parse(draft)
