"""Orders over the wire: what comes back is what was said, and bytes of a stranger are refused before they are used."""

import random

import pytest
import torch
from in_memory import in_memory
from msgspec import MsgspecError, Raw, msgpack

from offload.distributed.agreement import broadcast_from_head, gather_values
from offload.distributed.orders import (
    Accept,
    Cancel,
    Commit,
    DraftNodeUpdate,
    Drawn,
    Figures,
    Grow,
    Guessed,
    Least,
    Order,
    Reset,
    RunOrder,
    Stop,
    Word,
    as_bytes,
    decode,
    encode,
    packed,
)  # fmt: skip
from offload.distributed.transport import Channel
from offload.errors import RankError
from offload.sampling.sampler import NO_TOKEN
from offload.sampling_options import Sampling

ORDERS: list[Order] = [
    Reset(3),
    Reset(0, Sampling(temperature=0.5, top_p=0.9, top_k=7, min_p=0.25, seed=2**63 - 1), (1, 2, 2**40)),
    RunOrder(7, [5, 6], [0, 1], b"\x80\xc0", 2),
    RunOrder(8, [5], [0], b"\x80", 0, is_dead=True),
    Commit([0, 1], [3, 2]),
    Commit([]),
    Cancel([1, 2**40]),
    Drawn(7, False, [3, NO_TOKEN]),
    Drawn(7, True, []),
    Grow(9, Least(0.25, 0.0)),
    Guessed([DraftNodeUpdate(1, 0, 5, 0.5)]),
    Accept([1, 2]),
    Figures(),
    Stop(),
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_arrives_as_it_was_sent(order: Order) -> None:
    assert decode(encode(order)) == order
    assert len(encode(Drawn(7, False, [10**5] * 4))) <= 8 * 8, "draws return in sixteen bytes each, as is planned"


def test_rows_and_activations_arrive_to_the_bit() -> None:
    sees_WU = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 0, 0, 1]], dtype=torch.bool)
    rows_WD = torch.randn(2, 3).bfloat16()
    order = decode(encode(RunOrder(7, [5, 6], [4, 2], packed(sees_WU), 1, hidden=as_bytes(rows_WD).numpy().data)))
    assert isinstance(order, RunOrder) and torch.equal(order.activations(3, torch.bfloat16), rows_WD)
    token_W, position_W, seen_WU = order.rows(3)
    assert token_W.tolist() == [5, 6] and position_W.tolist() == [4, 2] and torch.equal(seen_WU, sees_WU)


BAD: list[object] = [
    [],
    1,
    ["Nothing"],
    ["Stop", 1],
    ["Reset"],
    ["Reset", -1],
    ["Reset", 0, {"temperature": -1.0}],
    ["Reset", 0, {"top_k": "many"}],
    ["RunOrder", 7, [], [], b"", 0],
    ["RunOrder", 7, [5], [], b"\x80", 0],
    ["RunOrder", 7, [5], [0], b"\x80", 2],
    ["RunOrder", 7, [5], [-1], b"\x80", 1],
    ["Commit", [-1]],
    ["Commit", [1.5]],
    ["Drawn", 7, 0, [1]],
    ["Drawn", 7],
    ["Drawn", 7, False, [2**63]],
    ["Guessed", [[1, 0, 5]]],
    ["Grow", 5, [0.5]],
]


@pytest.mark.parametrize("raw", BAD, ids=str)
def test_what_is_no_order_is_refused(raw: object) -> None:
    with pytest.raises(MsgspecError):
        decode(msgpack.encode(raw))


@pytest.mark.parametrize("seed", range(4))
def test_damaged_bytes_are_an_order_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        content = encode(rng.choice(ORDERS))
        for _ in range(rng.randrange(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        del content[rng.randrange(1, len(content) + 1) :]
        try:
            order = decode(content)
        except ValueError:
            continue
        assert isinstance(order, Order)
        if isinstance(order, RunOrder):
            try:
                order.rows(rng.randrange(4))
            except ValueError:
                continue


def test_a_list_that_would_fill_memory_is_refused_before_it_is_made() -> None:
    def begun(num: int) -> bytes:
        """An order whose list announces entries, of which none follows."""
        return b"\x92\xa6Accept\xdd" + num.to_bytes(4, "big")

    with pytest.raises(MsgspecError, match="length <= 4194304"):
        decode(begun(2**22 + 1))
    with pytest.raises(MsgspecError, match="truncated"):
        decode(begun(2**22))


@pytest.mark.parametrize("order", [Word(Raw(msgpack.encode("seven"))), Word(Raw(msgpack.encode(None))), Stop()])
def test_words_of_another_type_are_refused_with_the_rank(order: Order) -> None:
    head, other = in_memory(2)
    other.send(0, Channel.DATA, order)
    with pytest.raises(RankError, match="rank 1 has said what is no word here: "):
        gather_values(head, 7, int)
    head.send(1, Channel.DATA, order)
    with pytest.raises(RankError, match="rank 0 has said what is no word here: "):
        broadcast_from_head(other, 7, int)
