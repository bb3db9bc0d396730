"""One kernel against what runs without it: used where both agree, at the sizes of the run.

The bench tells how fast both are (`bench/gpu/kernels.py`). Invariant: a kernel that was wrong or
refused at one shape is not used at any.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from offload.streaming.device import HOST, Device

Functions = TypeVar("Functions")  # a record of them, such as `KernelSet`


class KernelComparison(NamedTuple):
    """One kernel at one shape."""

    kernel: str
    shape: str
    challenger: Callable[[], Any]
    # the best that runs without it
    rival: Callable[[], Any]
    agrees: Callable[[], bool]


class ComparisonOutcome(NamedTuple):
    """How a comparison has ended."""

    kernel: str
    shape: str
    # why the kernel is not used
    reason: str = ""


def compare(comparison: KernelComparison, device: Device = HOST) -> ComparisonOutcome:
    """Return True if both sides agree; after a failure, wait for the device.

    Raises:
        RuntimeError: the kernel has left the device unusable, and every error from here on would be
            blamed on others.
    """
    kernel = comparison.kernel
    shape = comparison.shape
    try:
        return ComparisonOutcome(kernel, shape, "" if comparison.agrees() else "its results differ")
    # compilers and drivers refuse with exceptions of every kind
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        said = f"{type(error).__name__}: {first_line[:120]}"
    try:
        device.synchronize(device.mark(device.compute))
    except Exception as lost:
        raise RuntimeError(f"{kernel} at {shape} has left the device unusable ({said})") from lost
    return ComparisonOutcome(kernel, shape, said)


def used(outcomes: Iterable[ComparisonOutcome]) -> dict[str, bool]:
    """Return for every kernel whether it agreed wherever it was tried, in order of the outcomes."""
    is_used: dict[str, bool] = {}
    for outcome in outcomes:
        is_used[outcome.kernel] = is_used.get(outcome.kernel, True) and not outcome.reason
    return is_used


class KernelChoice(NamedTuple, Generic[Functions]):
    """The functions that a run takes, and why."""

    kernels: Functions
    # empty where there is nothing to compare
    comparisons: tuple[ComparisonOutcome, ...] = ()
    # for the user
    notes: tuple[str, ...] = ()


def choose(
    references: Any, kernels: Functions, outcomes: Sequence[ComparisonOutcome], *notes: str
) -> KernelChoice[Functions]:
    """Return the kernels that have agreed with their references, and the others' references."""
    agreeing = {name: getattr(kernels, name) for name, is_used in used(outcomes).items() if is_used}
    return KernelChoice(references._replace(**agreeing), tuple(outcomes), notes)


def rows_of(outcomes: Sequence[ComparisonOutcome]) -> list[dict[str, object]]:
    """Return each outcome with `is_used`, by the names that `--json` and benches use."""
    is_used = used(outcomes)
    return [{**outcome._asdict(), "is_used": is_used[outcome.kernel]} for outcome in outcomes]
