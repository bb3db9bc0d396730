"""How ranks that share one target load it: `offload.distributed`, which lies above, says so here.

`import offload` reads this file, so it imports nothing that takes time.
"""

from collections.abc import Callable
from typing import Any, Literal

# called with the setup, the resources to close in the end, the transport, and of stages the first request
LOADERS: dict[Literal["shards", "stages"], Callable[..., Any]] = {}
