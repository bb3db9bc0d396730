"""Drafters without a model, whole: the same ids with every source, alone and beside a draft, and refusals."""

import heapq
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small_t5
from matrix import matrix
from plans import plan_memory
from tiny import finished

import offload
from offload.checkpoint.checkpoint import ModelFiles
from offload.checkpoint.open import open_checkpoint
from offload.checkpoint.packaged import PAIR
from offload.datastore.build import Coder, build
from offload.drafting.lookup import LookupDrafter
from offload.engine.decoder import Decoder
from offload.engine.tokenizer import load_tokenizer
from offload.errors import UserError
from offload.memory.planner import least_budget
from offload.rules import RULES
from offload.sampling_options import Sampling

SOURCE = Path(heapq.__file__).read_text(encoding="utf-8")
PROMPT = SOURCE[7000:7800] + "\n\n# The same again\n" + SOURCE[7000:7100]
NUM_NEW = 24
SAMPLINGS = ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 5})
RUNS = (  # tree, sampling
    *(("dynamic:64x16", 0), ("dynamic:64x16", 1), ("32x6", 1)),
    *(("chain:5", 0), ("chain:5", 1), ("sequences:3x4", 1), ("none", 0)),
)
load = partial(offload.load, context=640, dtype="float32", device="cpu", threads=1, profile="none")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, tokenizer = tmp_path_factory.mktemp("store") / "code", load_tokenizer(PAIR / "target")
    encode = lambda texts: [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]  # noqa: E731
    build(
        path, [SOURCE[:6000], SOURCE[7000:9000]], Coder("demo", tokenizer.get_vocab(), encode), 1 << 32, lambda *_: None
    )
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "code.py"
    path.write_text(SOURCE[:6000], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    with load(PAIR / "target", tree="none", ram="1GiB") as decoder:
        return [ids(decoder, **sampling) for sampling in SAMPLINGS]


def ids(decoder: Decoder, **options: Any) -> list[int]:
    return decoder.generate(PROMPT, max_new_tokens=NUM_NEW, raw=True, **options).token_ids


def streaming_ram(draft: Path | None) -> int:
    files = ModelFiles(open_checkpoint(PAIR / "target"), draft and open_checkpoint(draft))
    return least_budget(lambda size: plan_memory(files, ram=size, dtype="float32", context=640, num_nodes=64))


@pytest.mark.parametrize("draft", [None, PAIR / "draft"], ids=["alone", "beside a draft"])
@matrix("kind", ["lookup", "ngram", "counts of a store", "store", "all"], always=["all"], daily=1)
def test_every_source_writes_the_same_text(kind: str, draft: Path | None, store: Path, text: Path, wanted: Any) -> None:
    options: dict[str, Any] = {"lookup": kind in ("lookup", "all"), "ngram": text if kind in ("ngram", "all") else None}
    options["datastore"] = store if kind in ("store", "all") else None
    options["ngram"] = store if kind.startswith("counts") else options["ngram"]
    options["invariant"] = None if kind == "all" else False  # which takes twice as long
    with load(PAIR / "target", draft, streaming_ram(draft), "dynamic:64x16", **options) as decoder:
        for tree, sampling in RUNS:
            run = decoder.generate(PROMPT, max_new_tokens=NUM_NEW, raw=True, tree=tree, **SAMPLINGS[sampling])
            assert run.token_ids == wanted[sampling], (tree, sampling)
            assert run.stats.tree_num_nodes <= 64
            if tree.startswith("dynamic") and not sampling:
                assert run.stats.tokens_per_sweep > (1.5 if kind in ("lookup", "all") else 1.0)


@matrix("rule", RULES, always=["match"], daily=1)
def test_every_rule_takes_guesses(rule: str, wanted: Any) -> None:
    """Greedily it is the same text; drawn it is one text for one seed."""
    with load(PAIR / "target", ram="1GiB", rule=rule, tree="dynamic:64x16") as decoder:
        assert ids(decoder) == wanted[0]
        drawn = [ids(decoder, temperature=0.9, seed=seed) for seed in (1, 1, 2)]
        stats = decoder.generate(PROMPT, max_new_tokens=NUM_NEW, raw=True, temperature=0.9, seed=1).stats
        assert stats.first_guess.count and stats.alpha is None, "there is no draft for it to tell of"
        assert drawn[0] == drawn[1] != drawn[2]
        if rule == "match":  # a rule of draws needs no room where nothing is drawn
            assert decoder.plan.distribution_bytes == 0 and ids(decoder, rule="sequoia") == wanted[0]


def test_behind_an_encoder_its_text_is_copied_too(tmp_path: Path) -> None:
    """The prompt of a T5, which repeats itself, and what the decoder writes; alone and beside a draft."""
    prompt, budget = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7], {"ram": "1GiB", "context": 128, "threads": 1}
    target, draft = small_t5.save_pair("v1.1", tmp_path)
    texts = []
    for options in ({"tree": "none"}, {"tree": "dynamic:32x8"}, {"draft": draft, "tree": "32x8", "lookup": True}):
        with offload.load(target, device="cpu", profile="none", **options, **budget) as decoder:
            texts.append(decoder.generate(prompt, max_new_tokens=32).token_ids)
    assert texts[0] == texts[1] == texts[2]


def test_without_a_draft_the_text_is_looked_up_by_itself(wanted: Any) -> None:
    with load(PAIR / "target", ram="1GiB") as decoder:
        assert isinstance(decoder.drafter, LookupDrafter) and decoder.tree_choice(Sampling()).is_dynamic
        run = decoder.generate(PROMPT, max_new_tokens=NUM_NEW, raw=True)
        assert run.token_ids == wanted[0] and run.tree_choice.shape.num_nodes > 1
    with load(PAIR / "target", ram="1GiB", lookup=False) as decoder:
        assert not decoder.tree_choice(Sampling()).is_dynamic and ids(decoder) == wanted[0]


def test_a_session_of_a_draft_with_guesses_is_whole(tmp_path: Path, wanted: Any) -> None:
    with load(PAIR / "target", PAIR / "draft", "1GiB", "dynamic:64x16", lookup=True) as decoder:
        run = decoder.run(PROMPT, Sampling(), max_new_tokens=8, raw=True)
        finished(run)
        decoder.save_session(tmp_path / "kept")
        tokens = run.sequence.tokens
        decoder.generate("def f(x):\n", max_new_tokens=4, raw=True)
        session = decoder.load_session(tmp_path / "kept")
        result = finished(decoder.run(session.tokens, Sampling(), max_new_tokens=NUM_NEW - 8, continues=True))
        assert result.token_ids == wanted[0][8:]
        assert session.tokens == tokens and result.stats.num_kept_tokens == len(tokens) - 1


def refused(**options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(PAIR / "target", ram="1GiB", **options)
    return str(caught.value)


def test_stores_that_cannot_serve(tmp_path: Path) -> None:
    other = Coder("other", {"a": 0, "b": 1}, lambda texts: [[0, 1] for _ in texts])
    build(tmp_path / "other", ["ab"], other, 1 << 32, lambda *_: None)
    for argument in ("datastore", "ngram"):
        assert "tokenizer" in refused(**{argument: tmp_path / "other"})
        assert str(tmp_path / "none") in refused(**{argument: tmp_path / "none"})
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe text")
    assert "bad.txt" in refused(ngram=tmp_path / "bad.txt")
    for num_bytes in (0, 2 << 20):
        (tmp_path / "large.txt").write_bytes(b"a" * num_bytes)
        assert "offload datastore build" in refused(ngram=tmp_path / "large.txt")
    assert "`lookup`" in refused(lookup="no")
    assert "`tree` none" in refused(lookup=True, tree="none")
    assert "chain:auto" in refused(lookup=True, tree="chain:auto", draft=PAIR / "draft")
    assert "`tree`" in refused(lookup=False, tree="16x4")
