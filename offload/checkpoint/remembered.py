"""A cache for results that follow from a checkpoint's headers alone.

Many plans ask the same questions of one checkpoint. Invariant: what is kept of a checkpoint is
freed with it.
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
    """Return the function with its results kept, by checkpoint and other arguments.

    Errors are raised anew each time. A result must not be changed, nor refer to the checkpoint,
    which would then never be freed.
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
