"""`offload`, but what `generate` does among ranks is a loop of exchanges that fails as the environment says.

MISFORTUNE is `what:rank`, at the fifth of some hundred exchanges, each of which is a word on rank 0. It is what happens
between ranks that is tested with it; the words are no model's.
"""

import os
import signal
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from offload.__main__ import main
from offload.errors import RankError, ReadError, UserError

NUM_WORDS, FATAL_WORD, WORD_S, KILLED_AFTER_S = 120, 5, 0.1, 2


def write_text(loading: Any, console: Any, request: Any, **_: object) -> None:
    """In place of `offload.cli.text_run.write_text`."""
    import torch

    from offload.checkpoint.identity import PARTS, ModelIdentity
    from offload.distributed.join import joined
    from offload.rank_roles import require_place

    misfortune, _, rank = os.environ.get("MISFORTUNE", ":").partition(":")
    place = require_place()
    is_mine = rank == str(place.rank)
    if is_mine and misfortune == "refuse-early":
        raise UserError("`ram` 1 is too small here: give more")
    num_words, failure = NUM_WORDS if misfortune else FATAL_WORD, None
    silence_s = 4 if misfortune == "stop" else 20
    same = ModelIdentity(dict.fromkeys(PARTS, "same"), {"xxh3": "same"})
    with joined(place, same, loading.options.ranks, [], limit_s=30, exchange_limit_s=silence_s) as ranks:
        print(f"pid {place.rank} {os.getpid()}", file=sys.stderr, flush=True)
        try:
            for number in range(num_words):
                ranks.transport.broadcast(torch.zeros(1))
                console.text(f"word{number} ")
                if is_mine and number == FATAL_WORD:
                    meet(misfortune)
                time.sleep(WORD_S if misfortune else 0)
        except (KeyboardInterrupt, RankError, ReadError, UserError) as error:
            failure = error
        console.text(f"{request.prompt or ''}\n")
        if failure is not None:
            raise failure


def meet(misfortune: str) -> None:
    if misfortune == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if misfortune == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if misfortune == "refuse":
        raise UserError("`ram` 1 is too small here: give more")
    if misfortune == "disk":
        raise ReadError("the disk is broken")


def kill_soon() -> None:
    """A launcher gives ranks half a minute to end in order before it kills them."""
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    usual = SubprocessContext._close
    SubprocessContext._close = lambda self, death_sig, timeout=0: usual(self, death_sig, KILLED_AFTER_S)


if __name__ == "__main__":
    # The module that it stands in for imports transformers, which takes seconds and is not used here.
    sys.modules["offload.cli.text_run"] = SimpleNamespace(write_text=write_text)  # type: ignore[assignment]
    if os.environ.get("MISFORTUNE", "").startswith("stop") and "launch" in sys.argv:
        kill_soon()
    with (
        patch("offload.cli.generate_command.libraries", lambda *_, **__: nullcontext()),
        patch("offload.cli.chat_command.libraries", lambda *_, **__: nullcontext()),
    ):
        main()
