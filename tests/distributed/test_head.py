"""The head's orders: what goes where and when, over a simulated pipeline, and what becomes of failures."""

import threading
from statistics import mean

import pytest
from in_memory import in_memory
from simulator import Speeds, World, own_text, simulated, written

from offload.distributed.head import Head, RowPrice
from offload.distributed.orders import (
    Commit,
    Drawn,
    Grow,
    Guessed,
    Order,
    Reset,
    RunOrder,
    Stop,
    packed,
)  # fmt: skip
from offload.distributed.transport import Channel
from offload.errors import RankError
from offload.memory.sizes import PROMPT_ROWS
from offload.rank_roles import Roles, parse_pipeline
from offload.sampling_options import Sampling

STEADY = Speeds(is_random=False)
FOUR = Roles(5, (0, 1, 2, 3), 4)


def sent(world: World, *kinds: type[Order]) -> list[tuple[int, Channel, Order]]:
    return [order for order in world.sent if isinstance(order[2], kinds)]


def test_a_text_is_told_as_the_messages_say() -> None:
    world = simulated(parse_pipeline("plain"), 0, roles=Roles(2, (0, 1)))
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=7, min_p=0.25, seed=11)
    world.head.begin([3, 1, 4], sampling, 6)
    first, second = world.head.advance(), world.head.advance()
    assert [*first, *second, *world.head.advance()] == own_text([3, 1, 4], 6) and world.head.advance() == []
    assert {(to, channel) for to, channel, _ in world.sent} == {(0, Channel.DATA)}
    assert [order for _, _, order in world.sent] == [
        Reset(0, sampling),
        RunOrder(0, [3, 1, 4], [0, 1, 2], packed([[1, 0, 0], [1, 1, 0], [1, 1, 1]]), num_drawn=1),
        Commit([0, 1, 2]),
        Commit([]),
        RunOrder(1, first, [3], packed([[1]]), num_drawn=1),
        Commit([0]),
        RunOrder(2, second, [4], packed([[1]]), num_drawn=1),
        Commit([0]),
    ]


def test_a_prompt_goes_in_parts_each_committed_at_once_before_anything_comes_back() -> None:
    world, prompt = simulated(parse_pipeline("plain"), 0), [1, 2, 3, 4] * 300
    world.head.begin(prompt, Sampling(), len(prompt) + 2)
    orders = [order for _, _, order in sent(world, RunOrder, Commit)]
    assert [type(order) for order in orders] == [RunOrder, Commit] * 3 and world.now_s == 0
    sizes = [(len(order.tokens), order.num_drawn) for order in orders[::2]]
    assert sizes == [(PROMPT_ROWS, 0), (PROMPT_ROWS, 0), (176, 1)]
    assert world.head.advance() + world.head.advance() == own_text(prompt, len(prompt) + 2)


def test_the_next_text_keeps_what_agrees_and_passes_over_answers_for_the_last_one() -> None:
    for seed in range(10):
        world = simulated(parse_pipeline("async,rows=2"), seed)
        world.head.begin([1, 2, 3], Sampling(), 60)
        begun = [1, 2, 3, *world.head.advance(), *world.head.advance()]
        assert world.head._table.alive, "a run is on its way when the text is left"
        prompt = [*begun, 5, 5]
        assert written(world, prompt, 40) == own_text(prompt, 40)
        num_kept = sent(world, Reset)[-1][2].num_kept
        assert len(begun) - 1 <= num_kept <= len(begun)
        repeated = written(world, prompt, 40)
        assert repeated == own_text(prompt, 40) and sent(world, Reset)[-1][2].num_kept == len(prompt) - 1


def test_one_run_at_a_time_is_a_tree_and_guesses_wait_for_it() -> None:
    world = simulated(parse_pipeline("sync,rows=9"), 3, accuracy=0.6)
    assert written(world, [1, 2], 80) == own_text([1, 2], 80)
    runs = [order for _, _, order in sent(world, RunOrder)][1:]
    assert {len(order.tokens) for order in runs[:-8]} == {9} and world.most_on_way == 1
    on_way = 0
    for _, _, order in world.sent:
        on_way += isinstance(order, RunOrder) - isinstance(order, Commit)
        assert not isinstance(order, Grow) or on_way <= 0, "asked while a run was on its way"


def test_runs_are_on_their_way_while_the_caller_has_the_tokens_and_all_are_told_to_stop() -> None:
    world = simulated(parse_pipeline("async"), 1)
    world.head.begin([1], Sampling(), 60)
    table = world.head._table
    while world.head.advance():
        assert table.is_complete or table.root.run is not None or not table.has_credit
    world = simulated(parse_pipeline("async"), 8)
    world.head.begin([1], Sampling(), 60)
    world.head.advance()
    world.head.stop()
    stops = {(to, channel) for to, channel, _ in sent(world, Stop)}
    assert stops == {*((rank, Channel.CONTROL) for rank in range(4)), (0, Channel.DATA), (3, Channel.DRAFT)}
    assert world.head._table.alive == []


def test_a_guess_that_is_not_worth_its_time_is_not_run() -> None:
    rows = []
    for row_s in (0.0, 2.0, 1000.0):
        world = simulated(parse_pipeline("async"), 5, price=RowPrice(row_s))
        assert written(world, [1, 2], 80) == own_text([1, 2], 80)
        rows.append(world.stages[0].num_computed)
    assert rows[0] > rows[1] > rows[2]


def rate(text: str, accuracy: float = 0.8) -> tuple[float, float]:
    """(tokens a second after the first ones, seconds to these) of two texts, steady times: a stage takes 3 s and half
    a second a row, a hop 1 s."""
    results = []
    for seed in range(2):
        world = simulated(parse_pipeline(text), seed, roles=FOUR, speeds=STEADY, accuracy=accuracy, capacity=100)
        assert written(world, [seed, 2, 5], 70) == own_text([seed, 2, 5], 70)
        begun, *later = [event for event in world.events if event.kind in ("begun", "emitted")]
        num, span_s = sum(event.num for event in later[1:]), later[-1].time_s - later[0].time_s
        results.append((num / span_s, later[0].time_s - begun.time_s))
    tokens_per_s, first_token_s = (mean(column) for column in zip(*results, strict=True))
    return tokens_per_s, first_token_s


def test_asynchronous_speculation_is_the_fastest_and_each_of_its_parts_pays() -> None:
    (whole, first_s), (plain, plain_first_s) = rate("async"), rate("plain")
    sync = max(rate(f"sync,rows={rows}")[0] for rows in (4, 8))
    assert whole > 1.2 * sync > 1.2 * plain and first_s <= plain_first_s
    for ablation in ("async,no-cancel", "async,no-continuous"):
        assert rate(ablation, 0.5)[0] < rate("async", 0.5)[0]


@pytest.mark.parametrize(
    ("source", "answer", "reason"),
    [
        (3, Stop(), "rank 3 has sent Stop"),
        (3, Drawn(0, False, [1]), "rank 3 has sent Drawn"),
        (2, Guessed([]), "rank 2 has sent Guessed"),
        (2, Drawn(77, False, [1]), "rank 2: run 77 is not on its way"),
        (2, Drawn(0, True, []), "rank 2: run 0 came back with 0 draws of 1, and is needed"),
    ],
)
def test_an_answer_that_cannot_be_ends_the_text_with_its_reason(source: int, answer: Order, reason: str) -> None:
    world = simulated(parse_pipeline("async"), 7)
    world.head.begin([1], Sampling(), 60)
    world.post((source, 0, Channel.RESULT), answer)
    with pytest.raises(RankError, match=reason):
        while world.head.advance():
            pass


def test_a_head_serves_itself_over_threads() -> None:
    """One stage on the head's own rank, in a thread: nothing of it is simulated."""
    (rank,) = in_memory(1, lambda *_: 0.001, limit_s=5)

    def stage() -> None:
        while (order := rank.receive(0, Channel.DATA)) != Stop():
            if isinstance(order, RunOrder):
                tokens = [token % 5 for token in order.tokens[: order.num_drawn]]
                rank.send(0, Channel.RESULT, Drawn(order.number, False, tokens))

    thread = threading.Thread(target=stage)
    thread.start()
    head = Head(rank, Roles(1, (0,)), parse_pipeline("plain"), 4)
    head.begin([3], Sampling(), 6)
    tokens = [token for _ in range(5) for token in head.advance()]
    head.stop()
    thread.join(5)
    assert tokens == [3] * 5 and not thread.is_alive()
