"""Stacks of experts taken apart: each expert's own bytes, found in one go."""

from collections.abc import Iterator

from offload.checkpoint.experts import split_experts
from offload.checkpoint.layout import Part
from offload.checkpoint.tensors import TensorEntry


class Counted(list[Part]):
    """Parts, and how many of them were looked at."""

    num_seen = 0

    def __iter__(self) -> Iterator[Part]:
        for part in super().__iter__():
            self.num_seen += 1
            yield part


def apart(num_experts: int) -> Counted:
    """Gate and up of each, 3 rows of 8 numbers each, one behind the other in the file and in the stack."""
    entries = (TensorEntry(0, "F32", (3, 8), 96 * index, 96 * index + 96) for index in range(2 * num_experts))
    return Counted(Part(entry, 24 * index) for index, entry in enumerate(entries))


def test_parts_are_looked_at_once_however_many_experts_there_are() -> None:
    parts = apart(500)
    records = split_experts({"gate_up_proj": ((500, 6, 8), parts)}, 500)
    assert parts.num_seen <= 2 * len(parts)
    assert [record.pieces[0].lo for record in records] == [192 * expert for expert in range(500)]
    assert all(record.parameters["gate_up_proj"].shape == (6, 8) for record in records)
