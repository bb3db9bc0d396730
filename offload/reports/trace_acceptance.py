"""Traces of acceptance: which of the draft's candidates a rule accepts at every position of a text.

At each position the draft offers as many children as a trace looks at, drawn as the rule's drafts
are, and the rule says which of them it takes. Behind a token that the target has written, only
those random outcomes of a ratio rule count that emit this token: they are drawn until one does.
`spectr` judges the children of a node as one group, so its ranks depend on how many there are; the
ratio test on the same draws stands in.

Invariant: with a rule that repeats the target's draws, a trace of written text tells pass by pass
what decoding does.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

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
from offload.trees.topology import DynamicShape, chain, sequences
from offload.trees.verification import Acceptance, ratio_trials, walk

# an unlikely token may take many draws; after this many the last outcome stands
_MAX_DRAWS = 64

DrawStar = Callable[[], TokenTree]


def write(
    decoder: Decoder, prompt: Sequence[int], sampling: Sampling, num_new: int, tree: str
) -> list[int]:
    """Return `num_new` tokens that the target writes behind a prompt, fewer where the text ends."""
    run = decoder.run(prompt, sampling, max_new_tokens=num_new, tree=tree)
    for _ in run:
        pass
    return run.result().token_ids


def ranks_of(
    decoder: Decoder, prompt: Sequence[int], written: Sequence[int], sampling: Sampling
) -> list[int]:
    """Return the ranks of what the target has written, -1 where a token is not a child's."""
    sequence = decoder.begin([*prompt, *written], sampling)
    stars = _stars(decoder, sequence, len(prompt))
    if decoder.rule.repeats_draws:
        _show_states(decoder, sequence)
        return [_rank_of(draw(), token) for draw, token in zip(stars, written, strict=True)]
    logits = _target_logits(decoder, sequence, len(prompt))
    known = zip(logits, stars, written, strict=True)
    return [_accepted_rank(draw, row_V, sequence.sampler, token) for row_V, draw, token in known]


def dynamic_again(
    decoder: Decoder,
    prompt: Sequence[int],
    written: Sequence[int],
    sampling: Sampling,
    bounds: DynamicShape,
) -> list[int]:
    """Return the tokens per pass that would have written this, with trees grown within `bounds`.

    No target pass is run but to show a draft the states that it reads. Only passes count that
    cannot reach the end of what is known: each is whole then, and their mean is not biased (Wald).
    """
    assert decoder.rule.repeats_draws, "what fresh draws accept is not known from the text"
    sequence = decoder.begin([*prompt, *written], sampling)
    _show_states(decoder, sequence)
    at = len(prompt)
    bursts = list[int]()
    tokens = sequence.tokens
    sampler = sequence.sampler
    state = sequence.caches.draft
    while at + bounds.depth < len(tokens):
        (tree,) = decoder.drafter.propose([DraftText(bounds, tokens[:at], sampler, state)])
        nodes = [0]
        while (child := tree.child(nodes[-1], tokens[at + len(nodes) - 1])) is not None:
            nodes.append(child)
        accepted = Acceptance(nodes, tokens[at : at + len(nodes)])
        decoder.drafter.accepted(tree, accepted, sampler, state)
        bursts.append(len(nodes))
        at += len(nodes)
    return bursts


def _rank_of(star: TokenTree, token: int) -> int:
    child = star.child(0, token)
    return -1 if child is None else child - 1


def _accepted_rank(draw: DrawStar, logits_V: Tensor, sampler: Sampler, token: int) -> int:
    """Return the rank that the ratio test accepts in an outcome that emits `token`."""
    for _ in range(_MAX_DRAWS):
        star = draw()
        # fresh coins make the position irrelevant
        outcome = walk(star, logits_V.expand(star.num_nodes, -1), sampler, ratio_trials)
        if outcome.tokens[0] == token:
            break
    return outcome.nodes[1] - 1 if len(outcome.nodes) > 1 else -1


def _stars(decoder: Decoder, text: TokenSequence, start: int) -> Iterator[DrawStar]:
    """Yield for every position from `start` on a way to draw the children of the token before."""
    assert decoder.drafter.model is not None, "only a model ranks candidates"
    rows = decoder.drafter.score(text.tokens, start, text.caches.draft)
    for position, logits_1V in enumerate(rows, start):
        yield partial(_draw_star, logits_1V, text.sampler, position, decoder.target.vocab_size)


def _show_states(decoder: Decoder, text: TokenSequence) -> None:
    """Let the target run a text whose hidden states the draft reads."""
    if decoder.drafter.needs is not None:
        cache = text.caches.target
        decoder.target.score([decoder.target.part_of(text.tokens, cache)])
        decoder.target.commit([], len(text.tokens), cache)


def _draw_star(logits_1V: Tensor, sampler: Sampler, position: int, vocab_size: int) -> TokenTree:
    """Return a root, whose own token does not matter, with its children."""
    token_1K, draw, distribution_1V = draw_children(logits_1V, NUM_RANKS, sampler, position)
    topology = sequences(token_1K.shape[1], 1)
    proposals = None
    if distribution_1V is not None:
        proposals = Proposals.blank(topology, vocab_size, draw, distribution_1V.device)
        proposals.write([0], distribution_1V)
    return TokenTree(topology, torch.cat([token_1K.new_zeros(1), token_1K[0]]), proposals)


def _target_logits(decoder: Decoder, text: TokenSequence, start: int) -> Iterator[Tensor]:
    """Yield the target's logits (V) for every token from `start` on, scored as one path."""
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
