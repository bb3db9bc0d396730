"""The settings of one server, with what follows from the address that it listens on."""

import ipaddress
from dataclasses import dataclass, field

from offload.sampling_options import Sampling

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """The settings of one server."""

    model_id: str  # what clients call the model
    # where a request says nothing
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))
    aliases: tuple[str, ...] = ()  # other names that clients may ask for; `*` is any
    host: str = "127.0.0.1"
    origins: tuple[str, ...] = ()  # whose pages may ask beside this server's own
    api_keys: tuple[str, ...] = ()  # any of them lets in; none asks for none
    max_body_bytes: int = 4 << 20
    body_s: float = 30.0  # within which a body must have come
    keep_alive_s: float = 3.0  # without a token, after which a stream says that it is alive

    @property
    def allowed_hosts(self) -> tuple[str, ...] | None:
        """Names, without a port, that a request may ask for; None allows any.

        Only on loopback: a stranger's page that gives its own name the address 127.0.0.1 (DNS
        rebinding) would be as good as a page of ours. Elsewhere it lacks the key.
        """
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (*_LOOPBACK_NAMES, host.lower()) if is_loopback(self.host) else None


def is_loopback(host: str) -> bool:
    """Return True if this machine alone is meant: an address, or `localhost` of all names."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
