"""Ranks that are processes: what arrives, what is counted, and what the others learn of one that fails."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from matrix import matrix
from msgspec import msgpack, structs
from processes import Ranks

from offload.checkpoint.identity import PARTS, ModelIdentity
from offload.distributed import watch
from offload.distributed.join import joined
from offload.distributed.orders import Cancel, RunOrder, Stop, as_bytes, encode
from offload.distributed.service import serving
from offload.distributed.transport import MAX_BYTES, Channel, _size
from offload.errors import RankError, UserError
from offload.interrupts import terminated_later
from offload.streaming.device import HOST

NUM_MESSAGES = 40

SAME = ModelIdentity(dict.fromkeys(PARTS, "same"), {"xxh3": "same"})


def test_everything_arrives_whole_and_in_order():
    reports = Ranks(3, _exchange).reports()
    assert reports == {0: ["well"], 1: ["well"], 2: ["well"]}


def _exchange(place, report):
    with joined(place, SAME, "same", [], limit_s=30) as ranks:
        transport, rank = ranks.transport, place.rank
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            whole = torch.arange(42).reshape(6, 7).to(dtype)
            widths = [3, 0, 4]
            mine = whole[:, sum(widths[:rank]) : sum(widths[: rank + 1])]
            assert torch.equal(transport.gather(mine, widths), whole)
            filled = transport.broadcast(whole.clone() if rank == 1 else torch.zeros_like(whole), source=1)
            assert torch.equal(filled, whole)
        sizes = (4 + 2 + 8) * 6
        assert transport.bytes_sent["gather"] == 4 * sizes * 2, "the widest, to two others"
        assert transport.bytes_sent["broadcast"] == (7 * sizes * 2 if rank == 1 else 0)
        assert 0 < transport.exchange_s < 20
        _messages(transport, rank)
    report("well")


def _messages(transport, rank):
    """Every rank to every rank, itself included, on two channels that are read one after the other."""
    for number in range(NUM_MESSAGES):
        for to in range(3):
            transport.send(to, Channel.DATA, _run(number, rank))
            transport.send(to, Channel.CONTROL, Cancel([*range(number)]))
    for source in range(3):
        for number in range(NUM_MESSAGES):
            assert transport.receive(source, Channel.CONTROL) == Cancel([*range(number)])
        for number in range(NUM_MESSAGES):
            run = transport.receive(source, Channel.DATA)
            rows = run.activations(5, torch.bfloat16)
            assert torch.equal(rows, torch.full((number + 1, 5), number + source, dtype=torch.bfloat16))
            assert structs.replace(run, hidden=None) == structs.replace(_run(number, source), hidden=None)
    assert all(transport.poll(source, Channel.DATA) is None for source in range(3))
    transport.gather(torch.zeros(1, 1), [1, 1, 1])  # no rank leaves before all have asked
    sent = sum(8 + len(encode(_run(number, rank))) for number in range(NUM_MESSAGES))
    assert transport.bytes_sent["RunOrder"] == 2 * sent, "to oneself nothing is sent"


def _run(number, rank):
    rows = torch.full((number + 1, 5), number + rank, dtype=torch.bfloat16)
    tokens, sees = [2**62] * (number + 1), bytes(number)
    return RunOrder(number, tokens, [*range(number + 1)], sees, 1, hidden=as_bytes(rows).numpy().data)


@matrix(
    "ending, line",
    [
        ("kill", "rank 2 is gone (connection closed)"),
        ("raise", "rank 2 ended: the disk is broken"),
        ("refuse", "rank 2: `ram` is too small"),
        ("lie", "rank 2 sent what cannot be: an order of 1073741825 bytes"),
        ("babble", "rank 2 sent what cannot be: Expected `int` >= 0"),
        ("leave", "rank 2 has ended"),
        ("exit", "rank 2 has ended"),
    ],
    daily=3,
)
def test_the_others_learn_within_seconds_why_a_rank_has_failed(ending, line):
    ranks = Ranks(3, _fail, ending)
    reports = ranks.reports()
    for rank in (0, 1):
        [(text, is_refusal, waited_s)] = reports[rank]
        assert text.startswith(line) and is_refusal == (ending == "refuse")
        assert waited_s < 20
    assert (ranks.by_rank[2].returncode == -signal.SIGKILL) == (ending == "kill")


def _fail(place, report, ending):
    """Rank 2 fails while rank 1 waits for an order of rank 0, which waits in an exchange, or for rank 2's lie."""
    try:
        with joined(place, SAME, "same", [], limit_s=30) as ranks:
            ranks.transport.broadcast(torch.zeros(1))
            began_s = time.monotonic()
            if place.rank == 2:
                _come_to_an_end(ranks.transport, ending)
            elif ending in ("lie", "babble"):
                ranks.transport.receive(2, Channel.RESULT)
            elif place.rank == 1:
                ranks.transport.receive(2 if ending in ("leave", "exit") else 0, Channel.DATA)
            else:
                ranks.transport.gather(torch.zeros(1, 1), [1, 1, 1])
    except (RankError, UserError, OSError) as error:
        if place.rank != 2:
            report((str(error), getattr(error, "is_refusal", None), time.monotonic() - began_s))


def _come_to_an_end(transport, ending):
    time.sleep(0.2)  # the others wait by now
    if ending == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "raise":
        raise OSError("the disk is broken")
    if ending == "refuse":
        raise UserError("`ram` is too small")
    if ending == "exit":
        raise SystemExit(0)
    content = torch.frombuffer(bytearray(msgpack.encode(["Commit", [-1]])), dtype=torch.uint8)
    lies = {"lie": [_size(MAX_BYTES + 1)], "babble": [_size(len(content)), content]}
    if ending in lies:
        for to in (0, 1):
            transport._send(to, Channel.RESULT, lies[ending])
        time.sleep(1)


def test_a_rank_that_stops_delays_and_one_that_stays_away_ends_it():
    ranks = Ranks(2, _wait_for_a_sleeper)
    for silent_s in (1.0, 60.0):
        while ranks.next_report() != (1, "asleep soon"):
            pass
        time.sleep(0.1)
        os.kill(ranks.by_rank[1].pid, signal.SIGSTOP)
        wake = threading.Timer(silent_s, os.kill, (ranks.by_rank[1].pid, signal.SIGCONT))
        wake.start()
        rank, (reason, waited_s) = ranks.next_report()
        if silent_s < 2:
            assert (rank, reason) == (0, "delayed") and 0.7 < waited_s < 5
        else:
            assert (rank, reason) == (0, "rank 1 has been silent for 5 s") and 4.3 < waited_s < 25
        wake.cancel()
    ranks.kill(1, 0)


def _wait_for_a_sleeper(place, report):
    with joined(place, SAME, "same", [], limit_s=30, exchange_limit_s=5) as ranks:
        for _ in range(2):
            ranks.transport.broadcast(torch.zeros(1))
            began_s = time.monotonic()
            if place.rank == 1:
                report("asleep soon")
                time.sleep(0.5)
                ranks.transport.send(0, Channel.DATA, Stop())
                continue
            try:
                ranks.transport.receive(1, Channel.DATA)
                report(("delayed", time.monotonic() - began_s))
            except RankError as error:
                report((str(error), time.monotonic() - began_s))


@matrix("rank", [0, 1], daily=1)
def test_a_rank_whose_work_stands_still_ends_all_with_a_line(rank):
    """The others tell it where it is rank 0, which what hangs there may keep from that."""
    reports = Ranks(2, _stand_still, rank).reports()
    line = "nothing was computed for 3 s: look at its disk and device"
    (reason, waited_s, is_silent), (own_report, *_) = reports[1 - rank][0], reports[rank][0]
    assert (reason, own_report) == (f"rank {rank} ended: {line}", f"rank {rank}: {line}") and 4.5 < waited_s < 25
    assert is_silent == (rank == 0)


def _stand_still(place, report, rank):
    """It goes on for two seconds, and then hangs; its threads send pulses all the time."""
    watch._LIMITS_IDLE = 1
    with joined(place, SAME, "same", [], limit_s=30, exchange_limit_s=3) as ranks:
        ranks.transport.broadcast(torch.zeros(1))
        began_s = time.monotonic()
        try:
            if place.rank == rank:
                for _ in range(20):
                    ranks.transport.note_work("stage", is_under_way=True)
                    ranks.transport.note_work("draft", is_under_way=False)
                    time.sleep(0.1)
                time.sleep(6)
                ranks.transport.send(1 - rank, Channel.DATA, Stop())
            ranks.transport.receive(rank, Channel.DATA)
        except RankError as error:
            report((str(error), time.monotonic() - began_s, error.is_head_silent))


def test_a_service_that_hangs_on_a_rank_that_stands_still_is_not_waited_for():
    is_over, transport = threading.Event(), SimpleNamespace(is_stalled=True)
    with serving([lambda: is_over.wait(60)], transport, HOST):
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 30
    is_over.set()


def test_ctrl_c_waits_until_an_exchange_is_over():
    assert Ranks(2, _interrupted).reports() == {0: ["whole, then interrupted"], 1: ["whole"]}


def _interrupted(place, report):
    with joined(place, SAME, "same", [], limit_s=30) as ranks:
        if place.rank == 0:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            time.sleep(1.0)
        rows = torch.full((2, 2), float(place.rank))
        try:
            rows = ranks.transport.broadcast(rows, source=1)
        except KeyboardInterrupt:
            report("whole, then interrupted" if rows.eq(1).all() else "broken off")
        else:
            report("whole")
        ranks.transport.broadcast(rows)


def test_a_loss_that_sigterm_tells_of_is_raised_where_it_is_heard():
    loss = RankError("rank 1 is gone")
    with pytest.raises(RankError, match="rank 1 is gone"), terminated_later(lambda: loss, is_head=True):
        _Deleted()
        time.sleep(5)


class _Deleted:
    """Is ended in a place where Python passes over what is raised."""

    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
