"""How coded weights are expanded: by numba or Triton instead of plain torch.

Both are compared on words of the checkpoint's own layers. Invariant: a function is used only where
it has agreed with the reference at every coding of its kind.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload.calibration.trial import (
    ComparisonOutcome,
    KernelChoice,
    KernelComparison,
    choose,
    compare,
)
from offload.checkpoint.layout import SlabLayout
from offload.encoding.base import Coding
from offload.kernels.compiled import HAS_NUMBA
from offload.kernels.expansion import COMPILED, EXPANSION_KERNELS, REFERENCE, Expansion
from offload.kernels.jit import is_for_kernels
from offload.model.expanded import CodedWeight
from offload.model.tree_model import TreeModel
from offload.streaming.device import Device

# The figures by kind are in docs/quantised.md, made by `offload bench expansion`.
WITHOUT_NUMBA = (
    "weights are expanded with torch: pip install 'offload[fast]' makes that 2 to 25 times faster"
)
# weights of an example: with fewer, a thread's share may lack some branch; more take longer
_ENOUGH = 1 << 18


def choose_expansion(
    model: TreeModel,
    fetch: Callable[[SlabLayout], np.ndarray],
    device: Device,
) -> KernelChoice[Expansion]:
    """Compare expansions on words of the model's own layers, which are not bound yet.

    Args:
        fetch: reads the slab of a layer; it is not called where no weights are coded.
        device: where the model computes; a CPU does with as many threads as torch has now.
    """
    codings = _layer_of_codings(model)
    faster = _faster_expansion(model.torch_device)
    if not codings or faster is None:
        missed = bool(codings) and model.torch_device.type == "cpu"
        return KernelChoice(REFERENCE, notes=(WITHOUT_NUMBA,) if missed else ())
    outcomes = list[ComparisonOutcome]()
    for words in _examples(model, fetch, codings):
        outcomes += [compare(comparison, device) for comparison in _comparisons(words, faster)]
    return choose(REFERENCE, faster, outcomes, *_notes(outcomes))


def _faster_expansion(torch_device: torch.device) -> Expansion | None:
    """Return the faster functions that may replace the reference there, None if there are none."""
    if torch_device.type == "cpu":
        return COMPILED if HAS_NUMBA else None
    return EXPANSION_KERNELS if is_for_kernels(torch_device) else None


def _layer_of_codings(model: TreeModel) -> dict[Coding, int]:
    """Return every coding that layers have, with the first layer that has it."""
    layer_of = dict[Coding, int]()
    for layer in range(model.num_layers):
        layer_of = dict.fromkeys(model.codings_of(layer), layer) | layer_of
    return layer_of


def _examples(
    model: TreeModel, fetch: Callable[[SlabLayout], np.ndarray], codings: dict[Coding, int]
) -> Iterator[CodedWeight]:
    """Yield words of each coding, from its smallest weight that is large enough, or its largest."""
    for layer in sorted(set(codings.values())):
        words = model.coded_words(layer, fetch)
        for coding in [coding for coding, first in codings.items() if first == layer]:
            examples = sorted(
                (group for group in words if group.coding == coding),
                key=lambda group: group.num_weights,
            )
            yield next((group for group in examples if group.num_weights >= _ENOUGH), examples[-1])


def _comparisons(words: CodedWeight, faster: Expansion) -> Iterator[KernelComparison]:
    """Yield one comparison for each function that the coding calls."""
    out, wanted = (
        torch.empty(words.shape, dtype=words.dtype, device=words.stored_B.device) for _ in range(2)
    )
    for kind in _kinds(words, out):
        rival = REFERENCE._replace(**{kind: getattr(faster, kind)})
        run = partial(words.expand, out, rival)
        run_reference = partial(words.expand, wanted, REFERENCE)
        shape = f"{words.coding.name}, {' x '.join(map(str, words.shape))}"
        yield KernelComparison(
            kind, shape, run, run_reference, partial(_agree, run, run_reference, out, wanted)
        )


def _kinds(words: CodedWeight, out: Tensor) -> list[str]:
    called = dict[str, None]()

    def note(kind: str, *_: Any, **__: Any) -> None:
        called[kind] = None

    words.expand(out, Expansion(*(partial(note, kind) for kind in Expansion._fields)))
    return list(called)


def _agree(
    run: Callable[[], Any], run_reference: Callable[[], Any], out: Tensor, wanted: Tensor
) -> bool:
    """Return True if both outputs are bitwise equal; any NaN equals any NaN."""
    run()
    run_reference()
    bits = {2: torch.int16, 4: torch.int32}[out.element_size()]
    got, expected = (values.masked_fill(values.isnan(), 0).view(bits) for values in (out, wanted))
    return torch.equal(got, expected) and torch.equal(out.isnan(), wanted.isnan())


def _notes(outcomes: list[ComparisonOutcome]) -> Iterator[str]:
    """Yield a line about each kind whose faster function does not work."""
    for kind, reason in {
        outcome.kernel: outcome.reason for outcome in outcomes if outcome.reason
    }.items():
        yield f"{kind} weights are expanded with torch: the faster function is not used, for {reason}"
