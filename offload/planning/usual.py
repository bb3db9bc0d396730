"""What is assumed of a draft's guesses where nobody has measured this pair: by what kind of draft it is.

A small draft gets the default acceptance. A copy of the target is right far more often, and what is known of it was
measured on the packaged pair's target: ranks of its argmax on Python source (3000 positions), and tokens per sweep of
dynamic trees at temperature 0.7, 3 texts of 220 tokens (`offload generate --draft self:int4 --tree dynamic:NxD`). At
temperature 0 that target repeats itself, which flatters every draft, so those figures are left out. At 8 bits all but
19 positions had the first rank and these the second; at 4 bits a tail is assumed behind the sixth. Another target's
copy may be better or worse: `offload tune` measures it. No torch, no clock.
"""

from typing import NamedTuple

from offload.checkpoint.safetensors import Checkpoint
from offload.planning.traces import DynamicYield
from offload.tree.topology import DEFAULT_ACCEPTANCE

_TAIL = tuple(round(0.0001 * (6 / k) ** 3.5, 7) for k in range(7, 33))  # assumed, as that of the default is
_NEVER = (0.0,) * 30  # seen in 3000 positions


class Usual(NamedTuple):
    """Of one kind of draft."""

    acceptance: tuple[float, ...]  # by rank
    dynamic_yields: tuple[DynamicYield, ...]
    source: str  # in words
    is_copy: bool = False


def _yields(*rows: tuple[int, int, float, int]) -> tuple[DynamicYield, ...]:
    return tuple(
        DynamicYield(num_nodes=nodes, depth=depth, tokens_per_sweep=tokens, num_sweeps=sweeps)
        for nodes, depth, tokens, sweeps in rows
    )


SMALL = Usual(DEFAULT_ACCEPTANCE, (), "default acceptance")
COPIES = {
    4: Usual(
        (0.9183, 0.0647, 0.0123, 0.0033, 0.0007, 0.0003, *_TAIL),
        _yields((16, 15, 10.55, 63), (32, 31, 12.27, 54), (64, 63, 17.74, 37), (128, 64, 23.46, 28)),
        "as a copy at 4 bits of the packaged target",
        is_copy=True,
    ),
    8: Usual(
        (0.9937, 0.0063, *_NEVER),
        _yields((16, 15, 13.06, 51), (32, 31, 18.91, 35), (64, 63, 25.65, 26), (128, 64, 30.42, 22)),
        "as a copy at 8 bits of the packaged target",
        is_copy=True,
    ),
}


def usual_for(draft: Checkpoint | None) -> Usual:
    """Of such a draft; rounding a small one changes little."""
    return COPIES[draft.held.bits] if draft is not None and draft.held and draft.held.is_copy else SMALL
