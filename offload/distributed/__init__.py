"""Many processes that run one target; importing this tells the engine how they load it."""

from typing import Any

from offload.engine.team import LOADERS


def _join_shards(*how: Any) -> Any:
    # not at the top: what torch.distributed brings takes time
    from offload.distributed.shard_team import join_shards

    return join_shards(*how)


def _open_pipeline(*how: Any) -> Any:
    from offload.distributed.pipeline import open_pipeline

    return open_pipeline(*how)


LOADERS["shards"] = _join_shards
LOADERS["stages"] = _open_pipeline
