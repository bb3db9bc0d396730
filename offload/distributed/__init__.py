"""Many processes that run one target; importing this tells the engine how they load it."""

from typing import TYPE_CHECKING, Any

from offload.engine.team import LOADERS

if TYPE_CHECKING:
    from contextlib import ExitStack

    from offload.engine.decoder import Decoder
    from offload.engine.request import Request
    from offload.engine.setup import Setup


def _open_shards(
    setup: "Setup", request: "Request", resources: "ExitStack", transport: Any
) -> "Decoder":
    # not at the top: what torch.distributed brings takes time
    from offload.distributed.shard_team import join_shards
    from offload.engine.opening import open_with

    return open_with(join_shards(setup, resources, transport), setup, request, resources)


def _open_pipeline(*how: Any) -> "Decoder":
    from offload.distributed.pipeline import open_pipeline

    return open_pipeline(*how)


LOADERS["shards"] = _open_shards
LOADERS["stages"] = _open_pipeline
