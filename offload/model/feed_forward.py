"""Feed-forwards that take wide passes in parts.

Between its matrices a feed-forward would hold three times its width for each of a prompt's
thousands of rows, memory that a plan would have to keep free in every pass. So rows pass there in
parts, as many as one product has at most on a CPU. Invariant: a row's result is that of all rows at
once, as far as products give a row the same bits whatever rows are beside it.
"""

from collections.abc import Iterable
from inspect import signature
from typing import Any

from torch import Tensor, nn

from offload.memory.sizes import INNER_ROWS
from offload.model.linear import Around, Linear, replace_child

_MATRICES = ("gate_proj", "up_proj", "gate_up_proj")


class InParts(Around):
    """A feed-forward that takes wide passes in parts."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the output of the inner feed-forward."""
        num_rows = hidden_states.shape[-2]
        if num_rows <= INNER_ROWS:
            return self.inner(hidden_states)
        first = self.inner(hidden_states[..., :INNER_ROWS, :])
        out = first.new_empty(hidden_states.shape)
        out[..., :INNER_ROWS, :] = first
        for lo in range(INNER_ROWS, num_rows, INNER_ROWS):
            some_rows = slice(lo, lo + INNER_ROWS)
            out[..., some_rows, :] = self.inner(hidden_states[..., some_rows, :])
        return out


def take_rows_in_parts(layers: Iterable[nn.Module]) -> None:
    """From now on let the feed-forwards of these layers take wide passes in parts, if they can."""
    for layer in layers:
        if is_plain(layer):
            inner: Any = layer.mlp
            replace_child(layer, "mlp", InParts(inner))


def is_plain(layer: nn.Module) -> bool:
    """Return True if a feed-forward consists of matrices alone, and takes nothing but rows."""
    inner = getattr(layer, "mlp", None)
    if not isinstance(inner, nn.Module):
        return False
    children = dict(inner.named_children())
    has_matrices = "down_proj" in children and any(name in children for name in _MATRICES)
    others = [child for child in children.values() if not isinstance(child, Linear)]
    is_bare = not any(True for child in others for _ in child.parameters())
    return has_matrices and is_bare and len(signature(inner.forward).parameters) == 1
