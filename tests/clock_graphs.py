"""Passes by vector clocks: what each operation of the card reads and writes, on the stream that is current."""

from typing import Any, NamedTuple

import torch
from paper_cuda import Paper, PaperGraph, PaperStream
from strict_place import OnCard, StrictDevice
from torch import Tensor
from torch.utils._pytree import tree_leaves
from vector_clocks import ClockDevice, caller


class Access(NamedTuple):
    """What an operation does to one tensor."""

    memory: Tensor
    deed: str
    writes: bool


class ClockPaper(Paper):
    """Streams with clocks; a replay does again what was recorded.

    Args:
        strays: replays are done on a stream of their own, which is a mistake.
    """

    def __init__(self, device: ClockDevice, *, strays: bool = False) -> None:
        super().__init__(closes_first=True)
        self.device, self._strays, self._done_by = device, strays, dict[PaperGraph, list[Access]]()

    def waits(self, stream: PaperStream, other: PaperStream) -> None:
        self.device.wait_stream(stream.name, other.name, f"wait_stream at {caller(3)}")

    def replays(self, graph: PaperGraph) -> None:
        stream = "a stream of its own" if self._strays else self.now.name
        for access in self._done_by[graph]:
            self.device.clocks.use(stream, access.memory, access.deed, writes=access.writes)

    def note(self, access: Access) -> None:
        """It is done now, or recorded."""
        if self.capturing is not None:
            self._done_by.setdefault(self.capturing, []).append(access)
        else:
            self.device.clocks.use(self.now.name, access.memory, access.deed, writes=access.writes)


class ClockCard(StrictDevice):
    """The card.

    Args:
        knows_all: looks after all that is computed, and not only after what the device was asked for. Such memory is
            never given to anything else, which would look like a race.
    """

    def __init__(self, paper: ClockPaper, *, knows_all: bool = False) -> None:
        super().__init__()
        self._paper, self._kept, self._knows_all = paper, list[Tensor](), knows_all

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        schema, given = func._schema, kwargs or {}
        if self._paper.device.is_moving:
            return out
        if any(argument.alias_info is not None and not argument.alias_info.is_write for argument in schema.returns):
            return out  # a view
        operands = set[int]()
        for argument, value in [*zip(schema.arguments, args, strict=False)] + [
            (argument, given[argument.name]) for argument in schema.arguments if argument.name in given
        ]:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(value):
                if isinstance(tensor, OnCard):
                    operands.add(id(tensor))
                    self._paper.note(Access(tensor.held, f"{schema.name} {'writes' if writes else 'reads'}", writes))
        for tensor in tree_leaves(out) if self._knows_all else ():
            if isinstance(tensor, OnCard) and id(tensor) not in operands:
                self._kept.append(tensor.held)
                self._paper.device.clocks.know(torch.empty(0, dtype=torch.uint8).set_(tensor.held.untyped_storage()))
                self._paper.note(Access(tensor.held, f"{schema.name} gives", True))
        return out
