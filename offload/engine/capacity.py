"""What a rank measures of itself before it takes its share of a model: memory, link and computing."""

from statistics import median

import torch
from torch.nn import functional

from offload.calibration.link import link_bytes_per_s
from offload.checkpoint.safetensors import compute_dtype_name
from offload.checkpoint.sizes import config_sizes, model_shape
from offload.engine.team import Given
from offload.memory.plan import MemoryPlan
from offload.planning.shares import RankCapacity
from offload.timer import timed

_TYPICAL_ROWS, _MOST_WIDTH, _NUM_TIMES = 64, 4096, 9
_DEVICE_LINK_BYTES_PER_S = 25e9  # assumed of a GPU: 16 lanes of PCIe 4, as achieved; its disk is measured


def capacity_of(given: Given, held: MemoryPlan, *, shares_kv: bool) -> RankCapacity:
    """Of this rank; all ranks of a host measure at one time, so that what they have in common is divided.

    Args:
        held: a roomy plan, for what it holds beside layers; keys and values count with them where ranks share those.
    """
    room, shards = given.room, given.files.target.shards
    disk = link_bytes_per_s(shards, limit_bytes_per_s=given.options.limit_bytes_per_s)
    return RankCapacity.beside(
        held, 0 if shares_kv else held.kv_bytes, ram_bytes=room.ram, gpu_bytes=room.gpu,
        link_bytes_per_s=disk if room.gpu is None else _DEVICE_LINK_BYTES_PER_S, disk_bytes_per_s=disk,
        compute_s=_compute_s(given),
    )  # fmt: skip


def _compute_s(given: Given) -> float:
    """Seconds that a usual tree takes in all layers, by a product that is as wide."""
    files, dtype = given.files, given.options.dtype
    width = min(config_sizes(files.target)["hidden_size"], _MOST_WIDTH)
    how = {
        "dtype": getattr(torch, compute_dtype_name(files.target, dtype)),
        "device": None if given.device is None else given.device.place,
    }
    rows, weight = torch.zeros(_TYPICAL_ROWS, width, **how), torch.zeros(width, width, **how)
    # A number on the host is the sign that a device is done as well.
    once_s = median(timed(lambda: float(functional.linear(rows, weight)[0, 0])) for _ in range(_NUM_TIMES))
    return once_s * model_shape(files.target, dtype).num_weights / width**2
