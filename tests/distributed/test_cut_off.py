"""Both rules of cut-off, by hand."""

import pytest

from offload.distributed.head import CutOff, Least
from offload.rank_roles import PaperCut


def test_a_row_has_to_be_worth_its_time() -> None:
    price = CutOff(row_s=0.002)
    assert price.least(token_s=0) == Least(0.0, 0.0), "nothing is known yet"
    assert price.least(token_s=0.1) == Least(0.02, 0.0)
    assert price.least(token_s=0.001) == Least(1.0, 0.0), "only what is certain"
    assert not price.failed()


def test_the_papers_cut_rises_with_every_batch_falls_with_failures_and_is_reset_by_acceptance() -> None:
    cut = CutOff(0.0, PaperCut(start=0.3, recovery=0.4, decay=0.25))
    found = [cut.least(1.0).p]
    cut.speculated()
    found.append(cut.least(1.0).p)
    assert cut.failed()
    found.append(cut.least(1.0).p)
    cut.accepted()
    assert [*found, cut.least(1.0).p] == pytest.approx([0.3, 0.7, 0.45, 0.3])
    assert cut.least(1.0).f == 0


def test_attempts_end_where_anything_would_do() -> None:
    cut = CutOff(0.0, PaperCut(start=0.5, recovery=0.0, decay=0.125))
    assert [cut.failed() for _ in range(6)] == [True, True, True, True, False, False]
    assert cut.least(1.0).p == 0
    assert not CutOff(0.0, PaperCut(0.3, 0.4, 0.0)).failed(), "a cut that never falls needs no other attempt"
