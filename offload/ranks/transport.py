"""How messages and activations get from rank to rank; who carries them is chosen at start."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from offload.errors import RankError as RankError  # what every method may raise
from offload.ranks.messages import Channel, Message


class Transport(Protocol):
    """One rank's way to all others. Every method but `close` raises `RankError` where a peer is lost.

    Attributes:
        rank: this one's number; 0 is the head.
        num_ranks: how many there are.
        bytes_sent: by kind of message, `broadcast` and `gather`; headers included, as often as there are receivers.
        exchange_s: how long this rank was in `broadcast` and `gather`, waiting for slower ones included.
    """

    rank: int
    num_ranks: int
    bytes_sent: Counter[str]
    exchange_s: float

    def send(self, to: int, channel: Channel, message: Message) -> None:
        """Returns at once; what is sent to oneself arrives as well. A payload must not be written to any more."""

    def receive(self, source: int, channel: Channel) -> Message:
        """The next message, waited for as long as a user may be idle."""

    def poll(self, source: int, channel: Channel) -> Message | None:
        """The next message, if it has arrived."""

    def wait_any(self, ways: Sequence[tuple[int, Channel]]) -> tuple[int, Channel]:
        """One of these (source, channel) whose next message has arrived; waits for it, and takes nothing."""

    def broadcast(self, rows: Tensor, source: int = 0) -> Tensor:
        """The source's rows on every rank; others give a tensor of the same shape and type, which may be filled.

        It is of the host, as in `gather`: two ranks that chose a way by where their rows lie might never meet.
        """

    def gather(self, part_TR: Tensor, widths: Sequence[int]) -> Tensor:
        """The columns of all ranks side by side; this one's are `part_TR`, rank r has `widths[r]` of them."""

    def close(self, reason: str = "", *, is_refusal: bool = False) -> None:
        """Tell the others that this rank has ended, and let go.

        Args:
            reason: why, where it has failed; others then raise `RankError` with it.
            is_refusal: what failed is what a user can mend.
        """
