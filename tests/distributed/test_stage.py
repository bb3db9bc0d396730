"""Stages that are threads: whatever arrives when, a row is drawn as one process draws it; dead runs cost nothing."""

import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest
import torch
from in_memory import Delay, InMemory, in_memory
from test_section import opened, plan_of, sections
from tiny import FAMILIES, VOCAB_SIZE, build, save
from waiting import until

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.open import open_checkpoint
from offload.distributed import service
from offload.distributed.head import Head
from offload.distributed.orders import Cancel, Commit, Drawn, Guessed, Reset, RunOrder, Stop, packed
from offload.distributed.stage import PipelineStage, _Cancellations, serve_stage
from offload.distributed.transport import Channel
from offload.engine.build import resident_model
from offload.errors import RankError, ReadError
from offload.model.headers import specified
from offload.model.tree_model import TreeModel
from offload.rank_roles import Roles, parse_pipeline
from offload.sampling.logits import Logits
from offload.sampling.sampler import NO_TOKEN, Sampler
from offload.sampling_options import Sampling
from offload.streaming.device import HOST

WARM = Sampling(temperature=0.9, top_k=40, seed=11)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """With windows of two kinds, which rows behind uncommitted ones must heed."""
    return specified(open_checkpoint(save(build(FAMILIES["gemma3"]()), tmp_path_factory.mktemp("stages"))))


@pytest.fixture(scope="module")
def whole(checkpoint: Checkpoint) -> Iterator[TreeModel]:
    model = resident_model(checkpoint, "auto")
    yield model
    model.close()


class SlowStage(PipelineStage):
    """Every layer takes `layer_s` seconds longer."""

    layer_s = 0.0

    def _go_on(self, layer: int) -> None:
        time.sleep(self.layer_s)
        super()._go_on(layer)


@contextmanager
def serving(
    checkpoint: Checkpoint, cuts: Sequence[int], delay: Delay, *, is_streamed: bool = False, slow_layer_s: float = 0.0
) -> Iterator[tuple[list[InMemory], list[SlowStage]]]:
    """The ranks' transports, and the stages behind them; the first one is the head's own rank."""
    transports, threads, stages = in_memory(len(cuts) - 1, delay), list[threading.Thread](), list[SlowStage]()
    with ExitStack() as resources:
        for rank, section in enumerate(sections(*cuts)):
            model, stream = resources.enter_context(opened(checkpoint, section, is_streamed=is_streamed, runs=False))
            stages.append(SlowStage(model, stream, plan_of(checkpoint, section)))
            stages[-1].layer_s = slow_layer_s
            neighbours = (max(0, rank - 1), rank + 1 if rank + 2 < len(cuts) else None)
            threads.append(threading.Thread(target=serve_stage, args=(transports[rank], *neighbours, stages[-1])))
        for thread in threads:
            thread.start()
        try:
            yield transports, stages
        finally:
            stop(transports[0], threads)


def stop(transport: InMemory, threads: Sequence[threading.Thread]) -> None:
    """As a head does."""
    for rank in range(len(threads)):
        transport.send(rank, Channel.CONTROL, Stop())
    transport.send(0, Channel.DATA, Stop())
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()


class OneProcess:
    """The whole model over the same rows, at once; nothing is cancelled here."""

    def __init__(self, model: TreeModel) -> None:
        self._model, self._cache = model, model.new_cache(400)

    def reset(self, num_kept: int, sampling: Sampling) -> None:
        self._cache.clear(num_kept)
        self._position_U, self._sampler = torch.empty(0, dtype=torch.long), Sampler(sampling, VOCAB_SIZE)

    def run(self, run: RunOrder) -> list[int]:
        token_W, position_W, sees_WU = run.rows(len(self._position_U))
        self._position_U = torch.cat([self._position_U, position_W])
        logits_WV = self._model.forward(token_W, self._position_U, sees_WU, self._cache)
        drawn = list(zip(logits_WV, run.positions, strict=True))[len(logits_WV) - run.num_drawn :]
        return [self._sampler.draw(logits_V, position + 1) for logits_V, position in drawn]

    def commit(self, path: Sequence[int], kept: Sequence[int]) -> None:
        self._cache.commit(path, kept)
        self._position_U = self._position_U[list(kept)]


class TinyHead:
    """Issues random runs, commits and cancellations, and knows what one process draws."""

    def __init__(self, transport: InMemory, num_stages: int, model: TreeModel, sampling: Sampling) -> None:
        self.transport, self._num_stages, self._alone = transport, num_stages, OneProcess(model)
        self.wanted: dict[int, list[int]] = {}
        self.cancelled = set[int]()
        self._length, self._next = 0, 0
        self._rows: list[tuple[int, set[int]]] = []  # of uncommitted rows: their run, and those that they see
        self.reset(0, sampling)

    def reset(self, num_kept: int, sampling: Sampling) -> None:
        self.transport.send(0, Channel.DATA, Reset(num_kept, sampling))
        self._alone.reset(num_kept, sampling)
        self._rows, self._length = [], num_kept

    def prompt(self, rng: random.Random, sizes: Sequence[int]) -> None:
        for size in sizes:
            self.issue(rng, [row - 1 for row in range(size)], num_drawn=int(size == sizes[-1]))
            self.commit(list(range(size)), [])

    def issue(self, rng: random.Random, parents: Sequence[int], num_drawn: int | None = None) -> int:
        """A run whose rows follow these uncommitted rows; -1 is the last committed one."""
        run, self._next = self._next, self._next + 1
        first = len(self._rows)
        for row, parent in enumerate(parents, first):
            self._rows.append((run, {row} | (self._rows[parent][1] if parent >= 0 else set())))
        new = [sees for _, sees in self._rows[first:]]
        sees_WU = [[row in sees for row in range(len(self._rows))] for sees in new]
        tokens = [rng.randrange(3, VOCAB_SIZE) for _ in parents]
        positions = [self._length + len(sees) - 1 for sees in new]
        num_drawn = len(parents) if num_drawn is None else num_drawn
        order = RunOrder(run, tokens, positions, packed(sees_WU), num_drawn)
        self.transport.send(0, Channel.DATA, order)
        self.wanted[run] = self._alone.run(order)
        return run

    def live(self) -> list[int]:
        """Rows that do not see one of a cancelled run."""
        dead = {row for row, (run, _) in enumerate(self._rows) if run in self.cancelled}
        return [row for row, (_, sees) in enumerate(self._rows) if not sees & dead]

    def path(self, row: int) -> list[int]:
        """What a row sees, in the order of positions."""
        return sorted(self._rows[row][1], key=lambda seen_row: len(self._rows[seen_row][1]))

    def commit(self, path: Sequence[int], kept: Sequence[int]) -> None:
        self.transport.send(0, Channel.DATA, Commit(list(path), list(kept)))
        self._alone.commit(path, kept)
        new = {old: row for row, old in enumerate(kept)}
        self._rows = [(self._rows[old][0], {new[row] for row in self._rows[old][1] - set(path)}) for old in kept]
        self._length += len(path)

    def cancel(self, run: int) -> None:
        """Nothing that was committed or kept is of this run."""
        self.cancelled.add(run)
        for rank in range(self._num_stages):
            self.transport.send(rank, Channel.CONTROL, Cancel([run]))

    def results(self) -> dict[int, list[int] | None]:
        """What the last stage has drawn, None where it was dead; in the order of issuing."""
        drawn: dict[int, list[int] | None] = {}
        for _ in self.wanted:
            back = self.transport.receive(self._num_stages - 1, Channel.RESULT)
            assert isinstance(back, Drawn) and not (back.is_dead and back.tokens)
            drawn[back.run] = None if back.is_dead else back.tokens
        assert list(drawn) == list(self.wanted)
        return drawn


def play(head: TinyHead, rng: random.Random, num_turns: int, *, cancels: bool) -> None:
    """Runs behind runs, in trees; commits of paths that keep what hangs below, and lose the rest."""
    head.prompt(rng, [17, 12])
    needed = set[int]()
    for _ in range(num_turns):
        for _ in range(rng.randrange(1, 4)):
            live = [-1, *head.live()]
            parents = list[int]()
            for row in range(len(head._rows), len(head._rows) + rng.randrange(1, 5)):
                parents.append(rng.choice([*live[-6:], *range(len(head._rows), row)]))
            run = head.issue(rng, parents)
            if cancels and rng.random() < 0.4:
                head.cancel(run)
        live = head.live()
        if live and rng.random() < 0.8:
            path = head.path(rng.choice(live))
            path = path[: rng.randrange(1, 3)]
            kept = [row for row in live if row not in path and head._rows[row][1] >= set(path)]
            rng.shuffle(kept)
            needed |= {head._rows[row][0] for row in path}
            head.commit(path, kept)
        late = [run for run, _ in head._rows if run not in needed | head.cancelled]
        if cancels and late and rng.random() < 0.3:  # stages may hear of it before they keep its rows
            head.cancel(rng.choice(late))


def random_delay(seed: int, most_s: float = 0.004) -> Delay:
    rng = random.Random(seed)
    return lambda *_: rng.uniform(0, most_s)


def assert_draws(head: TinyHead) -> int:
    """Number of runs that came back dead."""
    drawn = head.results()
    for run, tokens in drawn.items():
        assert tokens == head.wanted[run] or (tokens is None and run in head.cancelled)
    return sum(tokens is None for tokens in drawn.values())


@pytest.mark.parametrize("cuts", [(0, 4), (0, 1, 4), (0, 1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "warm"])
def test_draws_are_those_of_one_process(
    sampling: Sampling, cuts: Sequence[int], checkpoint: Checkpoint, whole: TreeModel
) -> None:
    for seed in range(2):
        with serving(checkpoint, cuts, random_delay(seed)) as (transports, _):
            head = TinyHead(transports[0], len(cuts) - 1, whole, sampling)
            play(head, random.Random(seed), 5, cancels=True)
            head.reset(20, Sampling(temperature=0.5, top_p=0.9, seed=seed))
            play(head, random.Random(seed + 1), 5, cancels=True)
            assert_draws(head)


@pytest.mark.parametrize("seed", range(3))
def test_streaming_stages_draw_the_same(seed: int, checkpoint: Checkpoint, whole: TreeModel) -> None:
    """Their layers pass through slots, and a pass that was cancelled half-way leaves the next one whole layers."""
    with serving(checkpoint, (0, 4), random_delay(seed), is_streamed=True, slow_layer_s=0.002) as (transports, stages):
        assert not stages[0].stream.carrier.resident
        stages[0].stream.poison_released = True
        head = TinyHead(transports[0], 1, whole, WARM)
        play(head, random.Random(seed), 8, cancels=True)
        assert_draws(head)


def test_a_run_that_is_cancelled_before_it_begins_is_passed_on_empty(checkpoint: Checkpoint, whole: TreeModel) -> None:
    def delay(_: int, receiver: int, channel: Channel) -> float:
        return 0.5 if (receiver, channel) == (0, Channel.DATA) else 0.0

    with serving(checkpoint, (0, 1, 3, 4), delay) as (transports, stages):
        head, rng = TinyHead(transports[0], 3, whole, WARM), random.Random(1)
        head.prompt(rng, [9])
        first, dead, third = head.issue(rng, [-1, 0]), head.issue(rng, [1, 2, 2]), head.issue(rng, [0, -1])
        head.cancel(dead)
        head.commit([0], [5, 1])
        last = head.issue(rng, [0, 1])
        drawn = head.results()
        assert {run for run, tokens in drawn.items() if tokens is None} == {dead}
        assert all(drawn[run] == head.wanted[run] for run in (first, third, last))
        for transport in transports[:2]:
            passed = [order for _, _, order in transport.sent if isinstance(order, RunOrder) and order.number == dead]
            assert passed[-1].is_dead and passed[-1].hidden is None and len(passed[-1].tokens) == 3
        assert all(stage.num_uncommitted == 4 for stage in stages), "two were kept, and two came behind them"


@pytest.mark.parametrize("is_streamed", [False, True], ids=["resident", "streamed"])
def test_a_run_is_stopped_between_two_layers(is_streamed: bool, checkpoint: Checkpoint, whole: TreeModel) -> None:
    """The head hears of the first layer, and cancels."""
    with serving(checkpoint, (0, 4), lambda *_: 0.0, is_streamed=is_streamed) as (transports, stages):
        layers, release = list[int](), stages[0].stream.release
        head, rng = TinyHead(transports[0], 1, whole, WARM), random.Random(1)
        head.prompt(rng, [9])
        assert set(head.results()) == {0}
        head.wanted.clear()

        def tell(layer: int) -> None:
            release(layer)
            layers.append(layer)
            if layers == [0]:
                head.cancel(1)
                until(stages[0]._is_cancelled)  # another thread hears of it

        stages[0].stream.release = tell  # type: ignore[method-assign]
        head.issue(rng, [-1, 0])
        head.issue(rng, [-1])
        drawn = head.results()
        assert drawn == {1: None, 2: head.wanted[2]}
        assert layers == [0, 0, 1, 2, 3]


def test_cancelled_runs_are_stopped_where_slots_allow_it_and_forgotten(checkpoint: Checkpoint) -> None:
    for is_streamed, may_stop in ((True, [True, False, False, False]), (False, [True, True, True, False])):
        with serving(checkpoint, (0, 4), lambda *_: 0.0, is_streamed=is_streamed) as (_, stages):
            assert [stages[0]._may_stop(layer) for layer in range(4)] == may_stop
    (transport,) = in_memory(1)
    cancellations = _Cancellations(transport)
    transport.send(0, Channel.CONTROL, Cancel([3, 5, 8]))
    transport.send(0, Channel.CONTROL, Stop())
    until(lambda: 8 in cancellations)
    cancellations.forget_before(5)
    assert 3 not in cancellations and 5 in cancellations and cancellations._dead == {5, 8}


def test_scores_that_are_no_numbers_are_told_and_hurt_nobody(checkpoint: Checkpoint) -> None:
    """A guess that will not be taken may lead to them."""
    with serving(checkpoint, (0, 4), lambda *_: 0.0) as (_, stages):
        logits_NV = torch.randn(5, VOCAB_SIZE)
        logits_NV[3] = torch.nan
        logits = Logits(5, 2, logits_NV[:2], lambda lo, hi: logits_NV[lo:hi])
        tokens = stages[0]._draw(logits, torch.tensor([7, 8, 8, 9, 9])).tolist()
        sampler = stages[0].sampler
        wanted = [sampler.draw(logits_NV[row], position) for row, position in ((0, 8), (1, 9), (2, 9), (4, 10))]
        assert tokens == [*wanted[:3], NO_TOKEN, wanted[3]]


BAD = {
    "run 7 of 2 rows behind 0 sees 1 bytes": RunOrder(7, [5, 5], [0, 1], b"\x80", 0),
    "a row of run 7 must see itself last": RunOrder(7, [5], [0], b"\x00", 1),
    "a row of run 8 must see itself last": RunOrder(8, [5, 5], [0, 1], b"\xc0\xc0", 1),
    "commit of 1 and rows [2]": Commit([2]),
    "commit of 0 and rows [0, 0]": Commit([], [0, 0]),
    "rank 0 was told to Guessed": Guessed([]),
}


@pytest.mark.parametrize("reason", BAD)
def test_an_order_that_cannot_be_ends_the_stage_before_anything_is_computed(
    reason: str, checkpoint: Checkpoint
) -> None:
    (transport,) = in_memory(1)
    transport.send(0, Channel.DATA, BAD[reason])
    transport.send(0, Channel.CONTROL, Stop())
    with opened(checkpoint, sections(0, 4)[0], is_streamed=False, runs=False) as (model, stream):
        stage = PipelineStage(model, stream, plan_of(checkpoint, sections(0, 4)[0]))
        with pytest.raises(ValueError, match=re.escape(reason)):
            serve_stage(transport, 0, None, stage)
        assert stage.num_uncommitted == 0


@pytest.mark.parametrize("size", [None, -1, 1])
def test_activations_of_another_size_end_the_stage(size: int | None, checkpoint: Checkpoint) -> None:
    with opened(checkpoint, sections(0, 2, 4)[1], is_streamed=False, runs=False) as (model, stream):
        stage = PipelineStage(model, stream, plan_of(checkpoint, sections(0, 2, 4)[1]))
        whole = stage.model.width * stage.model.dtype.itemsize
        hidden = None if size is None else memoryview(bytes(whole + size))
        with pytest.raises(ValueError, match=f"run 3 has .* bytes of activations, they must be {whole}"):
            stage.run(RunOrder(3, [5], [0], b"\x80", 1, hidden=hidden), lambda: False)


def test_what_one_service_of_the_head_raises_ends_every_text(checkpoint: Checkpoint) -> None:
    """Its stage is gone, so the next text must not wait for it."""
    (transport,) = in_memory(1)

    def fail() -> None:
        raise ReadError("the disk is broken")

    with service.serving([fail], transport, HOST):
        head = Head(transport, Roles(1, (0,)), parse_pipeline("plain"), 4)
        for _ in range(2):
            with pytest.raises(RankError, match="rank 0: the disk is broken"):
                head.begin([3], Sampling(), 6)
                head.advance()
