"""Every kernel against what runs without it, on this GPU: first whether both agree, then which one is faster.

The rival is the twin, except where something better than the twin would run: attention has its mask built beforehand,
as for a whole pass, and `match` draws on the few rows that a walk visits. Times are medians with a cold cache, launches
included. A kernel that loses is switched off by the constant `_BEATS_TWIN` in its file, and bench/LOG.md says so.

    python -m offload.bench.kernels                    shapes of Llama-2-70B, vocabularies of 32,000 and 128,256
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from offload.attention import folded_attention, tree_mask
from offload.kernels.draw_without_replacement import draw_without_replacement_kernel, draw_without_replacement_twin
from offload.kernels.jit import HAS_TRITON
from offload.kernels.keyed_gumbel import keyed_gumbel_kernel, keyed_gumbel_twin
from offload.kernels.kv_commit import kv_commit_kernel, kv_commit_twin
from offload.kernels.match_rows import match_rows_kernel, match_rows_twin
from offload.kernels.tree_attention import pack_bits, tree_attention_kernel
from offload.topology import k_ary
from offload.tree import ancestors

VISITED = 7  # rows that a walk looks at in a step that yields seven tokens
Row = dict[str, Any]


class Shapes(NamedTuple):
    """What is measured; the defaults are a 70B model's."""

    num_heads: int = 64
    num_groups: int = 8
    width: int = 128
    num_layers: int = 80
    num_slots: int = 2048
    num_nodes: tuple[int, ...] = (1, 16, 64, 256, 1024)
    num_prefix: tuple[int, ...] = (128, 1024, 4096)
    vocab_sizes: tuple[int, ...] = (32_000, 128_256)
    dtype: torch.dtype = torch.bfloat16


class Duel(NamedTuple):
    """One kernel at one shape."""

    kernel: str
    shape: str
    challenger: Callable[[], Any]
    rival: Callable[[], Any]
    agrees: Callable[[], bool]  # run before anything is timed


def duels(shapes: Shapes, device: str) -> Iterator[Duel]:
    """All of them, in the order of a step."""
    yield from _draws(shapes, device)
    yield from _attention(shapes, device)
    yield from _matches(shapes, device)
    yield from _commits(shapes, device)


def _draws(shapes: Shapes, device: str) -> Iterator[Duel]:
    for vocab_size in shapes.vocab_sizes:
        noise = (3, 1000, vocab_size, device)
        yield _equal("keyed_gumbel", f"V {vocab_size}", keyed_gumbel_kernel, keyed_gumbel_twin, noise)
        for num_rows in (1, 32):
            law_WV = torch.randn(num_rows, vocab_size, device=device).mul(3).softmax(1)
            shape, what = f"W {num_rows}, V {vocab_size}, 16 draws", (law_WV, 16, 3, 0)
            twin = draw_without_replacement_twin
            yield _equal("draw_without_replacement", shape, draw_without_replacement_kernel, twin, what)


def _equal(name: str, shape: str, kernel: Callable[..., Tensor], twin: Callable[..., Tensor], what: Any) -> Duel:
    def agrees() -> bool:
        got, wanted = kernel(*what), twin(*what)
        exact = got.dtype == torch.int64  # logarithms of one device may differ in the last place
        return torch.equal(got, wanted) if exact else torch.allclose(got, wanted, rtol=1e-13, atol=1e-13)

    return Duel(name, shape, lambda: kernel(*what), lambda: twin(*what), agrees)


def _attention(shapes: Shapes, device: str) -> Iterator[Duel]:
    for num_nodes in shapes.num_nodes:
        topology = k_ary(2, num_nodes)
        ancestor_NN = ancestors(topology).to(device)
        depth_N = torch.from_numpy(topology.depth_N.copy()).long().to(device)
        for num_prefix in shapes.num_prefix:
            shape = f"N {num_nodes}, P {num_prefix}"
            yield _one_attention(shapes, shape, num_prefix, ancestor_NN, depth_N + num_prefix)


def _one_attention(shapes: Shapes, shape: str, num_prefix: int, ancestor_NN: Tensor, position_N: Tensor) -> Duel:
    num_nodes, place = len(ancestor_NN), torch.empty(0, device=ancestor_NN.device, dtype=shapes.dtype)
    query = torch.randn(1, num_nodes, shapes.num_heads, shapes.width).to(place).transpose(1, 2)  # as a model has it
    key, value = torch.randn(2, 1, shapes.num_groups, num_prefix + num_nodes, shapes.width).to(place)
    mask = tree_mask(num_prefix, position_N, ancestor_NN, None, shapes.dtype)
    bits, scaling = pack_bits(ancestor_NN), shapes.width**-0.5

    def rival() -> Tensor:
        return folded_attention(nn.Module(), query, key, value, mask, scaling=scaling)[0][0]

    def challenger() -> Tensor:
        return tree_attention_kernel(query[0], key[0], value[0], bits, num_prefix, scaling=scaling)

    return Duel("tree_attention", shape, challenger, rival, lambda: torch.allclose(challenger(), rival(), atol=2e-2))


def _matches(shapes: Shapes, device: str) -> Iterator[Duel]:
    for vocab_size in shapes.vocab_sizes:
        for num_nodes in shapes.num_nodes:
            for temperature in (0.0, 0.7):
                yield _one_match(shapes, device, vocab_size, num_nodes, temperature)


def _one_match(shapes: Shapes, device: str, vocab_size: int, num_nodes: int, temperature: float) -> Duel:
    logits_NV = torch.randn(num_nodes, vocab_size, device=device, dtype=shapes.dtype).mul_(3)
    position_N = torch.arange(num_nodes, device=device) // 3 + 500

    def draw(which: Callable[..., Tensor], num_rows: int = num_nodes) -> Tensor:
        return which(logits_NV[:num_rows], position_N[:num_rows], 5, temperature=temperature)

    def rival() -> list[int]:
        return [int(draw(match_rows_twin, 1)) for _ in range(min(VISITED, num_nodes))]

    def agrees() -> bool:
        return torch.equal(draw(match_rows_kernel), draw(match_rows_twin))

    shape = f"N {num_nodes}, V {vocab_size}, T {temperature}"
    return Duel("match_rows", shape, lambda: draw(match_rows_kernel).tolist(), rival, agrees)


def _commits(shapes: Shapes, device: str) -> Iterator[Duel]:
    size = (1, shapes.num_groups, shapes.num_slots, shapes.width)
    buffers = [torch.randn(size, device=device, dtype=shapes.dtype) for _ in range(2 * shapes.num_layers)]
    for num_rows in (2, 6, 20):
        row_A, length = torch.arange(num_rows, device=device) * 2, shapes.num_slots // 2

        def agrees(length: int = length, row_A: Tensor = row_A) -> bool:
            wanted, got = ([buffer.clone() for buffer in buffers[:4]] for _ in range(2))
            kv_commit_twin(wanted, length, row_A)
            kv_commit_kernel(got, length, row_A)
            return all(map(torch.equal, got, wanted))

        def run(commit: Callable[..., None], length: int = length, row_A: Tensor = row_A) -> Callable[[], None]:
            return lambda: commit(buffers, length, row_A)

        yield Duel("kv_commit", f"A {num_rows}", run(kv_commit_kernel), run(kv_commit_twin), agrees)


def measure(duel: Duel) -> Row:
    """Seconds of both, or the disagreement; no time is told for what is wrong."""
    row: Row = {"kernel": duel.kernel, "shape": duel.shape, "agrees": duel.agrees()}
    if row["agrees"]:
        from triton.testing import do_bench

        for name, function in (("kernel_s", duel.challenger), ("rival_s", duel.rival)):
            row[name] = do_bench(function, warmup=10, rep=50, return_mode="median") / 1000
        row["ratio"] = row["rival_s"] / row["kernel_s"]
    return row


def verdicts(rows: list[Row]) -> dict[str, Row]:
    """For each kernel the geometric mean of rival / kernel time, the worst case, and whether it is to be used."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        ratios[row["kernel"]].append(row.get("ratio", 0.0))
    return {
        kernel: {
            "mean_ratio": math.exp(sum(math.log(r) for r in of_kernel) / len(of_kernel)) if min(of_kernel) else 0.0,
            "worst_ratio": min(of_kernel),
            "beats_twin": min(of_kernel) > 0 and math.prod(of_kernel) > 1,
        }
        for kernel, of_kernel in ratios.items()
    }


def _table(rows: list[Row]) -> Table:
    table = Table("kernel", "shape", "kernel, ms", "rival, ms", "rival / kernel")
    for row in rows:
        times = [f"{row[name] * 1000:.4f}" for name in ("kernel_s", "rival_s")] if row["agrees"] else ["WRONG", ""]
        table.add_row(row["kernel"], row["shape"], *times, f"{row['ratio']:.2f}" if row["agrees"] else "")
    return table


def main() -> None:
    """Measure all kernels; exits with 1 where one of them is wrong, with 2 where there is nothing to measure on."""
    if not (torch.cuda.is_available() and HAS_TRITON):
        typer.echo("kernels are measured on a CUDA device with Triton, and there is none here", err=True)
        raise typer.Exit(2)
    torch.manual_seed(0)
    rows = [measure(duel) for duel in duels(Shapes(), "cuda")]
    Console().print(_table(rows))
    device = torch.cuda.get_device_name()
    typer.echo(json.dumps({"bench": "kernels", "device": device, "verdicts": verdicts(rows), "rows": rows}))
    raise typer.Exit(0 if all(row["agrees"] for row in rows) else 1)


if __name__ == "__main__":
    typer.run(main)
