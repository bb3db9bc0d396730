"""What do recurrent layers cost beside their products? A pass over a tree at Qwen3.6-27B's shape.

One layer of random weights, in bfloat16, runs as a streamed model runs it. Invariant: the same pass
gives the time of convolution and scan and that of all products: the machine's other work changes no
ratio.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from offload.bench.harness.command import Bench, Findings, command
from offload.bench.harness.tables import Column, Row

HIDDEN = 5120
SHAPE: dict[str, Any] = {
    **{"hidden_size": HIDDEN, "intermediate_size": 17408, "num_hidden_layers": 1, "vocab_size": 8},
    **{"num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "layer_types": ["linear_attention"]},
}
_SMALL = {"hidden_size": 256, "intermediate_size": 512}
TREES = (1, 64, 256)
QUICK_TREES = (1, 16)
LIMIT = 0.15  # of the products, for 64 nodes


@contextmanager
def timed(layer: nn.Module) -> Iterator[dict[str, float]]:
    """Meanwhile add up what convolution and scan take, and what products do."""
    from offload.model.recurrent_cache import RecurrentCache

    seconds = {"recurrent_s": 0.0, "products_s": 0.0}

    def clocked(name: str, owner: Any, method: str) -> Any:
        function = getattr(owner, method)

        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            seconds[name] += time.perf_counter() - started
            return result

        return patch.object(owner, method, run)

    with ExitStack() as patches:
        for method in ("convolve", "scan"):
            patches.enter_context(clocked("recurrent_s", RecurrentCache, method))
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                patches.enter_context(clocked("products_s", module, "forward"))
        yield seconds


@torch.inference_mode()
def one_pass(layer: nn.Module, width: int, num_nodes: int) -> dict[str, float]:
    """Time a pass over a tree, behind a committed token; each node has two children."""
    from offload.model.linear import PLAIN, choose_products
    from offload.model.parts import BatchPart, lay
    from offload.model.recurrent_cache import RecurrentCache
    from offload.model.wide_products import WideProducts, lacks_products

    state_cache = RecurrentCache(1, num_nodes + 1)
    sees_NN = torch.eye(num_nodes, dtype=torch.bool)
    for node in range(1, num_nodes):
        sees_NN[node] |= sees_NN[(node - 1) // 2]
    hidden = torch.randn(1, num_nodes, width).bfloat16()
    row_N = torch.arange(num_nodes)
    cache = lay([BatchPart(row_N, row_N, sees_NN, state_cache)], None)
    is_narrow = lacks_products(torch.bfloat16)
    products = WideProducts() if is_narrow else PLAIN
    choose_products(layer, products)
    with timed(layer) as seconds, products.during(num_nodes), cache.running():
        layer(hidden, position_embeddings=None, attention_mask=None)
    return seconds


def measure(num_rounds: int, trees: tuple[int, ...], shape: dict[str, Any]) -> list[Row]:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    from offload.model.linear import replace_linears
    from offload.model.mixers.table import replace_mixers

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**shape)
    layer = qwen3_5.Qwen3_5DecoderLayer(config, 0).bfloat16().eval()
    replace_linears(layer)
    assert replace_mixers(nn.ModuleList([layer]), config) == [True], "a recurrent layer"
    layer.requires_grad_(False)
    rows = []
    for num_nodes in trees:
        rounds = [one_pass(layer, shape["hidden_size"], num_nodes) for _ in range(num_rounds + 1)]
        row: Row = {"row": f"{num_nodes} nodes", "nodes": num_nodes}
        for name in rounds[0]:
            # the first finds nothing in any cache
            row[name] = statistics.median(timed[name] for timed in rounds[1:])
        rows.append({**row, "share": row["recurrent_s"] / row["products_s"]})
    return rows


COLUMNS = (
    Column("a pass over", "row"),
    Column("states, ms", "recurrent_s", ".1f", 1e-3),
    Column("products, ms", "products_s", ".1f", 1e-3),
    Column("share", "share", ".0%"),
)


@command("recurrence", "quick")
def main(bench: Bench) -> Findings:
    """What a recurrent layer of Qwen3.6-27B's shape takes for its states, beside its products."""
    rows = measure(*bench.effort((5, TREES, SHAPE), (1, QUICK_TREES, SHAPE | _SMALL)))
    return Findings(
        rows=rows,
        tables=[(COLUMNS, rows)],
        notes=[f"threads: {torch.get_num_threads()}; 64 nodes should keep to {LIMIT:.0%}"],
        settings={"threads": torch.get_num_threads()},
        ceiling={"share": LIMIT},
    )
