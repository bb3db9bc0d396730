"""Headers there and back, and those that no rank of ours would send."""

import pytest
import torch

from offload.distributed.transport import Kind, Message, end_header, header_of, read_header


@pytest.mark.parametrize("payload", [None, torch.zeros(()), torch.zeros(3, 0), torch.ones(2, 3, dtype=torch.bool)])
def test_a_header_says_what_follows(payload):
    kind, num_numbers, dtype, shape = read_header(header_of(Message(Kind.TREE, [7, -1], payload)))
    assert (kind, num_numbers) == (Kind.TREE, 2)
    assert (dtype, shape) == ((None, ()) if payload is None else (payload.dtype, tuple(payload.shape)))


def test_the_last_header_is_told_from_all_others():
    assert read_header(end_header()) is None


def _first(kind: int = 0, dtype: int = 0, num_dimensions: int = 0) -> int:
    return kind | dtype << 8 | num_dimensions << 16


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ([_first(kind=11), 0], "kind 11"),
        ([-2, 0], "kind 254"),
        ([0, -1], "-1 numbers"),
        ([0, 2**30], "1073741824 numbers"),
        ([_first(dtype=9), 0], "type 9"),
        ([_first(dtype=1, num_dimensions=3), 0], "3 dimensions"),
        ([_first(dtype=1, num_dimensions=-1), 0], "-1 dimensions"),
        ([_first(dtype=1, num_dimensions=1), 0, -1], "not possible"),
        ([_first(dtype=1, num_dimensions=2), 0, -(2**20), -(2**20)], "not possible"),
        ([_first(dtype=2, num_dimensions=1), 0, 2**27 + 1], "larger than"),
        ([_first(dtype=7, num_dimensions=2), 0, 2**31 - 1, 2**31 - 1], "larger than"),
    ],
)
def test_sizes_that_cannot_be_are_refused_before_anything_is_allocated(header, complaint):
    with pytest.raises(ValueError, match=complaint):
        read_header(torch.tensor(header + [0] * (4 - len(header)), dtype=torch.int32))


def test_four_draws_return_in_sixteen_bytes_each():
    drawn = Message(Kind.DRAWN, [7, 0, *range(4)])
    assert header_of(drawn).nbytes + 8 * len(drawn.numbers) == 16 * 4
