"""How far two right answers may lie apart on any processor, and how far apart two tokens must lie to be told apart.

Products are summed in an order that depends on the number of rows, the threads and the instructions of the processor,
and logarithms differ in their last place: see tests/README.md for what is promised to the bit and what is not.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor

_EPS64 = torch.finfo(torch.float64).eps
# Two logarithms, each right to its last place. Gumbel noise crosses zero, where the error of the inner one stays.
LOGARITHMS = {"atol": 4 * _EPS64, "rtol": 4 * _EPS64}
# Of the largest logit: whole passes of the small models differ by some 1e-6 of it between orders of summation.
LEAST_GAP = 1e-5


def sums(wanted: Tensor, num_terms: int) -> dict[str, float]:
    """Tolerances of `assert_close` for sums of `num_terms` products of which `wanted` is one rounding.

    Each addition may be off by an epsilon of what has been summed so far, which the largest result stands for.
    """
    return {"atol": num_terms * torch.finfo(wanted.dtype).eps * float(wanted.abs().max()), "rtol": 0.0}


def beyond_doubt(logits_TV: Tensor) -> Tensor:
    """The best token of each row, where no rounding of float32 decides it: only such texts are compared as tokens."""
    best_T2 = logits_TV.topk(2).values
    gap = float((best_T2[:, 0] - best_T2[:, 1]).min() / logits_TV.abs().max())
    assert gap > LEAST_GAP, f"the two best lie {gap:.1e} of the scores apart: the processor decides, take another seed"
    return logits_TV.argmax(-1)


# Of the best score of a row: indices and routers of the small models move theirs by some 5e-7 of it.
LEAST_CHOICE_GAP = 5e-6


@contextmanager
def choices_beyond_doubt() -> Iterator[None]:
    """Meanwhile no rounding of float32 may decide which of some scores are the best: another choice is another text."""
    least = math.inf
    plain = {where: where.topk for where in (torch, Tensor)}

    def watched(scores: Tensor, k: int, dim: int = -1, *others: Any, topk: Any, **options: Any) -> Any:
        nonlocal least
        if scores.is_floating_point() and scores.shape[-1] > k and scores.device.type != "meta":
            best = topk(scores, k + 1, dim=-1).values.float()
            gap = (best[..., -2] - best[..., -1]) / best.abs().nan_to_num(posinf=0).amax(-1)
            least = min([least, *gap[best[..., -1] > -1e30].flatten().tolist()])
        return topk(scores, k, dim, *others, **options)

    torch.topk = lambda *rest, **options: watched(*rest, topk=plain[torch], **options)
    Tensor.topk = lambda *rest, **options: watched(*rest, topk=plain[Tensor], **options)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for where, topk in plain.items():
            where.topk = topk
    assert least > LEAST_CHOICE_GAP, f"a choice hangs on {least:.1e} of its scores: take another seed"


class Promise(Enum):
    """Why numbers that were computed twice must be equal to the bit; for no other reason are they compared so."""

    INVARIANT = "the arithmetic is invariant: a row's bits depend on its own path alone, on every processor"
    SAME_PRODUCTS = "one process multiplies the same shapes with as many threads, and weights are aligned alike"


def assert_same_bits(got: Tensor, wanted: Tensor, why: Promise, where: object = "") -> None:
    """Require equal shapes, types and numbers of what has been computed twice, and say why that is promised."""
    kinds = [(tensor.dtype, tuple(tensor.shape)) for tensor in (got, wanted)]
    assert kinds[0] == kinds[1], f"{where}: {kinds}"
    if not torch.equal(got, wanted):
        num_other = int((got != wanted).sum())
        most = float((got.double() - wanted.double()).abs().max())
        raise AssertionError(
            f"{where}: {num_other} of {got.numel()} numbers differ, by up to {most:.1e}, but {why.value}"
        )
