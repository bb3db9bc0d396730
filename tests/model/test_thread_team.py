"""Threads that share a product: every block is computed once, on one thread, and errors reach who asked."""

import threading

import pytest
import torch

from offload.kernels.compiled import share_rows
from offload.model import wide_products
from offload.model.thread_team import ThreadTeam


@pytest.fixture
def three_threads() -> None:
    torch.set_num_threads(3)


@pytest.mark.usefixtures("three_threads")
def test_all_threads_share_the_parts_and_few_parts_take_few_threads() -> None:
    team, parts, met = ThreadTeam(), iter(range(1000)), threading.Barrier(3, timeout=20)
    done: list[tuple[int, int]] = []

    def work() -> None:
        met.wait()  # all three are here at once
        done.extend((part, torch.get_num_threads()) for part in parts)

    team.run(work, most=8)
    assert sorted(done) == [(part, 1) for part in range(1000)]
    assert torch.get_num_threads() == 3
    # Few parts take few threads.
    seen: list[str] = []
    ThreadTeam().run(lambda: seen.append(threading.current_thread().name), most=1)
    assert seen == [threading.current_thread().name]


@pytest.mark.usefixtures("three_threads")
def test_what_a_thread_raises_is_raised_and_the_team_goes_on() -> None:
    team, caller, met = ThreadTeam(), threading.current_thread(), threading.Barrier(3, timeout=20)

    def fail() -> None:
        met.wait()
        if threading.current_thread() is not caller:
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        team.run(fail, most=3)
    done: list[int] = []
    team.run(lambda: done.append(torch.get_num_threads()), most=3)
    assert done == [1, 1, 1] and torch.get_num_threads() == 3


@pytest.mark.parametrize("num_rows", [1, 5, 64])
def test_a_wide_product_has_the_same_bits_with_every_number_of_threads(num_rows: int) -> None:
    """Promised whatever the processor is: a block is one thread's, and blocks are the same."""
    chance, outs = torch.Generator().manual_seed(1), []
    rows, weight = (torch.randn(num, 1500, generator=chance).bfloat16() for num in (num_rows, 3000))
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        outs.append(wide_products.linear(rows, weight))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], wide_products.linear(rows, weight.roll(1, 0))), "planted: blocks in another order"


@pytest.mark.usefixtures("three_threads")
def test_weights_are_expanded_by_the_threads_that_torch_has_lent() -> None:
    """Else all that is expanded within a pass would be so by one thread, however many there are."""
    met = threading.Barrier(3, timeout=20)
    with ThreadTeam().in_place_of_torch():
        assert torch.get_num_threads() == 1
        share_rows(lambda _lo, _hi: met.wait(), 64)
    torch.set_num_threads(1)
    bounds: list[tuple[int, int]] = []
    share_rows(lambda *share: bounds.append(share), 64)
    assert bounds == [(0, 64)], "they were given back"
