"""What drafters learn for kinds of sampling that a server's clients choose freely: it stays bounded."""

from offload.drafting.base import MOST_KINDS, ByKind
from offload.drafting.lookup import SourceWeightsByKind
from offload.sampling.sampler import Sampler
from offload.units import Sampling


def test_kinds_that_nobody_asks_for_any_more_go_first() -> None:
    known = ByKind[int, list[int]](list)
    known[-1].append(7)
    for kind in range(3 * MOST_KINDS):
        known[kind].append(kind)
        assert known[-1] == [7], "what is asked for all the time stays"
    assert len(known) == MOST_KINDS and known[0] == []


def test_trust_is_kept_for_few_kinds() -> None:
    trusts = SourceWeightsByKind()
    for index in range(2 * MOST_KINDS):
        trusts.of(Sampler(Sampling(temperature=0.5 + index / 1000), 10))
    assert len(trusts._known) == MOST_KINDS
