"""Which functions expand a model's weights: what agrees on words of its own, and nothing that gives other bits."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from passes import text_scores
from rounding import Promise, assert_same_bits
from stored import plain, quantised
from torch import Tensor

from offload.calibration import expansions as expansion_choice
from offload.calibration.expansions import WITHOUT_NUMBA, KernelChoice, choose_expansion
from offload.checkpoint.open import open_checkpoint
from offload.engine.build import open_model, resident_model
from offload.kernels.expansion import COMPILED, EXPANSION_KERNELS, REFERENCE
from offload.model.tree_model import TreeModel
from offload.streaming.device import HOST
from offload.streaming.disk import DiskReader

KINDS = {"fp8-block": "float8", "ct-w4": "integers", "awq": "columns", "nf4": "codebook"}


class Opened:
    """A quantised model without its layers, which can be read."""

    def __init__(self, folder: Path, recipe: str | None, family: str = "llama") -> None:
        self.directory = (quantised(recipe, family) if recipe else plain(family))(folder / "model")
        checkpoint = open_checkpoint(self.directory)
        self.model: TreeModel = open_model(checkpoint, "bfloat16")
        self.reader = DiskReader(checkpoint.shards, stamps=checkpoint.stamps)
        self.model.read_rest(self.reader.fetch)
        self.layers = list[int]()

    def fetch(self, layout: Any) -> Any:
        self.layers.append(self.model.layer_layouts.index(layout))
        return self.reader.fetch(layout)

    def choose(self) -> KernelChoice:
        with closing(self.reader):
            return choose_expansion(self.model, self.fetch, HOST)


@pytest.mark.parametrize("recipe", KINDS)
def test_what_agrees_is_used_for_the_kinds_that_the_model_has(recipe: str, tmp_path: Path) -> None:
    opened = Opened(tmp_path, recipe)
    chosen = opened.choose()
    assert chosen.kernels == REFERENCE._replace(**{KINDS[recipe]: getattr(COMPILED, KINDS[recipe])})
    assert opened.layers == [0] and chosen.notes == ()
    assert {comparison.kernel for comparison in chosen.comparisons} == {KINDS[recipe]}
    assert not any(comparison.reason for comparison in chosen.comparisons)


def test_one_bit_is_one_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def almost(weight_NK: Tensor, scale_AB: Tensor, block: tuple[int, int], out_NK: Tensor, *form: bool) -> None:
        REFERENCE.float8(weight_NK, scale_AB, block, out_NK, *form)
        out_NK.view(torch.int16)[-1, -1] ^= 1

    monkeypatch.setattr(expansion_choice, "COMPILED", COMPILED._replace(float8=almost))
    chosen = Opened(tmp_path, "fp8-block").choose()
    assert chosen.kernels == REFERENCE
    (note,) = chosen.notes
    assert note == "float8 weights are expanded with torch: the faster function is not used, for its results differ"


def test_what_cannot_be_compiled_here_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ImportError("Numba needs NumPy 2.4 or less")

    monkeypatch.setattr(expansion_choice, "COMPILED", COMPILED._replace(float8=refuse))
    chosen = Opened(tmp_path, "fp8-block").choose()
    assert chosen.kernels == REFERENCE
    assert chosen.notes[0].endswith("is not used, for ImportError: Numba needs NumPy 2.4 or less")


def test_nothing_is_read_of_plain_models(tmp_path: Path) -> None:
    opened = Opened(tmp_path, None)
    assert opened.choose() == KernelChoice(REFERENCE)
    assert opened.layers == []


def test_what_is_missing_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expansion_choice, "HAS_NUMBA", False)
    opened = Opened(tmp_path, "fp8-block")
    chosen = opened.choose()
    assert (chosen.kernels, chosen.notes, opened.layers) == (REFERENCE, (WITHOUT_NUMBA,), [])
    assert "pip install 'offload[fast]'" in WITHOUT_NUMBA


def test_on_a_gpu_kernels_of_triton_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    place = torch.device("cuda")
    monkeypatch.setattr(expansion_choice, "is_for_kernels", lambda place: True)
    assert expansion_choice._faster_expansion(place) is EXPANSION_KERNELS
    monkeypatch.setattr(expansion_choice, "is_for_kernels", lambda place: False)
    assert expansion_choice._faster_expansion(place) is None


@pytest.mark.parametrize("recipe", KINDS)
def test_a_model_computes_the_same_with_either(recipe: str, tmp_path: Path) -> None:
    model = resident_model(open_checkpoint(Opened(tmp_path, recipe, "qwen2").directory), "float32")
    wanted_TV = text_scores(model, torch.arange(7))
    model.set_expansion(COMPILED)
    assert_same_bits(text_scores(model, torch.arange(7)), wanted_TV, Promise.SAME_PRODUCTS)

    def lose(*args: Any, **_: Any) -> None:
        [*_, out] = (arg for arg in args if isinstance(arg, Tensor))
        out.zero_()

    lost = COMPILED._replace(**{KINDS[recipe]: lose})
    model.set_expansion(lost)
    assert not torch.equal(text_scores(model, torch.arange(7)), wanted_TV), "it is these functions that a pass calls"


def test_a_weight_is_tried_that_is_large_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Opened(tmp_path, "fp8-block")
    codings = expansion_choice._layer_of_codings(opened.model)
    sizes = sorted({words.num_weights for words in opened.model.coded_words(0, opened.reader.fetch)})
    for enough, wanted in ((1, sizes[0]), (sizes[0] + 1, sizes[1]), (1 << 40, sizes[-1])):
        monkeypatch.setattr(expansion_choice, "_ENOUGH", enough)
        (words,) = expansion_choice._examples(opened.model, opened.reader.fetch, codings)
        assert words.num_weights == wanted
    opened.reader.close()
