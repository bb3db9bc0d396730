"""Feed-forwards that take wide passes in parts.

Between their matrices a prompt would hold three times their width for each of thousands of rows,
which a plan would have to keep free in every pass. So there rows go in parts of as many as one
product has at most on a CPU. Invariant: a row's result is that of all rows at once, as far as
products give a row the same bits whatever rows are beside it.
"""

from collections.abc import Callable, Iterable
from inspect import signature
from weakref import WeakMethod

from torch import Tensor, nn

from offload.memory.sizes import INNER_ROWS

_MATRICES = ("gate_proj", "up_proj", "gate_up_proj")


def take_rows_in_parts(layers: Iterable[nn.Module]) -> None:
    """Let the feed-forwards of these layers take wide passes in parts from now on.

    Only those that `checkpoint.sizes` knows by the names of their matrices.
    """
    for layer in layers:
        inner = getattr(layer, "mlp", None)
        if isinstance(inner, nn.Module) and _is_plain(inner):
            inner.forward = _in_parts(inner)


def _is_plain(inner: nn.Module) -> bool:
    """Return whether a feed-forward is made of matrices alone, and given nothing but rows."""
    children = dict(inner.named_children())
    has_matrices = "down_proj" in children and any(name in children for name in _MATRICES)
    others = [one for one in children.values() if type(one) is not nn.Linear]
    is_bare = not any(True for one in others for _ in one.parameters())
    return has_matrices and is_bare and len(signature(inner.forward).parameters) == 1


def _in_parts(inner: nn.Module) -> Callable[[Tensor], Tensor]:
    # weak, because a module that refers to itself would outlive its model
    whole_of = WeakMethod(inner.forward)

    def forward(hidden_states: Tensor) -> Tensor:
        whole = whole_of()
        num_rows = hidden_states.shape[-2]
        assert whole is not None, "its module is there"
        if num_rows <= INNER_ROWS:
            return whole(hidden_states)
        first = whole(hidden_states[..., :INNER_ROWS, :])
        out = first.new_empty(hidden_states.shape)
        out[..., :INNER_ROWS, :] = first
        for lo in range(INNER_ROWS, num_rows, INNER_ROWS):
            out[..., lo : lo + INNER_ROWS, :] = whole(hidden_states[..., lo : lo + INNER_ROWS, :])
        return out

    return forward
