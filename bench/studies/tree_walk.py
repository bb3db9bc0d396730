"""Tokens per step of any tree and rule, at the price of plain decoding.

A step's walk looks at the children of the nodes that it visits and at nothing else, and what is drawn below a node
depends on that node's own scores alone. So nodes off the accepted path need not be computed: every position is one
star, a node and its children, filled by the drafter's own draw and verified by the rule itself. A tree of 768 nodes
costs what a chain of one costs, and the texts of a batch advance together.

Invariant: with `match` the steps are those of `Decoder.generate` for the same seed, token by token and length by length
(a test compares them); with the other rules their distribution is the decoder's.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload.bench.studies.pair_text import Pair, Texts
from offload.config import Sampling
from offload.drafting.children import draw_children
from offload.sampling.sampler import Sampler
from offload.tree.proposals import Floats, Proposals
from offload.tree.token_tree import TokenTree, children_of
from offload.tree.topology import Topology, chain, k_ary
from offload.verification.rules import Rule, find_rule


class Walker:
    """One text's way through the trees of its steps.

    Attributes:
        lengths: tokens of every finished step.
        tokens: all that was emitted.
    """

    def __init__(self, topology: Topology, rule: Rule, sampling: Sampling, vocab_size: int) -> None:
        self._children, self._rule, self._vocab_size = children_of(topology), rule, vocab_size
        self._sampler = Sampler(sampling, vocab_size, rule.drafting)
        self._node = self._num_begun = 0
        self.lengths: list[int] = []
        self.tokens: list[int] = []

    def has_finished(self, num_tokens: int) -> bool:
        """Whether a step has ended with so many tokens or more; the last step counts in full, so nothing is biased."""
        return self._num_begun == 0 and len(self.tokens) >= num_tokens

    def emit(self, target_V: Tensor, draft_V: Tensor, position: int) -> int:
        """The token at `position`: an accepted child, and the walk goes on below it, or the one that ends the step."""
        children = self._children[self._node]
        star = self._star(len(children), draft_V, position)
        accepted = self._rule.verify(star, target_V.expand(star.num_nodes, -1), self._sampler, position - 1)
        self._num_begun += 1
        if len(accepted.nodes) > 1:  # what the rule went on to say below the child belongs to the next call
            self._node = children[accepted.nodes[1] - 1]
        else:
            self.lengths.append(self._num_begun)
            self._node = self._num_begun = 0
        self.tokens.append(accepted.tokens[0])
        return accepted.tokens[0]

    def _star(self, num_children: int, draft_V: Tensor, position: int) -> TokenTree:
        topology = _star_shape(num_children)
        if not num_children:
            return TokenTree(topology, torch.zeros(1, dtype=torch.long))
        token_1K, draw, p_1V = draw_children(draft_V[None], num_children, self._sampler, position)
        token_N = torch.cat([torch.zeros(1, dtype=torch.long), token_1K[0]])
        if p_1V is None:
            return TokenTree(topology, token_N)
        proposals = Proposals.blank(topology, self._vocab_size, draw)
        proposals.write([0], p_1V)
        return TokenTree(topology, token_N, proposals)


@lru_cache(maxsize=64)
def _star_shape(num_children: int) -> Topology:
    return k_ary(num_children, num_children + 1) if num_children else chain(0)


class Steps(NamedTuple):
    """What a batch of texts yielded: counts per prompt, so that figures of different trees can be paired."""

    num_tokens_B: Floats
    num_steps_B: Floats

    @property
    def tokens_per_step(self) -> float:
        return float(self.num_tokens_B.sum() / self.num_steps_B.sum())

    @property
    def error(self) -> float:
        """Standard error of `tokens_per_step`; prompts are independent of each other, steps of one prompt are not."""
        return jackknife_error([self.without(b).tokens_per_step for b in range(len(self.num_steps_B))])

    def without(self, prompt: int) -> "Steps":
        return Steps(np.delete(self.num_tokens_B, prompt), np.delete(self.num_steps_B, prompt))

    def as_dict(self) -> dict[str, float]:
        num_steps = int(self.num_steps_B.sum())
        return {"tokens_per_step": self.tokens_per_step, "standard_error": self.error, "num_steps": num_steps}


def ratio_of(above: Steps, below: Steps) -> tuple[float, float]:
    """Tokens per step of one tree over another's, and the standard error, on the same prompts."""
    ratios = [
        above.without(b).tokens_per_step / below.without(b).tokens_per_step for b in range(len(above.num_steps_B))
    ]
    return above.tokens_per_step / below.tokens_per_step, jackknife_error(ratios)


def jackknife_error(values: Sequence[float]) -> float:
    """Standard error of a figure from its values with one prompt left out in turn."""
    return float(np.std(values) * np.sqrt(len(values) - 1))


def walk_all(pair: Pair, prompt_BT: Tensor, topology: Topology, rule: str, sampling: Sampling) -> "Walks":
    """Walkers for a batch, text b with seed `sampling.seed + b`, ready to run."""
    seeds = (replace(sampling, seed=sampling.seed + b) for b in range(len(prompt_BT)))
    walkers = [Walker(topology, find_rule(rule), seeded, pair.vocab_size) for seeded in seeds]
    return Walks(walkers, Texts(pair, prompt_BT))


class Walks(NamedTuple):
    """A batch under way."""

    walkers: list[Walker]
    texts: Texts

    def run(self, num_tokens: int) -> Steps:
        """Until every text has finished a step with `num_tokens` or more."""
        last = [0] * len(self.walkers)
        while True:
            for b, walker in enumerate(self.walkers):
                if not walker.has_finished(num_tokens):
                    scores = self.texts.target_BV[b], self.texts.draft_BV[b]
                    last[b] = walker.emit(*scores, self.texts.length)
            if all(walker.has_finished(num_tokens) for walker in self.walkers):
                break
            self.texts.append(last)
        counts = [(sum(walker.lengths), len(walker.lengths)) for walker in self.walkers]
        return Steps(*np.array(counts, dtype=np.float64).T)
