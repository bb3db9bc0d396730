"""Headers there and back, and those that no rank of ours would send."""

import pytest
import torch

from offload.ranks.messages import Kind, Message
from offload.ranks.wire import end_header, header_of, read_header


@pytest.mark.parametrize("payload", [None, torch.zeros(()), torch.zeros(3, 0, 2), torch.ones(2, 3, dtype=torch.bool)])
def test_a_header_says_what_follows(payload):
    kind, num_numbers, dtype, shape = read_header(header_of(Message(Kind.TREE, [7, -1], payload)))
    assert (kind, num_numbers) == (Kind.TREE, 2)
    assert (dtype, shape) == ((None, ()) if payload is None else (payload.dtype, tuple(payload.shape)))


def test_the_last_header_is_told_from_all_others():
    assert read_header(end_header()) is None


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ([11, 0, -1, 0], "kind 11"),
        ([-2, 0, -1, 0], "kind -2"),
        ([0, -1, -1, 0], "-1 numbers"),
        ([0, 2**40, -1, 0], "1099511627776 numbers"),
        ([0, 0, 99, 0], "type 99"),
        ([0, 0, -3, 0], "type -3"),
        ([0, 0, 0, 5], "5 dimensions"),
        ([0, 0, 0, -1], "-1 dimensions"),
        ([0, 0, 0, 1, -1], "not possible"),
        ([0, 0, 0, 2, -(2**20), -(2**20)], "not possible"),
        ([0, 0, 1, 1, 2**27 + 1], "larger than"),
        ([0, 0, 6, 4, 2**62, 2**62, 2**62, 2**62], "larger than"),
    ],
)
def test_sizes_that_cannot_be_are_refused_before_anything_is_allocated(header, complaint):
    with pytest.raises(ValueError, match=complaint):
        read_header(torch.tensor(header + [0] * (8 - len(header)), dtype=torch.int64))
