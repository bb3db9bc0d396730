"""Which runs a profile is looked for at all: none knows penalties, biases or min-p."""

import pytest
from tiny import FAMILIES, save_pair

from offload.checkpoint.safetensors import open_checkpoint
from offload.engine.resolve import ResolvedRun
from offload.errors import UserError
from offload.memory.planner import ModelFiles
from offload.planning.budget import budget_of
from offload.planning.load_options import LoadOptions
from offload.planning.selector import FindProfile
from offload.sampling_options import Sampling
from offload.trees.spec import parse_tree

UNKNOWN = [
    (Sampling(temperature=1, min_p=0.2), "min-p"),
    (Sampling(presence_penalty=1), "penalties or biases"),
    (Sampling(logit_bias={5: 1}), "penalties or biases"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return ModelFiles(*map(open_checkpoint, save_pair(FAMILIES["llama"](), tmp_path_factory.mktemp("pair"))))


def finder(files: ModelFiles, profile: str | None = None) -> FindProfile:
    options = LoadOptions(ram="1GiB")
    room = budget_of(options)
    object.__setattr__(options, "profile", profile)  # that there is such a file is another matter
    run = ResolvedRun(files=files, options=options, tree=parse_tree("auto"), device=None, budget=room)
    return run.profile_finder()


@pytest.mark.parametrize(("how", "words"), UNKNOWN, ids=str)
def test_one_that_was_found_is_passed_over(files: ModelFiles, how: Sampling, words: str) -> None:
    assert finder(files)(how, "match") == (None, f"no profile holds for a run with {words}")


@pytest.mark.parametrize(("how", "words"), UNKNOWN, ids=str)
def test_one_that_was_named_is_refused(files: ModelFiles, how: Sampling, words: str) -> None:
    with pytest.raises(UserError, match=f"with {words}, got `profile` .*: leave one of them out"):
        finder(files, "tuned.json")(how, "match")


@pytest.mark.parametrize("how", [Sampling(), Sampling(min_p=0.5), Sampling(temperature=0.6, top_k=5)], ids=str)
def test_others_are_looked_for(files: ModelFiles, how: Sampling) -> None:
    assert "no profile for this pair of models" in finder(files)(how, "match")[1]
