"""How far the draft's scores are to be trusted: the exponent that best foretells what the target really emits.

A draft's law to the power beta, normalised, is what is taken for the chance of a child; a distilled draft is too modest
about the target's choice, so beta is mostly above one. It is learned while decoding: every exponent of a grid is
charged the log-loss of each token that was emitted, old charges fade, and the cheapest exponent is used next.
Only the shape of later trees follows from it, and so never what is emitted.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_GRID = (0.5, 0.63, 0.8, 1.0, 1.25, 1.6, 2.0, 2.5, 3.2)
_START = 1.6  # before anything was seen
_DOUBT = 4.0  # nats per squared log of the ratio to `_START`, charged in advance
_KEPT = 0.998  # of all charges, from one token to the next


class Sharpness:
    """The exponent for one kind of sampling."""

    def __init__(self) -> None:
        self._charge_G = _DOUBT * (torch.tensor(_GRID) / _START).log().square()

    @property
    def exponent(self) -> float:
        """beta, for the next tree."""
        return _GRID[int(self._charge_G.argmin())]

    def learn(self, score_TV: Tensor, tokens: Sequence[int]) -> None:
        """`tokens` were emitted where the draft gave these scores; one that it ruled out tells nothing."""
        score_T = score_TV.gather(1, torch.tensor(tokens, device=score_TV.device)[:, None])[:, 0]
        losses = [(beta * score_TV).logsumexp(1) - beta * score_T for beta in _GRID]
        for loss_G in torch.stack(losses, 1).cpu():
            if torch.isfinite(loss_G).all():
                self._charge_G = _KEPT * self._charge_G + loss_G
