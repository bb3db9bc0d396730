"""Kernel selection: each kernel against its reference, at the sizes of the run's own models.

Triton compiles a kernel for every width, path length and temperature that is a constant of it;
all are compared, and so compiled, before the first step. The rival is the reference, except for
`match`, which draws on the few rows that a walk visits. Invariant: a kernel is used only where it
agrees with the reference at every shape; the bench times the very functions that a run compares.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from offload.calibration.kernel_shapes import VISITED, Shapes
from offload.calibration.trial import KernelChoice, KernelComparison, choose, compare
from offload.kernels.int4_blocks import WordLayout
from offload.kernels.kv_commit import MAX_ROWS
from offload.kernels.match_rows import match_rows_reference
from offload.kernels.multiply_int4 import multiply_int4_reference
from offload.kernels.path_attention import PathRows, ScoreTerms
from offload.kernels.registry import KERNELS, REFERENCES, KernelSet
from offload.kernels.rms_norm import rms_norm_reference
from offload.model.path_attention import path_attention, path_rows
from offload.streaming.device import Device
from offload.trees.token_tree import ancestors
from offload.trees.topology import k_ary

# rows that commits are rounded up to
_PATHS = tuple(1 << power for power in range(MAX_ROWS.bit_length()))
NO_KERNELS = KernelChoice(REFERENCES)


def choose_kernels(shapes: Shapes, device: Device) -> KernelChoice[KernelSet]:
    """Compare each kernel at each shape; return those that agree in place of their references."""
    outcomes = [
        compare(comparison, device) for comparison in comparisons(shapes, str(device.torch_device))
    ]
    return choose(REFERENCES, KERNELS, outcomes)


def comparisons(shapes: Shapes, device: str) -> Iterator[KernelComparison]:
    """Yield all comparisons, in the order of a step."""
    yield from _draws(shapes, device)
    yield from _norms(shapes, device)
    yield from _attention(shapes, device)
    yield from _matches(shapes, device)
    yield from _commits(shapes, device)
    yield from _products(shapes, device)


def _random(device: str, *shape: int) -> Tensor:
    """Return random numbers from a generator of its own: the caller's stays as it is."""
    return torch.randn(*shape, device=device, generator=torch.Generator(device).manual_seed(0))


def _draws(shapes: Shapes, device: str) -> Iterator[KernelComparison]:
    for vocab_size in shapes.vocab_sizes:
        yield _equal("keyed_gumbel", f"V {vocab_size}", (3, 1000, vocab_size, device))
        for num_rows in shapes.level_sizes:
            probs_WV = _random(device, num_rows, vocab_size).mul_(3).softmax(1)
            shape = f"W {num_rows}, V {vocab_size}, 16 draws"
            yield _equal("draw_without_replacement", shape, (probs_WV, 16, 3, 0))


def _equal(name: str, shape: str, arguments: tuple[Any, ...]) -> KernelComparison:
    run = partial(getattr(KERNELS, name), *arguments)
    run_reference = partial(getattr(REFERENCES, name), *arguments)

    def agrees() -> bool:
        got = run()
        wanted = run_reference()
        if got.dtype == torch.int64:
            return torch.equal(got, wanted)
        # logarithms of one device may differ in the last place
        return torch.allclose(got, wanted, rtol=1e-13, atol=1e-13)

    return KernelComparison(name, shape, run, run_reference, agrees)


def _alike(
    name: str,
    shape: str,
    reference: Callable[..., Tensor],
    arguments: tuple[Any, ...],
    last: Tensor,
    *,
    rtol: float,
    atol: float,
) -> KernelComparison:
    """Compare a kernel that rounds differently, but gives a row the same bits beside others as alone.

    Args:
        arguments: of both functions; the first has the rows.
        last: the last of these rows by itself.
    """
    kernel = getattr(KERNELS, name)

    def agrees() -> bool:
        together = kernel(*arguments)
        is_close = torch.allclose(together, reference(*arguments), rtol=rtol, atol=atol)
        return is_close and torch.equal(kernel(last, *arguments[1:]), together[-1:])

    return KernelComparison(
        name, shape, partial(kernel, *arguments), partial(reference, *arguments), agrees
    )


def _norms(shapes: Shapes, device: str) -> Iterator[KernelComparison]:
    for (width, form, dtype, has_weight), num_rows in product(shapes.norms, shapes.num_nodes):
        weight_D = _random(device, width).to(dtype) if has_weight else None
        row_TD = _random(device, num_rows, width).to(dtype)
        arguments = (row_TD, weight_D, 1e-6, form)
        # one number in a few hundred is rounded the other way
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        tolerances = {"rtol": tolerance, "atol": tolerance}
        shape = f"N {num_rows}, D {width}"
        yield _alike("rms_norm", shape, rms_norm_reference, arguments, row_TD[-1:], **tolerances)


def _attention(shapes: Shapes, device: str) -> Iterator[KernelComparison]:
    for heads, num_nodes, num_prefix in product(shapes.heads, shapes.num_nodes, shapes.num_prefix):
        rows = path_rows(
            num_prefix, ancestors(k_ary(2, num_nodes)), path_attention, lambda walk: walk.to(device)
        )
        random = partial(_random, device)
        query_THK = random(num_nodes, heads.num_heads, heads.width).to(heads.dtype)
        query_HTK = query_THK.transpose(0, 1)
        states = [
            random(heads.num_groups, num_prefix + num_nodes, width).to(heads.dtype)
            for width in (heads.width, heads.value_width)
        ]
        sink_H = random(heads.num_heads).to(heads.dtype) if heads.has_sinks else None
        terms = ScoreTerms(heads.width**-0.5, heads.cap, sink_H)
        tolerances = {"rtol": 1e-5, "atol": 1e-3 if heads.dtype == torch.float32 else 2e-2}
        groups = f"{heads.num_heads}/{heads.num_groups} x {heads.width}"
        for window in heads.windows:
            arguments = (query_HTK, *states, PathRows(rows.walk_TL, window, path_attention), terms)
            shape = f"N {num_nodes}, P {num_prefix}, {groups}"
            shape += f", window {window}" if window else ""
            yield _alike(
                "path_attention", shape, path_attention, arguments, query_HTK[:, -1:], **tolerances
            )


def _matches(shapes: Shapes, device: str) -> Iterator[KernelComparison]:
    for vocab_size in shapes.vocab_sizes:
        for num_rows, temperature in product(shapes.num_scored, shapes.temperatures):
            logits_CV = _random(device, num_rows, vocab_size).mul_(3).to(shapes.heads[0].dtype)
            yield _one_match(logits_CV, temperature)


def _one_match(logits_CV: Tensor, temperature: float) -> KernelComparison:
    num_rows, vocab_size = logits_CV.shape
    position_C = torch.arange(num_rows, device=logits_CV.device) // 3 + 500

    def draw(
        which: Callable[..., Tensor], num_drawn: int = num_rows, at: float = temperature
    ) -> Tensor:
        return which(logits_CV[:num_drawn], position_C[:num_drawn], 5, temperature=at)

    kernel = KERNELS.match_rows
    assert kernel is not None, "there is a kernel to compare"

    def rival() -> list[int]:
        return [int(draw(match_rows_reference, 1)) for _ in range(min(VISITED, num_rows))]

    def agrees() -> bool:
        with_and_without_noise = (temperature or 1.0, 0.0)
        got, wanted = (
            [draw(implementation, at=at) for at in with_and_without_noise]
            for implementation in (kernel, match_rows_reference)
        )
        return all(map(torch.equal, got, wanted))

    shape = f"N {num_rows}, V {vocab_size}, T {temperature}"
    return KernelComparison("match_rows", shape, lambda: draw(kernel).tolist(), rival, agrees)


def _commits(shapes: Shapes, device: str) -> Iterator[KernelComparison]:
    first = shapes.heads[0]
    size = (1, first.num_groups, shapes.num_slots, first.width)
    buffers = [_random(device, *size).to(first.dtype) for _ in range(2 * shapes.num_layers)]
    agree = cache(partial(_commits_agree, shapes, device))
    for num_rows in shapes.path_lengths:
        arguments = (buffers, shapes.num_slots // 2, torch.arange(num_rows, device=device) * 2)
        run, rival = (partial(kernels.kv_commit, *arguments) for kernels in (KERNELS, REFERENCES))
        yield KernelComparison("kv_commit", f"A {num_rows}", run, rival, agree)


def _commits_agree(shapes: Shapes, device: str) -> bool:
    """Return True if paths of all compiled lengths move alike in the caches of both models."""
    agree = list[bool]()
    for heads, num_rows in product(shapes.heads, _PATHS):
        wanted = [
            *_random(device, 4, 1, heads.num_groups, MAX_ROWS + 8, heads.width).to(heads.dtype)
        ]
        got = [buffer.clone() for buffer in wanted]
        row_A = torch.arange(num_rows, device=device) + 1
        REFERENCES.kv_commit(wanted, 1, row_A)
        KERNELS.kv_commit(got, 1, row_A)
        agree += map(torch.equal, got, wanted)
    return all(agree)


def _products(shapes: Shapes, device: str) -> Iterator[KernelComparison]:
    for held, num_rows in product(shapes.int4_shapes, shapes.num_drafted):
        num_columns, width, group, block_rows, dtype = held
        chance = torch.Generator(device).manual_seed(0)
        size = (num_columns, width // 2)
        word_NK = torch.randint(256, size, generator=chance, device=device, dtype=torch.uint8)
        scale_GN2 = _random(device, width // group, num_columns, 2)
        # so that products are about 1
        scale_GN2 = scale_GN2.mul_(0.2 * width**-0.5).to(dtype)
        row_MK = _random(device, num_rows, width).to(dtype)
        layout = WordLayout(block_rows, has_product=False)
        arguments = (row_MK, word_NK, scale_GN2, layout)
        shape = f"M {num_rows}, {num_columns} x {width}, groups of {group}"
        yield _alike(
            "multiply_int4",
            shape,
            multiply_int4_reference,
            arguments,
            row_MK[-1:],
            rtol=2e-2,
            atol=2e-2,
        )
