"""How far the draft's scores are to be trusted: the exponent that best foretells what the target really emits.

The chance of a child is taken to be the draft's distribution to the power beta, normalised; a distilled draft is less
sure than it should be, so beta is mostly above one. For each token that was emitted every exponent of a grid pays its
log-loss, old losses fade, and the one that has paid least is used next. It shapes later trees, never what is emitted.
"""

import torch
from torch import Tensor

_GRID = (0.5, 0.63, 0.8, 1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.3, 8.0, 10.0, 12.7, 16.0)
_START = 1.6  # before anything was seen
_DOUBT = 4.0  # of other exponents at the start: nats of loss, times the squared log of their ratio to `_START`
_KEPT = 0.998  # of all losses, from one token to the next


class Sharpness:
    """The exponent for one kind of sampling."""

    def __init__(self) -> None:
        self._loss_G = _DOUBT * (torch.tensor(_GRID) / _START).log().square()

    @property
    def exponent(self) -> float:
        return _GRID[int(self._loss_G.argmin())]

    def learn(self, score_TV: Tensor, token_T: Tensor) -> None:
        """These tokens were emitted where the draft gave these scores; one that it ruled out tells nothing."""
        losses = [-(beta * score_TV).log_softmax(1).gather(1, token_T[:, None]) for beta in _GRID]
        for loss_G in torch.cat(losses, 1).cpu():
            if torch.isfinite(loss_G).all():
                self._loss_G = _KEPT * self._loss_G + loss_G
