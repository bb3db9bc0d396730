"""What a window of text shows of a pair: which candidates of the draft come true, and what trees yield.

The target goes on writing from the window, since that is what decoding meets, with trees of several
sizes in turns. Then the draft offers `NUM_RANKS` candidates at each position that was written, and
the rule says which one it accepts: its rank, or -1. `spectr` judges the children of a node as one
group, so its ranks depend on how many there are; the ratio test on the same draws stands in. At last
dynamic trees are grown again along the text, which takes draft passes alone: so the tokens of each
are counted on all that was written.

V tokens of the vocabulary, K candidates, P passes.
"""

from collections.abc import Iterator, Sequence
from itertools import count

import torch
from torch import Tensor

from offload.drafting.base import DraftText
from offload.drafting.static import draw_children
from offload.engine.decoder import Decoder
from offload.engine.sequence import TokenSequence
from offload.planning.acceptance import NUM_RANKS
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.trees.token_tree import Proposals, TokenTree
from offload.trees.topology import DynamicShape, Shape, chain, sequences
from offload.trees.verification import Acceptance, ratio_trials, walk


def write_in_turns(
    decoder: Decoder,
    window: Sequence[int],
    sampling: Sampling,
    num_new: int,
    trees: Sequence[Shape],
    first: int = 0,
) -> list[int]:
    """Return the token ids that the target writes behind a window, with each of these trees in turn.

    Args:
        num_new: tokens to write; fewer where the text ends.
        first: the tree to begin with.
    """
    run = decoder.run(window, sampling, max_new_tokens=num_new)
    passes = count(first)
    run.sequence.follow(lambda _: trees[next(passes) % len(trees)])
    for _ in run:
        pass
    return run.result().token_ids


def tokens_again(
    decoder: Decoder,
    window: Sequence[int],
    written: Sequence[int],
    sampling: Sampling,
    bounds: DynamicShape,
) -> list[int]:
    """Return the tokens of the passes that would have written this with trees within `bounds`.

    The target runs no pass, but to show a draft the states that it reads: a rule that repeats its
    draws accepts what is written. Only passes count that cannot reach the end of what is known: each
    is whole then, and their mean is not biased (Wald).
    """
    assert decoder.rule.repeats_draws, "what fresh draws accept is not known from the text"
    sequence = decoder.begin([*window, *written], sampling)
    _show_states(decoder, sequence)
    at = len(window)
    tokens = sequence.tokens
    sampler = sequence.sampler
    state = sequence.caches.draft
    accepted_P = list[int]()
    while at + bounds.depth < len(tokens):
        (tree,) = decoder.drafter.propose([DraftText(bounds, tokens[:at], sampler, state)])
        nodes = [0]
        while (child := tree.child(nodes[-1], tokens[at + len(nodes) - 1])) is not None:
            nodes.append(child)
        accepted = Acceptance(nodes, tokens[at : at + len(nodes)])
        decoder.drafter.accepted(tree, accepted, sampler, state)
        accepted_P.append(len(nodes))
        at += len(nodes)
    return accepted_P


def ranks_of(
    decoder: Decoder, window: Sequence[int], written: Sequence[int], sampling: Sampling
) -> list[int]:
    """Return the accepted rank at each position that was written behind a window, or -1.

    A rule that repeats the target's draws accepts the candidate that is the written token. The ratio
    test draws afresh, and may accept another one.
    """
    sequence = decoder.begin([*window, *written], sampling)
    stars = _stars(decoder, sequence, len(window))
    if decoder.rule.repeats_draws:
        _show_states(decoder, sequence)
        return [_rank_of(star, token) for star, token in zip(stars, written, strict=True)]
    logits = _target_logits(decoder, sequence, len(window))
    pairs = zip(stars, logits, strict=True)
    return [_accepted_rank(star, logits_V, sequence.sampler) for star, logits_V in pairs]


def _rank_of(star: TokenTree, token: int) -> int:
    child = star.child(0, token)
    return -1 if child is None else child - 1


def _accepted_rank(star: TokenTree, logits_V: Tensor, sampler: Sampler) -> int:
    """Return the rank that the ratio test accepts, by fresh coins: the position does not matter."""
    nodes = walk(star, logits_V.expand(star.num_nodes, -1), sampler, ratio_trials).nodes
    return nodes[1] - 1 if len(nodes) > 1 else -1


def _stars(decoder: Decoder, text: TokenSequence, start: int) -> Iterator[TokenTree]:
    """Yield for each position from `start` on the candidates, as children of the token before it."""
    assert decoder.drafter.model is not None, "only a model ranks candidates"
    rows = decoder.drafter.score(text.tokens, start, text.caches.draft)
    for position, logits_1V in enumerate(rows, start):
        yield _star_of(logits_1V, text.sampler, position, decoder.target.vocab_size)


def _star_of(logits_1V: Tensor, sampler: Sampler, position: int, vocab_size: int) -> TokenTree:
    """Return a root, whose own token does not matter, with the candidates as its children."""
    token_1K, draw, distribution_1V = draw_children(logits_1V, NUM_RANKS, sampler, position)
    topology = sequences(token_1K.shape[1], 1)
    proposals = None
    if distribution_1V is not None:
        proposals = Proposals.blank(topology, vocab_size, draw, distribution_1V.device)
        proposals.write([0], distribution_1V)
    return TokenTree(topology, torch.cat([token_1K.new_zeros(1), token_1K[0]]), proposals)


def _show_states(decoder: Decoder, text: TokenSequence) -> None:
    """Let the target run a text whose hidden states the draft reads."""
    if decoder.drafter.needs is not None:
        cache = text.caches.target
        decoder.target.score([decoder.target.part_of(text.tokens, cache)])
        decoder.target.commit([], len(text.tokens), cache)


def _target_logits(decoder: Decoder, text: TokenSequence, start: int) -> Iterator[Tensor]:
    """Yield the target's logits (V) for each token from `start` on, scored as one path."""
    tokens = text.tokens
    cache = text.caches.target
    num_rows = decoder.plan.num_nodes
    for lo in range(start, len(tokens), num_rows):
        token_N = torch.tensor(tokens[lo - 1 : lo - 1 + min(num_rows, len(tokens) - lo)])
        path = TokenTree(chain(len(token_N) - 1), token_N)
        part = decoder.target.part_of(tokens[:lo], cache, path)
        logits = decoder.target.score([part])[0]
        # a draft may read the states of these
        decoder.target.commit(range(path.num_nodes), lo, cache)
        yield from logits
