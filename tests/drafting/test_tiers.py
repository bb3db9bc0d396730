"""A copy verifies in its own passes what lookup guesses: the same trees and texts, in fewer passes."""

from typing import Any

import numpy as np
import pytest
from tiny import Pair

import offload
from offload.datastore.index import Trie
from offload.drafting import dynamic
from offload.drafting.lookup import Guesses, SourceWeights, TrieGuesses
from offload.drafting.tiers import Standing, guesses_behind


def chain_of(*tokens: int) -> Trie:
    """Return the trie of one continuation."""
    size = len(tokens)
    return Trie(np.arange(-1, size - 1), np.array(tokens), np.ones(size, dtype=np.int64), 1)


def guesses_of(*tokens: int) -> Guesses:
    weights = SourceWeights()
    for _ in range(200):
        weights.learn("lookup", 8, 1.0, 0.0)
        weights.learn("lookup", 9, 1.0, 0.0)
    return Guesses([TrieGuesses("lookup", 8, chain_of(*tokens))], weights)


def test_the_likeliest_guesses_stand_behind_what_was_picked_parents_first() -> None:
    guesses = guesses_of(5, 6, 7, 8)
    picked = [Standing(0.9, 0, guesses.root, 4), Standing(0.5, 2, guesses.follow(guesses.root, 5), 3)]
    found = guesses_behind(guesses, picked, 6, 64)
    assert len(found) == 4, "no more rows than a pass has room for"
    nodes = [*picked, *found]
    for place, node in enumerate(found, 2):
        assert node.parent is not None and node.parent < place
        above = nodes[node.parent]
        assert node.depth == above.depth + 1 and node.chance <= above.chance
    assert found[0].token == 5 and found[0].parent == 0
    assert not guesses_behind(guesses, picked, 2, 64), "the pass is full"
    assert not guesses_behind(guesses, picked, 8, 1), "what lies at the depth of the tree has no child"
    unlikely = [Standing(1.0, 0, guesses.follow(guesses.root, 9), 4), Standing(0.01, 2, guesses.root, 3)]
    assert not guesses_behind(guesses, unlikely, 8, 64), "such a row would be in vain"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_no_draft_and_of_the_copy_alone_in_fewer_passes(
    temperature: float, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = pair
    prompt = [3, 4, 5, 6, 7, 8, 9, 10] * 6

    def run(draft: str | None, lookup: Any) -> tuple[list[int], int, float]:
        num_passes = 0
        tree = "none" if draft is None else "dynamic:32x31"
        with offload.load(str(target), draft, tree=tree, lookup=lookup, profile="none", context=256) as decoder:
            propose = decoder.drafter.propose

            def counted(*args: Any) -> Any:
                nonlocal num_passes
                trees = propose(*args)
                num_passes += len(decoder.drafter.widths)
                return trees

            monkeypatch.setattr(decoder.drafter, "propose", counted)
            found = decoder.generate(prompt, max_new_tokens=64, temperature=temperature, seed=5)
            return found.token_ids, num_passes, found.stats.tokens_per_sweep

    alone, _, _ = run(None, False)
    copied, _, tokens = run("self:int4", False)
    tiered, fewer, more = run("self:int4", True)
    # guesses are scored once, before the tree grows, and stand in no tier
    monkeypatch.setattr(dynamic, "ROWS_OF_PASS", 0)
    joined, passes, _ = run("self:int4", True)
    assert alone == copied == tiered == joined
    assert more > 0.9 * tokens
    if not temperature:
        assert fewer <= passes
