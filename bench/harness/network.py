"""A network of hosts on this machine: kernel namespaces, and a switch that this process plays.

`tc` would not do: its netem is missing in many kernels, and it would need as many rights. Each host
has a TUN device that is read here. A packet takes its time on the sender's cable and on the
receiver's, at once where both are free, and then the latency; nothing is lost. It is as punctual as
this process gets to run.

Invariant: no namespace outlives `network`.
"""

import fcntl
import os
import queue
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from offload.errors import reason
from offload.planning.cluster import Network

_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001
# few large packets, since each passes through Python; and room for all of them
_MTU = 32_000
_QUEUE = 10_000
_SUBNET = bytes([10, 177, 0])
_VERSION_4 = 4


class NoNetworkError(Exception):
    """This machine, or this user, cannot have a network of namespaces."""


class Host(NamedTuple):
    """One end of the network."""

    namespace: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """What precedes a command that is to run there."""
        return ["ip", "netns", "exec", self.namespace]


class Switch:
    """Passes packets on between devices, by the last byte of their addresses: 1 is the first."""

    def __init__(self, devices: list[int], network: Network) -> None:
        self._devices = devices
        self._network = network
        self._lock = threading.Lock()
        self._sender_free_s, self._receiver_free_s = ([0.0] * len(devices) for _ in range(2))
        self.sent_bytes = [0] * len(devices)  # headers included
        for source in range(len(devices)):
            on_way = queue.SimpleQueue[tuple[float, int, bytes]]()
            for work in (self._read, self._deliver):
                threading.Thread(target=work, args=(source, on_way), daemon=True).start()

    def _read(self, source: int, on_way: "queue.SimpleQueue[tuple[float, int, bytes]]") -> None:
        with suppress(OSError):  # the device is closed
            while packet := os.read(self._devices[source], 65536):
                to = packet[19] - 1
                if (
                    packet[0] >> 4 == _VERSION_4
                    and packet[16:19] == _SUBNET
                    and 0 <= to < len(self._devices)
                ):
                    on_way.put((self._arrival_s(source, to, len(packet)), to, packet))

    def _arrival_s(self, source: int, to: int, num_bytes: int) -> float:
        with self._lock:
            self.sent_bytes[source] += num_bytes
            on_cable_s = num_bytes / self._network.bytes_per_s
            left_s = max(time.monotonic(), self._sender_free_s[source]) + on_cable_s
            arrived_s = max(left_s, self._receiver_free_s[to] + on_cable_s)
            self._sender_free_s[source], self._receiver_free_s[to] = left_s, arrived_s
            return arrived_s + self._network.latency_s

    def _deliver(self, _: int, on_way: "queue.SimpleQueue[tuple[float, int, bytes]]") -> None:
        with suppress(OSError):
            while True:
                due_s, to, packet = on_way.get()
                time.sleep(max(0.0, due_s - time.monotonic()))
                os.write(self._devices[to], packet)


@contextmanager
def network(num_hosts: int, between: Network) -> Iterator[tuple[list[Host], Switch]]:
    """Yield hosts that reach each other. Raises `NoNetworkError` where none may be made."""
    with ExitStack() as resources:
        try:
            opened = [_open_host(index, resources) for index in range(num_hosts)]
        except (OSError, subprocess.CalledProcessError) as error:
            why = (
                error.stderr.strip()
                if isinstance(error, subprocess.CalledProcessError)
                else reason(error)
            )
            raise NoNetworkError(f"none can be made on this machine ({why})") from None
        yield [host for host, _ in opened], Switch([device for _, device in opened], between)


def _open_host(index: int, resources: ExitStack) -> tuple[Host, int]:
    name = f"offload-{os.getpid()}-{index}"
    address = ".".join(map(str, [*_SUBNET, index + 1]))
    device = os.open("/dev/net/tun", os.O_RDWR)
    tun = f"ob{os.getpid()}-{index}"
    resources.callback(os.close, device)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", tun.encode(), _TUN_WITHOUT_HEADER))
    _ip("netns", "add", name)
    resources.callback(_ip, "netns", "del", name)
    _ip("link", "set", tun, "netns", name)
    _ip("-n", name, "address", "add", f"{address}/24", "dev", tun)
    for one in ([tun, "mtu", str(_MTU), "txqueuelen", str(_QUEUE)], ["lo"]):
        _ip("-n", name, "link", "set", *one, "up")
    return Host(name, address), device


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
