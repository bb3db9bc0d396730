"""Wrong calls across the files of bench/ and kernels/, which mypy must see: `make types` checks this file, too.

Under each name mypy once saw nothing, and took every call for right. An error that is not there makes its `ignore` one
that nothing needs, and mypy ends with that (`warn_unused_ignores`).
"""

from offload.bench.harness.metrics import Burst
from offload.bench.suite import load_command
from offload.kernels.machine_code import call_of
from offload.kernels.path_attention import first_seen


def planted() -> None:
    """Call each of them with what it does not take."""
    Burst(time_s=0.0)  # type: ignore[call-arg]
    load_command("decode", "peers")  # type: ignore[call-arg]
    call_of(1, ["a tensor"])  # type: ignore[list-item]
    first_seen(64, "a position")  # type: ignore[type-var]
