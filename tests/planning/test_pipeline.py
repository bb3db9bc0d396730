"""`--pipeline` in words: each form is read, and any other text is refused with what it misses."""

import pytest

from offload.errors import UserError
from offload.rank_roles import PaperCut, PipelineOptions, free_rows, parse_pipeline


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("async", PipelineOptions()),
        (" Plain ", PipelineOptions(mode="plain")),
        ("sync,rows=128", PipelineOptions(mode="sync", micro_batch=128)),
        ("async,rows=8, runs=3", PipelineOptions(micro_batch=8, credits=3)),
        ("async,cut=0.3/0.4/0.01", PipelineOptions(cut=PaperCut(0.3, 0.4, 0.01))),
        ("async,cut=1/0/0", PipelineOptions(cut=PaperCut(1, 0, 0))),
        ("async,rows=1024,cut=0/1/0.001", PipelineOptions(micro_batch=1024, cut=PaperCut(0, 1, 0.001))),
        ("async,no-cancel,no-continuous", PipelineOptions(cancels=False, is_continuous=False)),
    ],
)
def test_forms_are_read(text: str, options: PipelineOptions) -> None:
    assert parse_pipeline(text) == options


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "plain, sync or async"),
        ("fast", "plain, sync or async"),
        ("async,fast", "settings, each once"),
        ("async,rows=4,rows=5", "settings, each once"),
        ("async,", "settings, each once"),
        ("async,rows=four", "rows of `pipeline` cannot be 'four'"),
        ("async,rows=" + "9" * 5000, "rows of `pipeline`"),
        ("async,rows=0", "rows of `pipeline` must be 1 to 1024"),
        ("sync,rows=1025", "rows of `pipeline` must be 1 to 1024"),
        ("async,runs=-1", "runs of `pipeline` must be 1 to 1024"),
        ("async,no-cancel=yes", "no-cancel of `pipeline` cannot be 'yes'"),
        ("async,cut=0.3", "cut of `pipeline` cannot be '0.3'"),
        ("async,cut=0.3/nan/0", r"must lie in \[0, 1\]"),
        ("async,cut=0.3/2/0", r"must lie in \[0, 1\]"),
        ("async,cut=0.3/0.4/1e-9", "decay of `pipeline` must be 0 or 0.001 at least, got 1e-09"),
        ("sync,runs=2", "runs of `pipeline` goes with async"),
        ("sync,no-cancel", "no-cancel of `pipeline` goes with async"),
        ("plain,no-continuous", "no-continuous of `pipeline` goes with async"),
        ("plain,rows=4", "rows of `pipeline` goes with sync or async"),
        ("plain,cut=0/0/0", "cut of `pipeline` goes with sync or async"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(text: str, what: str) -> None:
    with pytest.raises(UserError, match=what) as refusal:
        parse_pipeline(text)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400


def test_rows_are_free_as_long_as_a_pass_takes_hardly_longer() -> None:
    assert [free_rows(times) for times in ([1, 1, 1, 1, 1], [1, 1.1, 1.2, 2, 4], [1, 2], [1])] == [32, 4, 1, 1]


def test_numbers_follow_from_the_mode_where_none_are_named() -> None:
    assert [PipelineOptions(mode=mode).num_runs(3) for mode in ("plain", "sync", "async")] == [1, 1, 4]
    assert [PipelineOptions(mode=mode).num_rows(16) for mode in ("plain", "sync", "async")] == [1, 64, 16]
    assert parse_pipeline("async,rows=2,runs=9").num_rows(16) == 2
    assert parse_pipeline("async,rows=2,runs=9").num_runs(3) == 9
    assert not PipelineOptions(mode="plain").speculates
