"""The comparisons of a run: each kernel at the run's own sizes, against the best that runs without it.

The rival is the reference, except where something better would run: attention has its mask built beforehand, as for a
whole pass, and `match` draws on the few rows that a walk visits. Triton compiles a kernel anew for every prefix, path
length and temperature that is a constant of its; all are compared, and so compiled, before anything is timed.
Invariant: a bench and the start of a run compare the same functions; only the sizes differ.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offload.calibration.kernel_comparison import Comparison, Outcome, Timer, fight, verdicts
from offload.checkpoint.sizes import config_sizes, head_dim
from offload.config import Sampling
from offload.kernels.kv_commit import MAX_ROWS
from offload.kernels.match_rows import match_rows_reference
from offload.kernels.registry import KERNELS, REFERENCES, KernelSet
from offload.kernels.tree_attention import MAX_WIDTH
from offload.memory.plan import MemoryPlan
from offload.model.attention import TreeRows, folded_attention, is_for_rows, tree_mask, tree_rows
from offload.model.weights import StreamedModel
from offload.streaming.device import Device
from offload.tree.token_tree import ancestors
from offload.tree.topology import k_ary

_CACHE_BYTES = 64 << 20  # written before each run: in a sweep a layer's weights have gone through the cache
_NUM_ROUNDS = 7
_MAX_PREFIX = 4096  # positions: which side is faster shows here, and takes little memory
_NUM_SLOTS = 64  # a commit of a path touches no more of them
_FEW_NODES = 64  # a run may ask for a smaller tree than memory was planned for
VISITED = 7  # rows that a walk looks at in a step that yields seven tokens
_SPLITS = (1, 2)  # one piece of the keys is written as it is, several are merged: other code, taken as a prefix grows
_PATHS = tuple(1 << power for power in range(MAX_ROWS.bit_length()))  # rows that commits are rounded up to


class Shapes(NamedTuple):
    """What is measured; the defaults are a 70B model's."""

    num_heads: int = 64
    num_groups: int = 8
    width: int = 128
    num_layers: int = 80
    num_slots: int = 2048
    num_nodes: tuple[int, ...] = (1, 16, 64, 256, 1024)
    num_scored: tuple[int, ...] = (1, 16, 64, 128)  # rows whose logits are there at once
    num_prefix: tuple[int, ...] = (128, 1024, 4096)
    vocab_sizes: tuple[int, ...] = (32_000, 128_256)
    temperatures: tuple[float, ...] = (0.0, 0.7)
    level_sizes: tuple[int, ...] = (1, 32)  # nodes whose children are drawn together
    path_lengths: tuple[int, ...] = (2, 6, 20)
    windows: tuple[int | None, ...] = (None,)  # none at all: attention is not compared, and keeps dense masks
    dtype: torch.dtype = torch.bfloat16
    caches: tuple[tuple[int, torch.dtype], ...] = ((128, torch.bfloat16),)  # width of heads and type, of both models


def shapes_of(model: StreamedModel, plan: MemoryPlan, sampling: Sampling, draft: StreamedModel | None = None) -> Shapes:
    """This model, the tree that memory was planned for and a small one, half of the context written."""
    sizes = config_sizes(model.checkpoint)
    num_heads, width = sizes.get("num_attention_heads", 1), head_dim(sizes)
    num_nodes = plan.num_nodes if plan.num_nodes > 1 else plan.max_prompt_rows
    models = [one for one in (model, draft) if one is not None]
    # Who names a width for values (latent attention) has queries of another, and the comparison knows one width only.
    takes_bits = is_for_rows(model.meta_model.config) and width <= MAX_WIDTH and "v_head_dim" not in sizes
    return Shapes(
        num_heads=num_heads,
        num_groups=sizes.get("num_key_value_heads", num_heads),
        width=width,
        num_layers=model.num_layers,
        num_slots=_NUM_SLOTS,
        num_nodes=tuple(sorted({min(_FEW_NODES, num_nodes), num_nodes})),
        num_scored=(plan.num_logits_rows,),
        num_prefix=(min(plan.context // 2, _MAX_PREFIX),),
        vocab_sizes=(model.vocab_size,),
        temperatures=(sampling.temperature,),
        level_sizes=(min(32, plan.num_nodes),),
        path_lengths=(VISITED,),
        windows=tuple(model.windows) if takes_bits else (),
        dtype=model.dtype,
        caches=tuple({(head_dim(config_sizes(one.checkpoint)), one.dtype): None for one in models}),
    )


class KernelChoice(NamedTuple):
    """What a run takes, and why."""

    kernels: KernelSet
    comparisons: tuple[Outcome, ...]  # none on a CPU, where no kernel runs


NO_KERNELS = KernelChoice(REFERENCES, ())


def choose_kernels(
    shapes: Shapes, device: Device, timer: Timer | None = None, on_outcome: Callable[[Outcome], None] = lambda _: None
) -> KernelChoice:
    """Compare each kernel once per shape; those that win take the place of what runs without them."""
    timer = timer or device_timer(device)

    def settle() -> None:
        device.synchronize(device.record(device.compute))

    outcomes = list[Outcome]()
    for comparison in comparisons(shapes, str(device.place)):
        outcomes.append(fight(comparison, timer, settle))
        on_outcome(outcomes[-1])
    winners = {kernel: getattr(KERNELS, kernel) for kernel, found in verdicts(outcomes).items() if found.beats_rival}
    return KernelChoice(REFERENCES._replace(**winners), tuple(outcomes))


def comparisons(shapes: Shapes, device: str) -> Iterator[Comparison]:
    """All of them, in the order of a step."""
    yield from _draws(shapes, device)
    yield from _attention(shapes, device)
    yield from _matches(shapes, device)
    yield from _commits(shapes, device)


def device_timer(device: Device) -> Timer:
    """Medians of runs with a cold cache, launches included, by events of the compute stream."""
    scratch = device.allocate(_CACHE_BYTES)

    def once(work: Callable[[], Any]) -> float:
        device.fill(scratch, 0, device.compute)
        before = device.record(device.compute, is_timed=True)
        work()
        after = device.record(device.compute, is_timed=True)
        device.synchronize(after)
        seconds = device.elapsed_s(before, after)
        assert seconds is not None, "the host has waited for it"
        return seconds

    def seconds_of(work: Callable[[], Any]) -> float:
        work()  # the first run of any code is not like the others
        return median(once(work) for _ in range(_NUM_ROUNDS))

    return seconds_of


def _random(device: str, *shape: int) -> Tensor:
    """From a generator of its own: a run leaves the caller's as it is."""
    return torch.randn(*shape, device=device, generator=torch.Generator(device).manual_seed(0))


def _draws(shapes: Shapes, device: str) -> Iterator[Comparison]:
    for vocab_size in shapes.vocab_sizes:
        noise = (3, 1000, vocab_size, device)
        yield _equal("keyed_gumbel", f"V {vocab_size}", KERNELS.keyed_gumbel, REFERENCES.keyed_gumbel, noise)
        for num_rows in shapes.level_sizes:
            probs_WV = _random(device, num_rows, vocab_size).mul_(3).softmax(1)
            shape, what = f"W {num_rows}, V {vocab_size}, 16 draws", (probs_WV, 16, 3, 0)
            kernel, reference = KERNELS.draw_without_replacement, REFERENCES.draw_without_replacement
            yield _equal("draw_without_replacement", shape, kernel, reference, what)


def _equal(
    name: str, shape: str, kernel: Callable[..., Tensor], reference: Callable[..., Tensor], what: Any
) -> Comparison:
    def agrees() -> bool:
        got, wanted = kernel(*what), reference(*what)
        exact = got.dtype == torch.int64  # logarithms of one device may differ in the last place
        return torch.equal(got, wanted) if exact else torch.allclose(got, wanted, rtol=1e-13, atol=1e-13)

    return Comparison(name, shape, lambda: kernel(*what), lambda: reference(*what), agrees)


def _attention(shapes: Shapes, device: str) -> Iterator[Comparison]:
    for num_nodes in shapes.num_nodes:
        topology = k_ary(2, num_nodes)
        ancestor_NN = ancestors(topology).to(device)
        depth_N = torch.from_numpy(topology.depth_N.copy()).long().to(device)
        for num_prefix, window in product(shapes.num_prefix, shapes.windows):
            yield _one_attention(shapes, num_prefix, depth_N + num_prefix, ancestor_NN, window)


def _one_attention(
    shapes: Shapes, num_prefix: int, position_N: Tensor, ancestor_NN: Tensor, window: int | None
) -> Comparison:
    num_nodes, device, scaling = len(ancestor_NN), str(ancestor_NN.device), shapes.width**-0.5
    attend_in_bits = KERNELS.tree_attention
    query = _random(device, 1, num_nodes, shapes.num_heads, shapes.width).to(shapes.dtype).transpose(1, 2)
    key, value = _random(device, 2, 1, shapes.num_groups, num_prefix + num_nodes, shapes.width).to(shapes.dtype)
    assert attend_in_bits is not None, "there is a kernel to compare"
    mask = tree_mask(num_prefix, position_N, ancestor_NN, window, shapes.dtype)
    kernels: list[Callable[..., Tensor]] = [attend_in_bits]
    kernels += [partial(attend_in_bits, num_splits=count) for count in _SPLITS]
    rows, *others = (tree_rows(num_prefix, position_N, ancestor_NN, window, kernel) for kernel in kernels)
    tolerance = 1e-3 if shapes.dtype == torch.float32 else 2e-2

    def attend(to: Tensor | TreeRows) -> Tensor:
        return folded_attention(nn.Module(), query, key, value, to, scaling=scaling)[0]

    def agrees() -> bool:
        wanted, got = attend(mask), [attend(one) for one in (rows, *others)]
        return all(torch.allclose(one, wanted, atol=tolerance) for one in got)

    shape = f"N {num_nodes}, P {num_prefix}" + (f", window {window}" if window else "")
    return Comparison("tree_attention", shape, lambda: attend(rows), lambda: attend(mask), agrees)


def _matches(shapes: Shapes, device: str) -> Iterator[Comparison]:
    for vocab_size in shapes.vocab_sizes:
        for num_rows, temperature in product(shapes.num_scored, shapes.temperatures):
            logits_CV = _random(device, num_rows, vocab_size).mul_(3).to(shapes.dtype)
            yield _one_match(logits_CV, temperature)


def _one_match(logits_CV: Tensor, temperature: float) -> Comparison:
    num_rows, vocab_size = logits_CV.shape
    position_C = torch.arange(num_rows, device=logits_CV.device) // 3 + 500

    def draw(which: Callable[..., Tensor], num_drawn: int = num_rows, at: float = temperature) -> Tensor:
        return which(logits_CV[:num_drawn], position_C[:num_drawn], 5, temperature=at)

    kernel = KERNELS.match_rows
    assert kernel is not None, "there is a kernel to compare"

    def rival() -> list[int]:
        return [int(draw(match_rows_reference, 1)) for _ in range(min(VISITED, num_rows))]

    def agrees() -> bool:
        with_and_without_noise = (temperature or 1.0, 0.0)
        got, wanted = ([draw(one, at=at) for at in with_and_without_noise] for one in (kernel, match_rows_reference))
        return all(map(torch.equal, got, wanted))

    shape = f"N {num_rows}, V {vocab_size}, T {temperature}"
    return Comparison("match_rows", shape, lambda: draw(kernel).tolist(), rival, agrees)


def _commits(shapes: Shapes, device: str) -> Iterator[Comparison]:
    size = (1, shapes.num_groups, shapes.num_slots, shapes.width)
    buffers = [_random(device, *size).to(shapes.dtype) for _ in range(2 * shapes.num_layers)]
    agree = cache(partial(_commits_agree, shapes, device))
    for num_rows in shapes.path_lengths:
        row_A, length = torch.arange(num_rows, device=device) * 2, shapes.num_slots // 2

        def run(commit: Callable[..., None], length: int = length, row_A: Tensor = row_A) -> Callable[[], None]:
            return lambda: commit(buffers, length, row_A)

        yield Comparison("kv_commit", f"A {num_rows}", run(KERNELS.kv_commit), run(REFERENCES.kv_commit), agree)


def _commits_agree(shapes: Shapes, device: str) -> bool:
    """Paths of all lengths that are code of their own, in the caches of both models; each moves by one row."""
    agree = list[bool]()
    for (width, dtype), num_rows in product(shapes.caches, _PATHS):
        wanted = [*_random(device, 4, 1, shapes.num_groups, MAX_ROWS + 8, width).to(dtype)]
        got, row_A = [buffer.clone() for buffer in wanted], torch.arange(num_rows, device=device) + 1
        REFERENCES.kv_commit(wanted, 1, row_A)
        KERNELS.kv_commit(got, 1, row_A)
        agree += map(torch.equal, got, wanted)
    return all(agree)
