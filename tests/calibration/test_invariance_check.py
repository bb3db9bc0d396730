"""The check at load: it says so where no number of rows helps; and what a decoder then promises."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import set_json
from tiny import FAMILIES, Pair, build, save
from torch import Tensor
from torch.nn import functional

import offload
from offload.calibration.invariance import Invariance, make_invariant
from offload.checkpoint.open import open_checkpoint
from offload.model.invariant import BatchInvariantProducts
from offload.model.row_sizes import find_sizes
from offload.model.tree_model import TreeModel
from offload.sampling_options import Sampling
from offload.streaming.disk import DiskReader

linear = functional.linear
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def halves(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product, summed in another order."""
    middle = weight.shape[1] // 2
    rest = linear(rows[..., middle:], weight[:, middle:], bias)
    return linear(rows[..., :middle], weight[:, :middle]) + rest


def odd_rows_differ(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """By where they stand, which no number of rows mends."""
    out = linear(rows, weight, bias)
    out[..., 1::2, :] = halves(rows, weight, bias)[..., 1::2, :]
    return out


def threads_differ(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return (linear if torch.get_num_threads() == 1 else halves)(rows, weight, bias)


@pytest.fixture(scope="module")
def target(pair: Pair) -> Path:
    return pair[0]


def invariance_of(
    target: Path, thread_counts: tuple[int, ...] = (1,), *, dtype: str = "float32", context: int = 100
) -> Invariance:
    checkpoint = open_checkpoint(target)
    model, source = TreeModel(checkpoint, dtype), DiskReader(checkpoint.shards, rate_limit_bytes_per_s=None)
    try:
        model.bind_rest(source.fetch(model.rest_layout))
        return make_invariant(model, source.fetch, thread_counts, context)
    finally:
        source.close()
        model.close()


def plant(monkeypatch: pytest.MonkeyPatch, product: Product) -> None:
    """Let padded products be made so."""
    real = BatchInvariantProducts.linear

    def planted(self: BatchInvariantProducts, left: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr("offload.model.invariant.functional.linear", product)
            return real(self, left, weight, bias)

    monkeypatch.setattr(BatchInvariantProducts, "linear", planted)


@pytest.mark.parametrize(
    ("product", "counts", "said"), [(odd_rows_differ, (1,), "other bits"), (threads_differ, (1, 2), "2 threads")]
)
def test_products_that_no_padding_mends_are_refused(
    product: Product, counts: tuple[int, ...], said: str, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, product)
    invariance = invariance_of(target, counts)
    assert not invariance.holds and said in invariance.reason


def test_one_unpadded_product_is_seen(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's, say, while a product of few rows differs."""
    real = BatchInvariantProducts.linear

    def planted(self: BatchInvariantProducts, left: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.shape[0] == 199:
            return (linear if left.shape[-2] >= 4 else halves)(left, weight, bias)
        return real(self, left, weight, bias)

    monkeypatch.setattr(BatchInvariantProducts, "linear", planted)
    invariance = invariance_of(target)
    assert not invariance.holds and "than in parts" in invariance.reason


def test_scores_of_longer_texts_are_tried_at_load(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(multiply: Any, factor: Tensor, *args: Any, **options: Any) -> tuple[int, ...]:
        return () if factor.ndim > 2 and factor.shape[-1] == 512 else find_sizes(multiply, factor, *args, **options)

    monkeypatch.setattr("offload.model.path_attention.can_attend", lambda *_: False)  # it needs none
    monkeypatch.setattr("offload.model.invariant.find_sizes", planted)
    invariance = invariance_of(target)
    assert not invariance.holds and "each number of rows" in invariance.reason


def test_nothing_is_tried_while_a_text_grows(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything claimed once a product was refused all the same."""
    with offload.load(target, context=500, threads=1, invariant=True, dtype="bfloat16") as decoder:
        if not decoder.invariance.holds:
            pytest.skip(f"this processor: {decoder.invariance.reason}")
        monkeypatch.setattr("offload.model.invariant.find_sizes", lambda *_, **__: ())
        prompt = [5 + num % 90 for num in range(470)]
        assert decoder.generate(prompt, max_new_tokens=2).is_invariant
        assert decoder.generate(prompt, max_new_tokens=2, tree="none").is_invariant
        run = decoder.run(prompt[:4], Sampling(), max_new_tokens=2)
        decoder.invariance.rows.num_refused += 1
        list(run)
        assert not run.result().is_invariant and not decoder.arithmetic


def test_threads_that_are_named_may_hold_alone(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, threads_differ)
    monkeypatch.setattr("offload.calibration.invariance.num_cores", lambda: 2)
    with offload.load(target, context=64, threads=1, invariant=True) as decoder:
        if not invariance_of(target).holds:
            pytest.skip(f"this processor: {decoder.invariance.reason}")
        assert decoder.invariance.thread_counts == (1,) and not decoder.notes


@pytest.mark.parametrize("stated", [None, "64", [64], {}, 64.5])
def test_rotary_embeddings_that_depend_on_the_length_are_refused(stated: object, tmp_path: Path) -> None:
    """transformers looks at a stated length for other kinds of them alone, and so it comes as it stands."""
    config = FAMILIES["llama"]()
    config.max_position_embeddings = 64
    target = save(build(config), tmp_path)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    rope |= {} if stated is None else {"original_max_position_embeddings": stated}
    set_json(target / "config.json", rope_parameters=rope)
    if stated is None:
        usual = invariance_of(target, context=64)
        assert usual.holds or "length" not in usual.reason
    refused = invariance_of(target, context=65)
    assert not refused.holds and "length" in refused.reason


def test_a_decoder_says_what_it_promises(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with offload.load(target, context=64, threads=1) as decoder:
        assert not decoder.invariance.holds and "streamed" in decoder.invariance.reason
        assert not decoder.generate([5, 6, 7], max_new_tokens=2).is_invariant
    plant(monkeypatch, odd_rows_differ)
    with offload.load(target, context=64, threads=1, invariant=True) as decoder:
        assert not decoder.invariance.holds
        assert any("closer than rounding" in note for note in decoder.notes)


def test_a_refused_decoder_writes_as_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The family's attention is another one then; and a context shorter than the check's own text is no matter."""
    target = save(build(FAMILIES["gemma2"]()), tmp_path)
    with offload.load(target, context=10, threads=1, invariant=False) as decoder:
        wanted = decoder.generate([5, 6, 7], max_new_tokens=4).token_ids
    plant(monkeypatch, odd_rows_differ)
    with offload.load(target, context=10, threads=1, invariant=True) as decoder:
        assert not decoder.invariance.holds and torch.get_num_threads() == 1
        assert decoder.generate([5, 6, 7], max_new_tokens=4).token_ids == wanted
