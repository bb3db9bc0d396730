"""The table of planted mistakes fits the program as it is; `make planted` plants them, in half an hour."""

import pytest
from planted.mistakes import ROOT, Mistake, read_mistakes

MISTAKES = read_mistakes()


def test_there_are_forty_promises_and_a_place_that_is_gone_is_told() -> None:
    assert len({mistake.promise for mistake in MISTAKES}) == len(MISTAKES) >= 40
    # A place that is gone or not the only one is told.
    for source in ("", "right right"):
        with pytest.raises(ValueError, match="times, not once"):
            Mistake("", "a.py", (), "right", "wrong").plant(source)


@pytest.mark.always
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.promise)
def test_a_mistake_has_one_place_and_tests_that_ought_to_see_it(mistake: Mistake) -> None:
    source = (ROOT / mistake.file).read_text(encoding="utf-8")
    assert mistake.plant(source) != source
    assert mistake.tests and all((ROOT / test).exists() for test in mistake.tests)
    for case in mistake.cases:
        file, _, function = case.partition("[")[0].partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), case
