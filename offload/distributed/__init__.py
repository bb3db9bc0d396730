"""Many processes that run one target; importing this registers its loaders with the engine."""

from typing import Any

from offload.engine.team import LOADERS, STARTERS


def _open_shards(setup: Any, request: Any, resources: Any, transport: Any) -> Any:
    # imported late: torch.distributed takes time
    from offload.distributed.shard_team import join_shards
    from offload.engine.opening import open_with

    return open_with(join_shards(setup, resources, transport), setup, request, resources)


def _open_pipeline(*arguments: Any) -> Any:
    from offload.distributed.pipeline import open_pipeline

    return open_pipeline(*arguments)


def _start_cards(options: Any) -> Any:
    from offload.distributed.cards import started_cards

    return started_cards(options)


LOADERS["shards"] = _open_shards
LOADERS["stages"] = _open_pipeline
STARTERS["cards"] = _start_cards
