"""One event of a stream, which a protocol names and fills."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple


class Event(NamedTuple):
    """What an answer tells at once: an object, or a text that stands for itself.

    An empty name is not sent: OpenAI's older streams have none.
    """

    name: str
    data: Mapping[str, Any] | str

    def encoded(self) -> bytes:
        """Return the event as server-sent events have it, in UTF-8."""
        data = self.data
        if not isinstance(data, str):
            data = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        name = f"event: {self.name}\n" if self.name else ""
        return f"{name}data: {data}\n\n".encode()
