"""The mask of a row is what the grammar allows behind its path, whatever was asked before."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tiny import VOCAB_SIZE, save_tokenizer
from torch import Tensor

from offload.drafting.static import draw_children
from offload.errors import UserError
from offload.sampling.grammar import Grammar, GrammarMask, Grammars
from offload.sampling.sampler import Sampler
from offload.units import ChildSampling, Sampling

END = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("llguidance")
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["ab", "bc", '{"', '":'])


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, VOCAB_SIZE, {END})


@pytest.fixture(scope="module")
def ids(tokenizer: Any) -> Callable[[str], list[int]]:
    return lambda text: [tokenizer.encode(char, add_special_tokens=False)[0] for char in text]


def allowed(mask: GrammarMask, paths: Sequence[Sequence[int]]) -> list[set[int]]:
    scores_TV = mask.adjust(torch.zeros(len(paths), VOCAB_SIZE), paths)
    return [{*row_V.isfinite().nonzero()[:, 0].tolist()} for row_V in scores_TV]


EVERY = {*range(VOCAB_SIZE)}


def test_ends_are_allowed_just_where_the_grammar_may_end(grammars: Grammars, tokenizer: Any, ids: Any) -> None:
    mask, (ab,) = grammars.mask(Grammar("regex", "a+b?")), tokenizer.convert_tokens_to_ids(["ab"])
    (a, b) = ids("ab")
    assert allowed(mask, [(), (a,), (a, a), (a, b), (ab,)]) == [{a, ab}, {a, b, ab, END}, {a, b, ab, END}, {END}, {END}]


def test_rows_that_nobody_looks_at_stay(grammars: Grammars, ids: Any) -> None:
    mask, (a, b) = grammars.mask(Grammar("regex", "ab")), ids("ab")
    assert allowed(mask, [(b,), (a, b, END), (a, a, b), (VOCAB_SIZE + 10**6,), (END, END)]) == [EVERY] * 5
    assert allowed(mask, [(a,)]) == [{b}], "what is behind must not stay with the matcher"


def test_what_was_asked_before_does_not_matter(grammars: Grammars, ids: Any) -> None:
    """Random paths in random order, some of them out of the grammar, committed bit by bit, against fresh matchers."""
    text, chance = ids('{"a":[1,2],"b":"a"}'), random.Random(1)
    grammar = Grammar("json_object")
    mask, committed = grammars.mask(grammar), 0
    while committed < len(text):
        paths = list[tuple[int, ...]]()
        for _ in range(12):
            path = text[committed : committed + chance.randrange(6)]
            if path and chance.random() < 0.5:
                path[chance.randrange(len(path))] = chance.randrange(VOCAB_SIZE)
            paths.append(tuple(path))
        fresh = [grammars.mask(grammar) for _ in paths]
        for one in fresh:
            one.accept(text[:committed])
        wanted = [allowed(one, [path])[0] for one, path in zip(fresh, paths, strict=True)]
        assert allowed(mask, paths) == wanted
        assert len({len(one) for one in wanted}) > 1, "all are alike"
        num_new = chance.randrange(1, 4)
        mask.accept(text[committed : committed + num_new])
        committed += num_new


def test_a_text_begins_anew(grammars: Grammars, ids: Any) -> None:
    mask, (a, b) = grammars.mask(Grammar("regex", "ab")), ids("ab")
    mask.accept([a])
    assert allowed(mask, [()]) == [{b}]
    mask.begin([b, b])
    assert allowed(mask, [()])[0] >= {a} and b not in allowed(mask, [()])[0]


def test_logits_are_never_changed_in_place_and_bad_ones_are_told_of(grammars: Grammars, ids: Any) -> None:
    mask = grammars.mask(Grammar("regex", "ab"))
    logits_TV = torch.zeros(3, VOCAB_SIZE, dtype=torch.bfloat16)
    logits_TV[1, 7], logits_TV[2, 9] = torch.nan, torch.inf
    before_TV = logits_TV.clone()
    scores_TV = mask.adjust(logits_TV, [(), (), ()])
    assert torch.equal(logits_TV.nan_to_num(), before_TV.nan_to_num()) and scores_TV.dtype == torch.float32
    assert scores_TV[0].max() == 0 and scores_TV[1].isnan().any() and scores_TV[2].max() == torch.inf


def test_a_grammar_that_leads_nowhere_ends_in_a_line(grammars: Grammars, ids: Any) -> None:
    mask, (a, b) = grammars.mask(Grammar("lark", 'start: "a" x\nx: "b" x')), ids("ab")
    mask.accept([a, b] * 1)
    sound = grammars.mask(Grammar("lark", 'start: "a" | "b" x\nx: x'))
    assert allowed(sound, [(a,), (b,)]) == [{END}, EVERY], "a dead end beside does no harm"
    assert allowed(sound, [(a,), ()])[0] == {END}
    sound.accept([b])
    with pytest.raises(UserError, match="cannot be followed any further"):
        sound.accept([a])


def test_without_an_end_token_a_text_is_over_where_nothing_may_follow(tokenizer: Any, ids: Any) -> None:
    mask, (a, b) = Grammars(tokenizer, VOCAB_SIZE, set()).mask(Grammar("regex", "ab*|ba")), ids("ab")
    sampler = Sampler(Sampling(), VOCAB_SIZE, adjustments=[mask])
    sampler.begin([])
    assert not mask.is_over and sampler.accept([a, b]) == 2 and not sampler.is_over, "more may follow"
    sampler.cut([])
    assert sampler.accept([b, a, a, a]) == 2 and sampler.is_over


def test_padding_rows_and_more_tokens_than_rows(tokenizer: Any, ids: Any) -> None:
    (a,) = ids("a")
    for vocab_size in (VOCAB_SIZE + 50, VOCAB_SIZE - 20):
        mask = Grammars(tokenizer, vocab_size, {END}).mask(Grammar("regex", "a+"))
        scores_TV = mask.adjust(torch.zeros(1, vocab_size), [(a,)])
        assert {*scores_TV[0].isfinite().nonzero()[:, 0].tolist()} == {a, END}


def knowing_none(mask: GrammarMask) -> Tensor:
    """What becomes of a draft's row all of whose tokens are forbidden."""
    logits_TV = torch.zeros(1, VOCAB_SIZE)
    logits_TV[:, 10:] = -torch.inf  # special tokens and a few more are all that it has
    return mask.adjust(logits_TV, [()])


def test_a_draft_that_knows_nothing_of_what_is_allowed_takes_any_of_it(grammars: Grammars, ids: Any) -> None:
    row_TV, wanted = knowing_none(grammars.mask(Grammar("regex", "[xyz]"))), {*ids("xyz")}
    for drafting in ChildSampling:
        for temperature in (0.0, 1.0):
            sampler = Sampler(Sampling(temperature=temperature), VOCAB_SIZE, drafting)
            children = draw_children(row_TV, 3, sampler, 5)
            drawn = {*children.token_WK[0].tolist()}
            if drafting is ChildSampling.WITH_REPLACEMENT or temperature == 0:
                assert drawn & wanted
            else:
                assert drawn == wanted
            if children.probs_WV is not None:
                assert children.probs_WV.isfinite().all()
                assert children.probs_WV[0, sorted(wanted)].sum() == pytest.approx(1)
