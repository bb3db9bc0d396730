"""Brings together what ranks compute of one pass, and cuts a model to what one of them computes.

Invariant: outside of a pass nobody is waited for: the columns of other ranks are then zeros, so that one rank's share
can be timed, and tried out, alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from offload.errors import UserError
from offload.model.meta import layer_stacks
from offload.model.places import is_plain_product
from offload.ranks.sharding import Role, Sharding
from offload.ranks.transport import Transport


class Exchange:
    """One rank's part in the passes of a shared model.

    What is exchanged passes through host memory on every rank, whatever each of them computes on.

    Attributes:
        num_passes, num_rows: that all ranks have run together, and their rows.
        send: brings rows of the host to where this rank computes.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport, self._is_open = transport, False
        self.send: Callable[[Tensor], Tensor] = lambda rows: rows
        self.num_passes = self.num_rows = 0

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Meanwhile all ranks run the same pass."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def share(self, rows: Tensor) -> Tensor:
        """The head's rows, on every rank."""
        if not self._is_open:
            return rows
        self.num_passes, self.num_rows = self.num_passes + 1, self.num_rows + len(rows)
        return self.send(self._transport.broadcast(rows.cpu()))

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """The columns of all ranks, of which `part`, (..., widths[rank]), has this one's."""
        before = sum(widths[: self._transport.rank])
        if not self._is_open:
            return pad(part, (before, sum(widths) - before - part.shape[-1]))
        return self.send(self._transport.gather(part.flatten(0, -2).cpu(), widths)).unflatten(0, part.shape[:-1])


def cut_model(meta_model: nn.Module, sharding: Sharding, exchange: Exchange, rank: int) -> None:
    """Let every layer of a model without storage compute one rank's rows, and gather where others are needed.

    What goes into the first layer of the head's, others ask `Exchange.share` for. Raises `UserError` for other modules.
    """
    layers = layer_stacks(meta_model)[0]
    if rank == 0:
        layers[0].register_forward_pre_hook(partial(_share_input, exchange), with_kwargs=True)
    for layer in layers:
        for name, matrix in sharding.matrices.items():
            module = layer.get_submodule(name)
            if not is_plain_product(module):
                raise UserError(
                    f"layers cannot be shared, {name} is no plain product: run it on one rank, or as stages"
                )
            _cut(module, matrix.rows_R[rank].num)
            if matrix.role is Role.JOINED:
                widths = sharding.input_widths(name)
                module.register_forward_pre_hook(partial(_gather_input, exchange, widths))
            if matrix.role is not Role.OWN:
                module.register_forward_hook(partial(_gather_output, exchange, sharding.widths(name)))


def _cut(module: nn.Linear, num_rows: int) -> None:
    module.out_features = num_rows
    for key, whole in module._parameters.items():
        if whole is not None:
            part = torch.empty(num_rows, *whole.shape[1:], dtype=whole.dtype, device="meta")
            module._parameters[key] = nn.Parameter(part, requires_grad=False)


def _share_input(exchange: Exchange, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    hidden_1TD = args[0] if args else kwargs["hidden_states"]
    shared_1TD = exchange.share(hidden_1TD[0])[None]
    return ((shared_1TD, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": shared_1TD})


def _gather_input(exchange: Exchange, widths: Sequence[int], _: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (exchange.gather(args[0], widths),)


def _gather_output(exchange: Exchange, widths: Sequence[int], _: nn.Module, __: Any, output: Tensor) -> Tensor:
    return exchange.gather(output, widths)
