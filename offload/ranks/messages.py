"""What ranks tell each other: a kind, whole numbers, and at most one tensor.

Nothing is pickled: a message is read as numbers, whoever sent it. Messages of one (sender, receiver, channel) arrive in
the order in which they were sent; of two channels either may come first.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor


class Channel(IntEnum):
    """Ways between two ranks that do not wait for each other."""

    DATA = 0  # work, in the order in which it is to be done
    RESULT = 1  # what was drawn
    CONTROL = 2  # what must not wait behind work: cancellations, the end
    DRAFT = 3  # between the head and the rank that drafts


class Kind(IntEnum):
    """What a message asks for, or tells."""

    RESET = 0  # a text begins; how it is sampled, and how many committed positions stay
    RUN = 1  # rows to be scored, behind those that were issued before
    COMMIT = 2  # accepted rows, and those that stay uncommitted
    DRAWN = 3  # what the target draws after each row of a run
    CANCEL = 4  # runs that nobody needs any more
    GROW = 5  # the head has room for so many nodes
    TREE = 6  # nodes that a draft proposes
    ACCEPT = 7  # tokens that were accepted
    STOP = 8  # the end
    ERROR = 9  # why a rank has failed
    WORD = 10  # anything small, as JSON


class Message(NamedTuple):
    """One message; each room that sends a kind says what its numbers are."""

    kind: Kind
    numbers: Sequence[int] = ()
    payload: Tensor | None = None  # contiguous, in host memory
