"""Triton is told that a GPU is present; kernels are compiled for it by the code that launches them, and never started.

Why: so tensors may be of the CPU, and what is compiled, and when, can be seen without a GPU. Only for processes of
their own.
"""

from collections.abc import Callable
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver


class NoDevice:
    """What Triton asks of a driver before it starts a kernel."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def tell_compiled(tell: Callable[[Any, bool], None], capability: int) -> None:
    """From now on call `tell` at each launch: with the kernel as compiled, and whether it is a new one."""
    driver.set_active(NoDevice(capability))
    compile_for, seen = JITFunction.run, dict[int, Any]()

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        done = compile_for(kernel, *args, grid=grid, warmup=True, **options)
        is_new = id(done) not in seen
        seen[id(done)] = done
        tell(done, is_new)

    JITFunction.run = launch
