"""What `offload plan` says of models of which only a config.json is here, and of pairs that cannot be one."""

import json
from pathlib import Path

import pytest
from tiny import FAMILIES, build, save, save_tokenizer

import offload
from offload.engine.request import Request
from offload.errors import UserError
from offload.planning.load_options import LoadOptions
from offload.reports.estimate import estimate

OPTIONS = LoadOptions(ram="1GiB", device="cpu")
pytestmark = pytest.mark.usefixtures("_instant_link")


IMPOSSIBLE = [("num_hidden_layers", 2 * 10**6), ("num_hidden_layers", 10**12), ("head_dim", "16"), ("head_dim", [16]),
              ("num_key_value_heads", "2"), ("num_key_value_heads", [2]), ("hidden_size", 10**30)]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_sizes_that_are_none_are_refused_at_once(family: str, name: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[family]().to_dict() | {name: value}))
    with pytest.raises(
        UserError, match=f"{name} (in config.json )?must be a whole number|model type mixtral is not supported"
    ):
        estimate(str(tmp_path / "config.json"), None, OPTIONS)


def test_a_pair_of_two_vocabularies_is_refused(tmp_path: Path) -> None:
    models = [save(build(FAMILIES["llama"]()), tmp_path / name) for name in ("target", "draft")]
    for model, piece in zip(models, (" one", " un"), strict=True):
        save_tokenizer(model, [piece])
    with pytest.raises(UserError, match="draft must share the target's vocabulary, draft has 199 entries"):
        estimate(*map(str, models), OPTIONS)
    save_tokenizer(models[1], [" one"])
    estimate(*map(str, models), OPTIONS)


def test_nobody_is_told_to_raise_a_context_that_is_the_longest(tmp_path: Path) -> None:
    model, request = save(build(FAMILIES["llama"]()), tmp_path), Request([5] * 512)
    with pytest.raises(UserError, match="context of 512, the longest that this model was made for: shorten the prompt"):
        offload.load(model, ram="1GiB", threads=1, request=request)
    with pytest.raises(UserError, match="context of 511: raise `context`, shorten the prompt"):
        offload.load(model, ram="1GiB", threads=1, context=511, request=request)
