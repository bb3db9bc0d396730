"""What ranks that share every layer exchange in a pass, and how the model is cut for it.

Outside a pass no rank is waited for: the other ranks' columns are zeros, so that one rank's share
can be timed and tried out alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from offload.distributed.agreement import gather_values
from offload.distributed.sharding import Gathers, Sharding, ShardRole
from offload.distributed.transport import Transport
from offload.errors import UserError
from offload.machine import peak_rss_bytes
from offload.memory.plan import MemoryPlan
from offload.model.layer_stacks import layer_stacks
from offload.model.linear import Linear
from offload.planning.cost_model import Curve
from offload.stats import RankFigures
from offload.streaming.layers import LayerStream
from offload.timer import timed

_TIMED_ROWS = (1, 16, 64, 256)
_NUM_TIMES = 3


@dataclass(eq=False, repr=False)
class Exchange:
    """One rank's part in the passes of a shared model, exchanged through host memory."""

    transport: Transport
    _own_bytes: int = 0  # memory of this process before it loaded anything
    row_bytes: int = 0  # bytes that this rank sends in a pass for each row
    num_passes: int = 0  # passes that all ranks ran together
    num_rows: int = 0  # rows of these passes
    # copies the host's rows to the device of this rank
    send: Callable[[Tensor], Tensor] = lambda rows: rows
    _is_open: bool = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Within the body all ranks run the same pass."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def share(self, rows: Tensor) -> Tensor:
        """Return the head's rows on every rank."""
        if not self._is_open:
            return rows
        self.num_passes += 1
        self.num_rows += len(rows)
        return self.send(self.transport.broadcast(rows.cpu()))

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """Return the columns of all ranks, of which `part`, (..., widths[rank]), has this one's."""
        before = sum(widths[: self.transport.rank])
        if not self._is_open:
            return pad(part, (before, sum(widths) - before - part.shape[-1]))
        return self.send(self.transport.gather(part.flatten(0, -2).cpu(), widths)).unflatten(
            0, part.shape[:-1]
        )

    def pass_s(self, gathers: Gathers, dtype: torch.dtype) -> Curve:
        """Measure the gathers of a pass against its rows; all ranks do so at the same time."""
        column = torch.zeros(1, 1, dtype=dtype)

        def gather_all(num_rows: int) -> None:
            for widths in gathers.widths:
                sent = column.expand(num_rows, widths[self.transport.rank])
                self.gather(sent.contiguous(), widths)

        seconds = list[float]()
        with self.opened():
            for num_rows in _TIMED_ROWS:
                layer_s = median(timed(partial(gather_all, num_rows)) for _ in range(_NUM_TIMES))
                seconds.append(gathers.num_layers * layer_s)
        return Curve(_TIMED_ROWS, tuple(seconds))

    def figures(self, stream: LayerStream, plan: MemoryPlan) -> list[RankFigures]:
        """Return the bytes that each rank has moved and held; all ranks call it at the same time."""
        mine = RankFigures(
            plan.ram_bytes,
            self._own_bytes,
            peak_rss_bytes(),
            self.num_passes,
            self.num_rows,
            plan.streamed_bytes,
            stream.bytes_read,
            stream.stall_s,
            self.row_bytes,
            dict(self.transport.bytes_sent),
            self.transport.exchange_s,
        )
        return gather_values(self.transport, mine, RankFigures)


def cut_model(meta_model: nn.Module, sharding: Sharding, exchange: Exchange) -> None:
    """Cut a model without storage: each layer computes one rank's rows and gathers the others'.

    The head shares the input of its first layer; other ranks receive it by `Exchange.share`. Raises
    `UserError` for modules that cannot be cut.
    """
    rank = exchange.transport.rank
    layers = layer_stacks(meta_model)[0]
    if rank == 0:
        layers[0].register_forward_pre_hook(partial(_share_input, exchange), with_kwargs=True)
    for layer in layers:
        for name, matrix in sharding.matrices.items():
            module = layer.get_submodule(name)
            if not isinstance(module, Linear):
                raise UserError(
                    f"layers cannot be shared, {name} is no plain product: run it on one rank, or as stages"
                )
            num_rows = matrix.rows_R[rank].num
            module.out_features = num_rows
            for key, whole in module._parameters.items():
                if whole is not None:
                    sizes = (num_rows, *whole.shape[1:])
                    part = torch.empty(sizes, dtype=whole.dtype, device="meta")
                    module._parameters[key] = nn.Parameter(part, requires_grad=False)
            if matrix.role is ShardRole.JOINED:
                widths = sharding.input_widths(name)
                module.register_forward_pre_hook(partial(_gather_input, exchange, widths))
            if matrix.role is not ShardRole.OWN:
                module.register_forward_hook(
                    partial(_gather_output, exchange, sharding.widths(name))
                )


def _share_input(
    exchange: Exchange, _: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    hidden_1TD = args[0] if args else kwargs["hidden_states"]
    shared_1TD = exchange.share(hidden_1TD[0])[None]
    if args:
        return (shared_1TD, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": shared_1TD}


def _gather_input(
    exchange: Exchange, widths: Sequence[int], _: nn.Module, args: tuple[Tensor]
) -> tuple[Tensor]:
    return (exchange.gather(args[0], widths),)


def _gather_output(
    exchange: Exchange, widths: Sequence[int], _: nn.Module, __: Any, output: Tensor
) -> Tensor:
    return exchange.gather(output, widths)
