"""Whole decoders write the same bits: ids, and the logits that they were drawn from, with any tree, draft, budget, cut.

The packaged pair in 16 bits, since there the nearest scores lie closest; `NUM_NEW` tokens here, and as many as one
likes from a shell: `python -c "import test_same_bits as t; print(t.differences('bfloat16', 128))"`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload.checkpoint.packaged import PAIR, PROMPT
from offload.engine.decoder import Decoder
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling

TREES = ("none", "64x16", "grown:64x16", "chain:8", "sequences:4x4")
PROMPTS = (PROMPT, "import os\n\n\ndef walk(top):\n", "class Stack(list):\n    def push(self, item):\n")
DRAFTS = {"its draft": PAIR / "draft", "itself": PAIR / "target"}
NUM_NEW = 16
Text = tuple[list[int], list[Tensor]]  # ids, and the logits that each was drawn from


@contextmanager
def drawn_from() -> Iterator[dict[int, Tensor]]:
    """Logits by the position of the token that was drawn from them."""
    draw, seen = Sampler.draw, dict[int, Tensor]()

    def noting(self: Sampler, logits_V: Tensor, position: int) -> int:
        seen[position] = logits_V.clone()
        return draw(self, logits_V, position)

    Sampler.draw = noting
    try:
        yield seen
    finally:
        Sampler.draw = draw


def write(decoder: Decoder, prompt: Any, sampling: Sampling, tree: str, num_new: int = NUM_NEW, **options: Any) -> Text:
    with drawn_from() as seen:
        run = decoder.run(prompt, sampling, max_new_tokens=num_new, tree=tree, raw=True, **options)
        list(run)
    start = run.sequence.stats.num_prompt_tokens
    ids = run.result().token_ids
    return ids, [seen[start + index] for index in range(len(ids))]


def num_different(first: Text, other: Text) -> int:
    """Numbers whose bits differ, an id that differs counting as one."""
    assert len(first[0]) == len(other[0]), "texts of different lengths"
    ids = sum(a != b for a, b in zip(first[0], other[0], strict=True))
    return ids + sum(int((a != b).sum()) for a, b in zip(first[1], other[1], strict=True))


def open_pair(dtype: str, draft: str = "its draft", **options: Any) -> Decoder:
    decoder = offload.load(PAIR / "target", DRAFTS[draft], dtype=dtype, tree="64x16", profile="none",
                           **{"threads": 1, "invariant": True, **options})  # fmt: skip
    if not decoder.invariance.holds:
        decoder.close()
        pytest.skip(f"this processor: {decoder.invariance.reason}")
    return decoder


def differences(dtype: str, num_new: int = NUM_NEW, *, drafts: Any = DRAFTS, prompts: Any = PROMPTS) -> dict[str, int]:
    """For every text of a tree the numbers that differ from those of the text without one."""
    counts = {}
    wanted: dict[tuple[str, float], Text] = {}
    for draft in drafts:
        with open_pair(dtype, draft) as decoder:
            for prompt in prompts:
                for temperature in (0.0, 0.7):
                    sampling, key = Sampling(temperature=temperature, seed=3), (prompt, temperature)
                    for tree in TREES:
                        text = write(decoder, prompt, sampling, tree, num_new)
                        wanted.setdefault(key, text)
                        counts[f"{draft}, {prompt[:12]!r}, T={temperature:g}, {tree}"] = num_different(
                            text, wanted[key]
                        )
    return counts


@pytest.mark.parametrize(("dtype", "drafts"), [("bfloat16", DRAFTS), ("float16", ["its draft"])])
def test_trees_and_drafts(dtype: str, drafts: Iterable[str]) -> None:
    counts = differences(dtype, drafts=drafts, prompts=PROMPTS[:1])
    assert counts == dict.fromkeys(counts, 0)


def test_the_comparison_sees_one_bit() -> None:
    """And a decoder that promises nothing says so; on some processors its bits are the same all the same."""
    options: dict[str, Any] = {"dtype": "bfloat16", "tree": "none", "threads": 1, "invariant": False}
    with offload.load(PAIR / "target", PAIR / "draft", **options) as decoder:
        assert not decoder.invariance.holds
        ids, logits = write(decoder, PROMPT, Sampling(), "none", 8)
    row_V = logits[3].clone()
    row_V.view(torch.int16)[7] ^= 1
    assert num_different((ids, logits), (ids, [*logits[:3], row_V, *logits[4:]])) == 1


@pytest.mark.full
def test_budgets_and_threads() -> None:
    with open_pair("bfloat16") as decoder:
        wanted = write(decoder, PROMPT, Sampling(), "none")
        least = decoder.plan.fixed_bytes + 2 * decoder.plan.layer_slot_bytes + (2 << 20)
    for extra in ({"ram": least, "invariant": None}, {"threads": 2}):
        with open_pair("bfloat16", **extra) as decoder:
            assert not decoder.plan.num_resident or "ram" not in extra, "a layer stays"
            assert num_different(write(decoder, PROMPT, Sampling(), "64x16"), wanted) == 0


@pytest.mark.full
def test_texts_that_go_on() -> None:
    """Keys and values that are kept are those that the prompt would give again, however it was cut."""
    with open_pair("bfloat16") as decoder:
        start = decoder.encode(PROMPT, raw=True)
        first, _ = write(decoder, start, Sampling(), "64x16")
        ids = [*start, *first, *decoder.encode("\n    def close(self):\n", raw=True)]
        kept = write(decoder, ids, Sampling(), "64x16", continues=True)
        assert num_different(kept, write(decoder, ids, Sampling(), "none")) == 0
        torch.manual_seed(0)
        long = [*ids, *torch.randint(3, 4000, (600,)).tolist(), *start]  # more than one pass takes in
        assert (
            num_different(write(decoder, long, Sampling(), "64x16", 6), write(decoder, long, Sampling(), "none", 6))
            == 0
        )


@pytest.mark.full
@pytest.mark.parametrize("is_invariant", [True, False], ids=["the same arithmetic", "another"])
def test_texts_that_are_resumed(is_invariant: bool, tmp_path: Path) -> None:
    """Keys and values that were computed in another way are not taken: the prompt is read again."""
    writer = offload.load(PAIR / "target", PAIR / "draft", dtype="bfloat16", tree="64x16", profile="none", threads=1,
                          invariant=is_invariant)  # fmt: skip
    with writer:
        first, _ = write(writer, PROMPT, Sampling(), "64x16")
        writer.save_session(tmp_path / "text")
    with open_pair("bfloat16") as decoder:
        ids = decoder.load_session(tmp_path / "text").tokens
        assert ids[-len(first) :] == first
        resumed = write(decoder, ids, Sampling(), "64x16", continues=True)
        assert num_different(resumed, write(decoder, ids, Sampling(), "none")) == 0
