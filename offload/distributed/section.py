"""A rank's section of the target: its model, its measured capacity, and loading its layers.

A section is some consecutive layers: ids or hidden states in, hidden states or logits out. The
forward pass is still the whole model's own. If another rank has the first layers, embeddings are
zeros, which nothing scales or norms, and the first layer gets the received states instead. If
another rank has the last layers, the pass ends after the last one here, before any norm. Invariant:
sections one after another compute the same bits as the whole model over the same rows.
"""

from contextlib import ExitStack
from statistics import median
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from offload.calibration.expansions import choose_expansion
from offload.calibration.link import link_bytes_per_s
from offload.calibration.rates import product_timer
from offload.calibration.threads import thread_policy
from offload.checkpoint.checkpoint import Checkpoint, compute_dtype_name
from offload.checkpoint.cuts import Section
from offload.checkpoint.sizes import config_sizes, model_shape
from offload.distributed.shares import RankCapacity
from offload.engine.build import send_beside_layers
from offload.engine.setup import Setup
from offload.memory.plan import MemoryPlan
from offload.model.tree_model import TreeModel
from offload.streaming.layers import LayerStream, open_layers
from offload.streaming.scan import WeightScan
from offload.trees.spec import AUTO_NODES

_HOST = torch.device("cpu")

_MOST_WIDTH = 4096
_NUM_TIMES = 9
# assumed for a GPU: 16 lanes of PCIe 4, as achieved; its disk is measured
_DEVICE_LINK_BYTES_PER_S = 25e9


class _LayersEndError(Exception):
    """The pass is over: the last layer's output was all that was needed."""

    def __init__(self, hidden_1TD: Tensor) -> None:
        self.hidden_1TD = hidden_1TD


class SectionModel(TreeModel):
    """A `TreeModel` over `section` of a checkpoint, whose layers are numbered from 0 on.

    Without a table it takes hidden states (T, D) in place of ids; without a head its passes return
    hidden states of all their rows. Raises `UserError` for a family whose layers depend on each
    other.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        section: Section,
        dtype: str = "auto",
        torch_device: torch.device = _HOST,
        *,
        has_host_table: bool = False,
        **bound: Any,
    ) -> None:
        bound |= {"has_host_table": has_host_table and section.has_table, "section": section}
        super().__init__(checkpoint, dtype, torch_device, **bound)
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
        return int(self.meta_model.config.hidden_size)

    def _call(self, token_1T: Tensor, **arguments: Any) -> Any:
        """Run ids or hidden states; return logits, or hidden states in their place."""
        rows = {"input_ids": token_1T}
        if token_1T.is_floating_point():
            self._received_1TD = token_1T
            rows = {"inputs_embeds": torch.zeros_like(token_1T)}
        try:
            return self.meta_model(**rows, **arguments)
        except _LayersEndError as end:
            # hidden states in the place of logits
            return SimpleNamespace(logits=end.hidden_1TD)
        finally:
            self._received_1TD = None

    def _give_received(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        assert self._received_1TD is not None, "without a table it takes hidden states"
        if args:
            return (self._received_1TD, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._received_1TD}

    def _leave(self, _: nn.Module, __: Any, out: Any) -> NoReturn:
        raise _LayersEndError(out[0] if isinstance(out, tuple) else out)


def capacity_of(setup: Setup, held: MemoryPlan, *, shares_kv: bool) -> RankCapacity:
    """Return this rank's capacity, measured on all ranks of a host at the same time.

    `held` is a plan without limits; keys and values count with the layers if ranks share those.
    """
    shards = setup.files.target.shards
    limit = setup.options.limit_bytes_per_s
    disk = link_bytes_per_s(shards, limit_bytes_per_s=limit, open_source=setup.open_source)
    gpu_bytes = setup.budget.gpu_bytes
    return RankCapacity.beside(
        held,
        0 if shares_kv else held.kv_bytes,
        ram_bytes=setup.budget.ram_bytes,
        gpu_bytes=gpu_bytes,
        link_bytes_per_s=disk if gpu_bytes is None else _DEVICE_LINK_BYTES_PER_S,
        disk_bytes_per_s=disk,
        compute_s=_compute_s(setup),
    )


def _compute_s(setup: Setup) -> float:
    """Return the seconds of a usual tree in all layers, by a product of the same width."""
    target = setup.files.target
    dtype = setup.dtype
    width = min(config_sizes(target)["hidden_size"], _MOST_WIDTH)
    measure = product_timer(
        compute_dtype_name(target, dtype), AUTO_NODES, width, setup.device.torch_device
    )
    once_s = median(measure() for _ in range(_NUM_TIMES))
    return once_s * model_shape(target, dtype).num_weights / width**2


def load_section(
    setup: Setup,
    checkpoint: Checkpoint,
    section: Section,
    plan: MemoryPlan,
    resources: ExitStack,
    **settings: Any,
) -> tuple[SectionModel, LayerStream]:
    """Return the model of this rank's layers, and the stream that loads them, already started.

    `more` goes to the model. What both hold is open as long as `resources`.
    """
    device = setup.device
    model = SectionModel(checkpoint, section, setup.dtype, device.torch_device, **settings)
    resources.callback(model.close)
    scan = WeightScan(checkpoint, setup.hooks.on_note)
    scan.expect(model.layer_layouts, plan.tier_L)
    source = setup.open_source(
        checkpoint.shards,
        stamps=checkpoint.stamps,
        rate_limit_bytes_per_s=setup.options.limit_bytes_per_s,
        watcher=scan.look,
    )
    resources.callback(source.close)
    if plan.is_streamed:
        for note in send_beside_layers(device, resources, model):
            setup.hooks.on_note(note)
    model.read_rest(source.fetch)
    model.set_expansion(choose_expansion(model, source.fetch, device).kernels)
    threads = thread_policy(model, None, AUTO_NODES, setup.options.threads, device)
    torch.set_num_threads(threads.start.sweep.num_threads)
    stream = open_layers(source, model.layer_layouts, plan, device, resources)
    stream.load_resident()
    return model, stream
