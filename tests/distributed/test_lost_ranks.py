"""A model on ranks that are processes, one of which is killed in the middle of a text."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import Ranks
from tiny import FAMILIES, build, save

from offload.engine.load import open_decoder
from offload.errors import RankError
from offload.planning.load_options import LoadOptions
from offload.rank_roles import RankInfo

END_S = 20.0  # for what takes a fraction of a second, on a machine that has other things to do


@pytest.mark.parametrize("ranks", ["shards", "stages:0-1"])
def test_the_head_learns_of_a_death_at_once(tmp_path: Path, ranks: str) -> None:
    processes = Ranks(2, _write, str(save(build(FAMILIES["llama"]()), tmp_path)), ranks)
    assert processes.next_report() == (0, "writes")
    began_s = time.monotonic()
    processes.kill(1)
    assert processes.next_report() == (0, "rank 1 is gone (connection closed)")
    assert time.monotonic() - began_s < END_S
    assert processes.reports(END_S)[0] == []


def _write(place: RankInfo, report: Callable[[Any], None], target: str, ranks: str) -> None:
    names = {"RANK": place.rank, "WORLD_SIZE": place.num_ranks, "MASTER_ADDR": place.address, "MASTER_PORT": place.port}
    os.environ.update({name: str(value) for name, value in names.items()})
    options = LoadOptions(ranks=ranks, ram="4GiB", context=128, tree="none", profile="none", threads=1)
    try:
        with open_decoder(target, None, options) as decoder:
            decoder.generate([3, 1, 4], max_new_tokens=4)
            report("writes")
            while True:
                decoder.generate([3, 1, 4], max_new_tokens=100)
    except RankError as error:
        if place.rank == 0:
            report(str(error))
