"""How likely the target thought the tokens that were emitted: its own opinion, before anything was done to its logits.

Invariant: what is asked for here changes no token.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from offload.sampling.logits import Rows


class TokenLogprob(NamedTuple):
    """One new token."""

    token: int
    logprob: float  # natural; of the softmax of the target's logits, before penalties, biases, temperature and filters
    top: tuple[tuple[int, float], ...]  # the likeliest tokens there with theirs, the likeliest first


def path_logprobs(rows: Rows, nodes: Sequence[int], tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Of the tokens that were emitted after these nodes of an accepted path, from the target's own logits."""
    return [_logprob(rows[node], token, num_top) for node, token in zip(nodes, tokens, strict=True)]


def _logprob(logits_V: Tensor, token: int, num_top: int) -> TokenLogprob:
    logprob_V = logits_V.float().log_softmax(0)
    logprob_K, token_K = logprob_V.topk(min(num_top, len(logprob_V)))
    return TokenLogprob(token, float(logprob_V[token]), tuple(zip(token_K.tolist(), logprob_K.tolist(), strict=True)))
