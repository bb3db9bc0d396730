"""How the coded weights of a model are expanded: by numba's functions or Triton's, or where these fail by plain torch.

Each kind of words that the checkpoint has is tried on words of its own, where they are expanded later. Invariant: a
function is used only where it has given the bits of the reference for every coding of its kind.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload.calibration.kernel_comparison import Comparison, Outcome, compare, used
from offload.checkpoint.layout import SlabLayout
from offload.encoding.base import Coding
from offload.kernels.compiled import HAS_NUMBA
from offload.kernels.expansion import COMPILED, KERNELS, REFERENCE, Expansion
from offload.kernels.jit import is_for_kernels
from offload.model.expanded import CodedWeight
from offload.model.weights import StreamedModel
from offload.streaming.device import Device

# By kind: docs/quantised.md, bench/studies/expansion.py.
WITHOUT_NUMBA = "weights are expanded with torch: pip install 'offload[fast]' makes that 2 to 25 times faster"
_ENOUGH = 1 << 18  # numbers: with less a thread's share may lack the cases that code has, more takes long


class ExpansionChoice(NamedTuple):
    """What a model takes, and why."""

    expansion: Expansion = REFERENCE
    comparisons: tuple[Outcome, ...] = ()  # one for each kind and coding
    notes: tuple[str, ...] = ()  # for the user


def choose_expansion(
    model: StreamedModel,
    fetch: Callable[[SlabLayout], np.ndarray],
    device: Device | None,
) -> ExpansionChoice:
    """Compare on words of the model's own layers, which are not bound yet; nothing is read where none are coded.

    Args:
        fetch: reads the slab of a layer.
        device: that the model computes on; None is the CPU, with as many threads as torch has now.
    """
    codings = _layer_of_codings(model)
    rivals = _rivals(model.place)
    if not codings or rivals is None:
        missed = bool(codings) and model.place.type == "cpu"
        return ExpansionChoice(notes=(WITHOUT_NUMBA,) if missed else ())
    outcomes = list[Outcome]()
    for words in _examples(model, fetch, codings):
        outcomes += [compare(one, device) for one in _comparisons(words, rivals)]
    agreeing = {kind: getattr(rivals, kind) for kind, is_used in used(outcomes).items() if is_used}
    return ExpansionChoice(REFERENCE._replace(**agreeing), tuple(outcomes), tuple(_notes(outcomes)))


def _rivals(place: torch.device) -> Expansion | None:
    """Of the reference there; None where there are none."""
    if place.type == "cpu":
        return COMPILED if HAS_NUMBA else None
    return KERNELS if is_for_kernels(place) else None


def _layer_of_codings(model: StreamedModel) -> dict[Coding, int]:
    """All that layers have, with the first layer of each."""
    found = dict[Coding, int]()
    for layer in range(model.num_layers):
        found = dict.fromkeys(model.codings_of(layer), layer) | found
    return found


def _examples(
    model: StreamedModel, fetch: Callable[[SlabLayout], np.ndarray], codings: dict[Coding, int]
) -> Iterator[CodedWeight]:
    """Words of each coding, of the smallest weight that is large enough or else of the largest."""
    for layer in sorted(set(codings.values())):
        words = model.coded_words(layer, fetch)
        for coding in [coding for coding, first in codings.items() if first == layer]:
            own = sorted((one for one in words if one.coding == coding), key=lambda one: one.num_weights)
            yield next((one for one in own if one.num_weights >= _ENOUGH), own[-1])


def _comparisons(words: CodedWeight, rivals: Expansion) -> Iterator[Comparison]:
    """One for each function that the coding calls."""
    out, wanted = (torch.empty(words.shape, dtype=words.dtype, device=words.stored_B.device) for _ in range(2))
    for kind in _kinds(words, out):
        rival = REFERENCE._replace(**{kind: getattr(rivals, kind)})
        run, run_reference = (partial(words.expand, into, how) for into, how in ((out, rival), (wanted, REFERENCE)))
        shape = f"{words.coding.name}, {' x '.join(map(str, words.shape))}"
        yield Comparison(kind, shape, run, run_reference, partial(_agree, run, run_reference, out, wanted))


def _kinds(words: CodedWeight, out: Tensor) -> list[str]:
    called = dict[str, None]()

    def note(kind: str, *_: Any, **__: Any) -> None:
        called[kind] = None

    words.expand(out, Expansion(*(partial(note, kind) for kind in Expansion._fields)))
    return list(called)


def _agree(run: Callable[[], Any], run_reference: Callable[[], Any], out: Tensor, wanted: Tensor) -> bool:
    """To the bit; NaN has many."""
    run()
    run_reference()
    bits = {2: torch.int16, 4: torch.int32}[out.element_size()]
    got, expected = (one.masked_fill(one.isnan(), 0).view(bits) for one in (out, wanted))
    return torch.equal(got, expected) and torch.equal(out.isnan(), wanted.isnan())


def _notes(outcomes: list[Outcome]) -> Iterator[str]:
    """Of what does not work, once for each kind."""
    for kind, reason in {one.kernel: one.reason for one in outcomes if one.reason}.items():
        yield f"{kind} weights are expanded with torch: the faster function is not used, for {reason}"
