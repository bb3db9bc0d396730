"""Stacks of experts taken apart: each expert's own bytes, found in one go."""

from collections.abc import Iterator

import pytest

from offload.checkpoint.layout import TensorPart, split_experts
from offload.checkpoint.tensors import Coded, TensorEntry
from offload.encoding.floats import Mxfp4


class Counted(list[TensorPart]):
    """Parts, and how many of them were looked at."""

    num_seen = 0

    def __iter__(self) -> Iterator[TensorPart]:
        for part in super().__iter__():
            self.num_seen += 1
            yield part


def apart(num_experts: int) -> Counted:
    """Gate and up of each, 3 rows of 8 numbers each, one behind the other in the file and in the stack."""
    entries = (TensorEntry(0, "F32", (3, 8), 96 * index, 96 * index + 96) for index in range(2 * num_experts))
    return Counted(TensorPart(entry, 24 * index) for index, entry in enumerate(entries))


def test_parts_are_looked_at_once_however_many_experts_there_are() -> None:
    parts = apart(500)
    records = split_experts({"gate_up_proj": ((500, 6, 8), parts)}, 500)
    assert parts.num_seen <= 2 * len(parts)
    assert [record.pieces[0].lo for record in records] == [192 * expert for expert in range(500)]
    assert all(record.parameters["gate_up_proj"].shape == (6, 8) for record in records)


@pytest.mark.parametrize("shape", [(6, 8), (1, 6, 8)])
def test_a_single_expert_may_be_a_stack_or_a_part_of_one(shape: tuple[int, ...]) -> None:
    (record,) = split_experts({"down_proj": ((1, 6, 8), [TensorPart(TensorEntry(0, "F32", shape, 0, 192))])}, 1)
    assert record.parameters["down_proj"].shape == (6, 8) and [(one.lo, one.hi) for one in record.pieces] == [(0, 192)]


@pytest.mark.parametrize("num_experts", [1, 3])
def test_coded_stacks_the_other_way_round_come_apart(num_experts: int) -> None:
    """The model has (E, 64, 6), the file (E, 6, 64)."""
    words_bytes = 32 * 6
    scales = TensorEntry(0, "U8", (num_experts, 6, 2), 4096, 4096 + num_experts * 12)
    coded = Coded(Mxfp4(), (("_scales", scales),))
    entry = TensorEntry(0, "U8", (num_experts, 6, 64), 0, num_experts * words_bytes, coded)
    records = split_experts({"down_proj": ((num_experts, 64, 6), [TensorPart(entry)])}, num_experts)
    own = [record.coded["down_proj"][0].part.entry for record in records]
    assert [(one.shape, one.lo, one.num_bytes) for one in own] == [
        ((6, 64), words_bytes * expert, words_bytes) for expert in range(num_experts)
    ]
    assert [one.coded.companions[0][1].lo for one in own if one.coded] == [4096 + 12 * e for e in range(num_experts)]
