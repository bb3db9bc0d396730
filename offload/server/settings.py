"""What a server is told once: whom it serves, as what, and how much it takes from them."""

import ipaddress
from dataclasses import dataclass, field

from offload.config import Sampling

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Of one server."""

    model_id: str  # what clients call the model
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))  # where a request says nothing
    host: str = "127.0.0.1"
    api_keys: tuple[str, ...] = ()  # any of them lets in; none asks for none
    max_body_bytes: int = 4 << 20
    body_s: float = 30.0  # within which a body must have come
    keep_alive_s: float = 3.0  # without a token, after which a stream says that it is alive

    @property
    def is_loopback(self) -> bool:
        """Whether nobody but this machine's own users can reach it."""
        return is_loopback(self.host)

    @property
    def allowed_hosts(self) -> tuple[str, ...] | None:
        """Names, without a port, that a request may ask for; None allows any.

        Only on loopback: a page of a stranger's that gives its own name the address 127.0.0.1 (DNS rebinding) would
        otherwise be as good as a page of ours. Elsewhere it is a key that the stranger has not.
        """
        own = f"[{self.host}]" if ":" in self.host else self.host
        return (*LOOPBACK_NAMES, own.lower()) if self.is_loopback else None


def is_loopback(host: str) -> bool:
    """Whether an address, or the name `localhost`, is this machine's own alone; other names are taken for public."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
