"""Growth of the packaged pair, repeated along what its target wrote: at any pace."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import offload
from offload.checkpoint.packaged import PAIR
from offload.drafting import dynamic
from offload.drafting import dynamic as confidence
from offload.drafting.draft_model import Draft
from offload.drafting.model import ModelDrafter
from offload.engine.decoder import Decoder
from offload.reports.trace_acceptance import dynamic_again, write
from offload.sampling_options import Sampling
from offload.trees.topology import PACES, DynamicShape, GrowthSchedule

NUM_NODES, DEPTH, NUM_NEW = 64, 32, 128
SLOW = GrowthSchedule(16, 9, 1.0)  # as it was once
PROMPTS = ("import os\n\n\ndef walk(top):\n", 'def parse_args(argv):\n    """Read the command line."""\n')
SAMPLINGS = (Sampling(), Sampling(temperature=0.6, seed=1))
Text = tuple[list[int], list[int]]  # prompt, and what the target wrote


def opened(draft: Path) -> Decoder:
    tree = f"dynamic:{NUM_NODES}x{DEPTH}"
    return offload.load(PAIR / "target", draft, "2GiB", tree, dtype="float32", context=512, threads=1, profile="none")


@pytest.fixture(scope="module")
def texts() -> dict[Sampling, list[Text]]:
    tree = f"dynamic:{NUM_NODES}x{DEPTH}"
    with opened(PAIR / "draft") as decoder:
        encoded = [decoder.encode(prompt, raw=True) for prompt in PROMPTS]
        return {one: [(ids, write(decoder, ids, one, NUM_NEW, tree)) for ids in encoded] for one in SAMPLINGS}


class Again:
    """What growing again along texts has taken, per sweep."""

    def __init__(self, decoder: Decoder, texts: list[Text], sampling: Sampling, pace: GrowthSchedule) -> None:
        widths, run, bounds = list[int](), Draft.run, DynamicShape(NUM_NODES, DEPTH, pace)
        assert isinstance(decoder.drafter, ModelDrafter)
        decoder.drafter._calibration.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Draft, "run", lambda draft, *rows: widths.append(len(rows[0])) or run(draft, *rows))
            bursts = [one for text in texts for one in dynamic_again(decoder, *text, sampling, bounds)]
        self.tokens, self.passes = sum(bursts) / len(bursts), 1 + len(widths) / len(bursts)
        self.rows = 1 + sum(widths) / len(bursts)


@contextmanager
def as_it_was() -> Iterator[None]:
    """No row more than nodes, which unlikely candidates take as well; an exponent of 3.2 at most."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic, "_LOG_FAR", math.inf)
        patch.setattr(dynamic, "most_rows", lambda num_nodes: num_nodes)
        patch.setattr(confidence, "_GRID", tuple(beta for beta in confidence._GRID if beta <= 3.2))
        yield


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm"])
def test_large_passes_grow_trees_as_good(texts: dict[Sampling, list[Text]], sampling: Sampling) -> None:
    with opened(PAIR / "draft") as decoder:
        with as_it_was():
            slow = Again(decoder, texts[sampling], sampling, SLOW)
        others = [Again(decoder, texts[sampling], sampling, pace) for pace in PACES]
    for pace, again in zip(PACES, others, strict=True):
        assert again.tokens == pytest.approx(slow.tokens, rel=0.06)
        widths = [1, *pace.widths(NUM_NODES)]
        assert again.passes == pytest.approx(len(widths), abs=3) and again.rows == pytest.approx(sum(widths), rel=0.2)
    assert others[0].passes <= 0.75 * slow.passes, "0.6 on more texts that are less easy"
