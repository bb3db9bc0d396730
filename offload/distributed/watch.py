"""Whether all ranks are alive, and if not, why: every rank learns it within milliseconds.

Two threads for each peer share a process group: one sends a pulse every few seconds, one listens. A
closed connection is a death, no pulse for too long is silence. A rank that ends by itself says why
first. So does a rank whose work (as stage or draft) stands still for ten times as long, since its
threads here go on. Silence is counted here, not by a limit of gloo's, which would close the
connections to all others, who would take that for a death.

Invariant: the first loss is the one that counts: what fails afterwards fails because of it.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from offload.errors import RankError

_WORD_BYTES = 1024  # kind, two bytes of length, a reason in UTF-8
_PULSE, _ENDED, _FAILED, _REFUSED, _STALLED = range(5)
_PULSES_PER_LIMIT = 12
_TICKS_PER_LIMIT = 120
# Limits for which a rank may work on one layer: a slow disk takes a minute to read it, and a slow
# processor to compute a long prompt with it.
_LIMITS_IDLE = 10
_NEVER = timedelta(days=30)
_LAST_WORD_S = 2.0  # time to receive a last word, or to notice that there is none


class Loss(NamedTuple):
    """The reason why ranks can no longer work together."""

    rank: int
    line: str
    is_refusal: bool = False  # whether it is a refusal, which a user can correct
    is_told: bool = True  # whether the rank itself reported it
    is_death: bool = False  # whether its connection is closed
    is_silence: bool = False

    def error(self) -> RankError:
        """Return the error to raise on the remaining ranks."""
        is_head = self.rank == 0
        return RankError(
            self.line,
            is_head_told=is_head and self.is_told,
            is_refusal=self.is_refusal,
            is_death=self.is_death,
            is_head_silent=is_head and self.is_silence,
        )


class Watch:
    """Listens to all other ranks over its own group; a thread calls `on_loss` once."""

    def __init__(
        self, group: dist.ProcessGroup, silence_s: float, on_loss: Callable[[], None]
    ) -> None:
        self._group = group
        self._silence_s = silence_s
        self._on_loss = on_loss
        self._rank = dist.get_rank()
        self._num_ranks = dist.get_world_size()
        self._lock = threading.Lock()
        self._is_lost = threading.Event()
        self._is_closed = threading.Event()
        self._ended = dict[int, Loss]()
        self._loss = list[Loss]()
        # ticks since each peer's last word; this rank's clock stops while the process is stopped
        self._ticks = dict.fromkeys(self._peers(), 0)
        # ticks since each kind of work last went on
        self._idle_ticks = dict[str, int]()
        self.is_stalled = False
        threading.Thread(target=self._count, daemon=True).start()
        self.threads = [
            threading.Thread(target=work, args=(peer,), daemon=True)
            for peer in self._peers()
            for work in (self._listen, self._pulse)
        ]
        for thread in self.threads:
            thread.start()

    @property
    def loss(self) -> Loss | None:
        return self._loss[0] if self._loss else None

    def verdict(self, otherwise: str, source: int | None = None) -> RankError:
        """Return why an exchange, or a message of `source`, failed, once it is known.

        A rank that ended well is blamed last: it may have left because another was lost.
        """
        self._is_lost.wait(0.0 if source in self._ended else _LAST_WORD_S)
        ended = (
            self._ended[source] if source in self._ended else next(iter(self._ended.values()), None)
        )
        return (self.loss or ended or Loss(self._rank, otherwise, is_told=False)).error()

    def lose(self, loss: Loss) -> None:
        """Note a loss, and wake all that wait on this rank."""
        with self._lock:
            self._loss.append(loss)
            is_first = len(self._loss) == 1
        self._is_lost.set()
        if is_first and not self._is_closed.is_set():
            self._on_loss()

    def note_work(self, kind: str, *, is_under_way: bool) -> None:
        """Note that work of a kind begins or goes on, or that it waits for other ranks."""
        with self._lock:
            self._idle_ticks.pop(kind, None)
            if is_under_way:
                self._idle_ticks[kind] = 0

    def end(self, reason: str, *, is_refusal: bool) -> None:
        """Send a last word to all others, an empty one without a reason; wait until it is sent."""
        self._end((_REFUSED if is_refusal else _FAILED) if reason else _ENDED, reason)

    def _end(self, kind: int, reason: str) -> None:
        """Send a last word to all others, once; a peer that does not take it is not waited for."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        said = [
            threading.Thread(target=self._say, args=(peer, kind, reason), daemon=True)
            for peer in self._peers()
        ]
        for thread in said:
            thread.start()
        for thread in said:
            thread.join(_LAST_WORD_S)

    def _peers(self) -> list[int]:
        return [rank for rank in range(self._num_ranks) if rank != self._rank]

    def _pulse(self, peer: int) -> None:
        while (
            not self._is_closed.wait(self._silence_s / _PULSES_PER_LIMIT)
            and peer not in self._ended
        ):
            self._say(peer, _PULSE, "")

    def _count(self) -> None:
        """Count ticks, and report silence, or that this rank's work stands still."""
        while not self._is_closed.wait(self._silence_s / _TICKS_PER_LIMIT):
            with self._lock:
                self._idle_ticks = {kind: num + 1 for kind, num in self._idle_ticks.items()}
                self.is_stalled = _LIMITS_IDLE * _TICKS_PER_LIMIT in self._idle_ticks.values()
            if self.is_stalled:
                idle_s = _LIMITS_IDLE * self._silence_s
                why = f"nothing was computed for {idle_s:g} s: look at its disk and device"
                self.lose(Loss(self._rank, f"rank {self._rank}: {why}", is_told=False))
                self._end(_STALLED, why)
                return
            for peer in set(self._ticks) - set(self._ended):
                self._ticks[peer] += 1
                if self._ticks[peer] == _TICKS_PER_LIMIT:
                    line = f"rank {peer} has been silent for {self._silence_s:g} s"
                    self.lose(Loss(peer, line, is_told=False, is_silence=True))

    def _say(self, peer: int, kind: int, reason: str) -> None:
        word = _word(kind, reason)
        try:
            if (work := dist.isend(word, peer, group=self._group)) is not None:
                work.wait(_NEVER)
        except RuntimeError:
            self._judge(peer)

    def _listen(self, peer: int) -> None:
        """Receive a peer's words until it ends or is lost; every word resets its silence."""
        word = torch.empty(_WORD_BYTES, dtype=torch.uint8)
        while True:
            try:
                if (work := dist.irecv(word, peer, group=self._group)) is not None:
                    work.wait(_NEVER)
            except RuntimeError:
                self._judge(peer)
                return
            self._ticks[peer] = 0
            if (kind := int(word[0])) == _ENDED:
                self._ended[peer] = Loss(peer, f"rank {peer} has ended")
                return
            if kind != _PULSE:
                line = f"rank {peer}{'' if kind == _REFUSED else ' ended'}: {_reason(word)}"
                # a hanging service may keep it from reporting to its user
                is_stalled = kind == _STALLED
                flags = {"is_told": not is_stalled, "is_silence": is_stalled}
                self.lose(Loss(peer, line, is_refusal=kind == _REFUSED, **flags))
                return

    def _judge(self, peer: int) -> None:
        """Report a death if a send or receive failed without a last word."""
        if peer not in self._ended:
            self.lose(
                Loss(peer, f"rank {peer} is gone (connection closed)", is_told=False, is_death=True)
            )


def _word(kind: int, reason: str) -> Tensor:
    text = reason.encode()[: _WORD_BYTES - 3]
    head = bytes([kind]) + len(text).to_bytes(2, "little")
    return torch.frombuffer(bytearray((head + text).ljust(_WORD_BYTES, b"\0")), dtype=torch.uint8)


def _reason(word: Tensor) -> str:
    content = bytes(word.tolist())
    return content[3 : 3 + int.from_bytes(content[1:3], "little")].decode(errors="replace")
