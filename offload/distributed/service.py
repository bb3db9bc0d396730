"""A rank's service for the head: it carries out orders until one says stop.

Each role has a table of acts, one for each type of order. Invariant: there is one way to fail. An
act raises, the rank ends with that reason, and its last word ends all others, see `join.ended_by`.
The head's own services run in threads of its process, so `serving` ends its waits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any

from offload.distributed.orders import Order, Stop
from offload.distributed.transport import Channel, Transport
from offload.errors import RankError, reason
from offload.streaming.device import Device

_TURN_S = 1.0  # of a wait for threads
Service = Callable[[], object]
Acts = Mapping[type[Order], Callable[[Any], object]]


def obey(
    transport: Transport,
    source: int,
    channel: Channel,
    acts: Acts,
    between: Callable[[], bool] | None = None,
) -> None:
    """Carry out a rank's orders on a channel until one says stop.

    `between` orders does some other work, and returns whether there was any. Orders that have
    arrived come first, since they may change which work is worth doing. Raises what acts raise,
    `ValueError` for an order without an act, and `RankError` if the rank is lost.
    """
    is_idle = True
    while True:
        order = (transport.receive if is_idle else transport.poll)(source, channel)
        if order is None:
            is_idle = between is None or not between()
        elif isinstance(order, Stop):
            return
        elif (act := acts.get(type(order))) is None:
            raise ValueError(f"rank {transport.rank} was told to {type(order).__name__}")
        else:
            act(order)
            is_idle = between is None


@contextmanager
def serving(services: Sequence[Service], transport: Transport, device: Device) -> Iterator[None]:
    """Run services in threads during the body, and wait for their end.

    If one fails, all that wait on this rank, now or later, raise `RankError` with its reason.
    """

    def run(service: Service) -> None:
        try:
            with device.computing():
                service()
        except RankError:
            # what the head waits for has failed as well
            return
        except BaseException as error:
            transport.fail(reason(error))

    threads = [
        Thread(target=run, args=(service,), name="offload-rank", daemon=True)
        for service in services
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        # a thread that hangs is not waited for
        while any(thread.is_alive() for thread in threads) and not transport.is_stalled:
            next(thread for thread in threads if thread.is_alive()).join(_TURN_S)
