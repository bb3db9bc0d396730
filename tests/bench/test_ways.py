"""The packaged MTP layer and block guess what they were trained to guess, and shares are of the figures beside them."""

import pytest
from torch import Tensor

from offload.bench.harness.setting import PROMPT_TOKENS
from offload.bench.harness.tables import Row
from offload.bench.pairs import block_pair, mtp_pair
from offload.bench.pairs.training import held_out_texts, library_ids
from offload.bench.pairs.ways import Share, figures_of
from offload.checkpoint.packaged import PAIR


@pytest.fixture(scope="module")
def prompts() -> Tensor:
    return held_out_texts(library_ids(held_out=True), PROMPT_TOKENS, 3)


def test_the_packaged_layer_guesses_as_much_as_the_small_draft(prompts: Tensor) -> None:
    small_or_carried = {name: mtp_pair.WAYS[name] for name in (mtp_pair.SMALL, mtp_pair.CARRIED)}
    row = figures_of(PAIR / "target", small_or_carried, prompts, 0.0, 48)
    share, _ = mtp_pair.SHARES
    assert share.value(row) >= share.wanted
    assert all(figure > 0 for figure in row.values())


def test_the_packaged_block_guesses_more_where_it_knows_the_draws(prompts: Tensor) -> None:
    row = figures_of(PAIR / "target", block_pair.WAYS, prompts, 1.0, 48)
    share, drafting = block_pair.SHARES
    assert share.value(row) > 1.1
    assert drafting.value(row) < 1, "one pass in place of one a level"


def test_a_share_is_of_the_best_of_the_others() -> None:
    row: Row = {"a_tokens": 6.0, "b_tokens": 4.0, "c_tokens": 3.0, "a_drafting": 1.0, "b_drafting": 4.0}
    assert Share("", "a", ["c", "b"], 0, "higher").value(row) == 1.5
    assert Share("", "a", ["b"], 0, "lower", figure="drafting").value(row) == 0.25
