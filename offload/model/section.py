"""A streamed model of some consecutive layers: ids or hidden states in, hidden states or logits out.

The forward pass is still the whole model's own. Where the first layers are another rank's, the
embeddings are zeros, so that nothing is scaled or normed that was not here, and the first layer
gets what was received in their place. Where the last layers are another rank's, the pass ends
behind the last one here, before any norm. Invariant: sections one after another compute, bit for
bit, what the whole model computes over the same rows.
"""

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from offload.checkpoint.cuts import Section
from offload.checkpoint.safetensors import Checkpoint
from offload.model.streamed import StreamedModel

_HOST = torch.device("cpu")


class _LayersEndError(Exception):
    """The pass is over: what the last layer gives is all that was wanted."""

    def __init__(self, hidden_1TD: Tensor) -> None:
        self.hidden_1TD = hidden_1TD


class _Hidden(NamedTuple):
    # hidden states (1, T, D) in their place
    logits: Tensor


class SectionModel(StreamedModel):
    """A `StreamedModel` over `section` of a checkpoint; layers, layouts and caches are numbered
    from 0 on.

    Wherever ids of rows are asked for, it takes hidden states (T, D) if it has no table. Its passes
    give hidden states of all their rows (T, D) if it has no head; `score` is for one that has.
    Raises `UserError` for a family whose layers hang together.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        section: Section,
        dtype: str = "auto",
        place: torch.device = _HOST,
        *,
        has_host_table: bool = False,
        **bound: Any,
    ) -> None:
        bound |= {"has_host_table": has_host_table and section.has_table, "section": section}
        super().__init__(checkpoint, dtype, place, **bound)
        self.section = section
        self._received_1TD: Tensor | None = None
        if not section.has_table:
            self._hooks.append(
                self._layers[0].register_forward_pre_hook(self._give_received, with_kwargs=True)
            )
        if not section.has_head:
            self._hooks.append(self._layers[-1].register_forward_hook(self._leave))

    @property
    def width(self) -> int:
        """Return D, the width of hidden states."""
        return int(self.meta_model.config.hidden_size)

    def _call(self, token_1T: Tensor, **more: Any) -> Any:
        rows = {"input_ids": token_1T}
        if token_1T.is_floating_point():
            self._received_1TD = token_1T
            rows = {"inputs_embeds": torch.zeros_like(token_1T)}
        try:
            return self.meta_model(**rows, **more)
        except _LayersEndError as end:
            return _Hidden(end.hidden_1TD)
        finally:
            self._received_1TD = None

    def _give_received(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        assert self._received_1TD is not None, "without a table it takes hidden states"
        if args:
            return (self._received_1TD, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._received_1TD}

    def _leave(self, _: nn.Module, __: Any, out: Any) -> NoReturn:
        raise _LayersEndError(out[0] if isinstance(out, tuple) else out)
