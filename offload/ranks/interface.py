"""Which network gloo talks through: the one that leads to where ranks meet.

By itself it takes what the host's own name resolves to, which on many systems is an address that no other host reaches.
"""

import fcntl
import os
import socket
import struct

_ADDRESS_OF = 0x8915  # SIOCGIFADDR
_VARIABLE = "GLOO_SOCKET_IFNAME"


def choose_interface(address: str, port: int) -> None:
    """Set gloo's variable unless the user has; leave it alone where no interface has the address that leads there."""
    if _VARIABLE in os.environ:
        return
    own = _own_address(address, port)
    names = [name for _, name in socket.if_nameindex() if own is not None and _address_of(name) == own]
    if names:
        os.environ[_VARIABLE] = names[0]


def _own_address(address: str, port: int) -> str | None:
    """The address that this host has in the eyes of another; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _ADDRESS_OF, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
        return socket.inet_ntoa(found[20:24])
