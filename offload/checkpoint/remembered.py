"""What follows from a checkpoint's headers alone is worked out once: many plans ask the same of one
checkpoint.

Invariant: what is kept of a checkpoint goes with it.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

_Checkpoint = TypeVar("_Checkpoint")
_Others = ParamSpec("_Others")
_Found = TypeVar("_Found")


def remembered(
    function: Callable[Concatenate[_Checkpoint, _Others], _Found],
) -> Callable[Concatenate[_Checkpoint, _Others], _Found]:
    """Return the function with its results kept, by checkpoint and other arguments; errors are
    raised anew each time.

    Nobody may change a result, and none may refer to the checkpoint, which would then stay for
    ever.
    """
    known: WeakKeyDictionary[_Checkpoint, dict[Any, _Found]] = WeakKeyDictionary()

    @wraps(function)
    def ask(checkpoint: _Checkpoint, *others: _Others.args, **named: _Others.kwargs) -> _Found:
        own = known.setdefault(checkpoint, {})
        key = (others, tuple(sorted(named.items())))
        if key not in own:
            own[key] = function(checkpoint, *others, **named)
        return own[key]

    return ask
