"""One rank of a `Cluster`, as a process: it loads, then rank 0 writes a text for every line."""

import json
import sys
import time
from typing import Any

from offload.bench.harness.cluster import Answer, Order
from offload.bench.harness.metrics import Burst
from offload.engine.decoder import Decoder
from offload.engine.load import open_decoder
from offload.machine import peak_rss_bytes, rss_bytes
from offload.planning.options import LoadOptions
from offload.stats import RankFigures


def main() -> None:
    """Load and serve; any rank but the first follows it to the end."""
    target, draft, options = json.loads(sys.argv[1])
    own_bytes = rss_bytes()
    with open_decoder(target, draft, LoadOptions(**options)) as decoder:
        tell(decoder.plan.as_dict())
        for line in sys.stdin:
            tell(write(decoder, Order(*json.loads(line)), own_bytes))


def write(decoder: Decoder, order: Order, own_bytes: int) -> Answer:
    """Write one text; return it with what each rank has moved for it."""
    run = decoder.run(
        order.prompt_ids, order.sampling, max_new_tokens=order.num_tokens, tree=order.tree
    )
    times = list[float]()
    started = time.perf_counter()
    figures = [_figures(decoder, own_bytes, 0)]
    for _ in run:
        times.append(time.perf_counter() - started)
        if len(times) == 1:
            figures.append(_figures(decoder, own_bytes, 0))
    result = run.result()
    figures.append(_figures(decoder, own_bytes, result.stats.num_sweeps))
    counts = [result.stats.num_first_tokens, *result.stats.accepted_per_sweep]
    # the last piece may be text alone
    bursts = [Burst(*pair) for pair in zip(times, counts, strict=False)]
    return Answer(result.token_ids, bursts, result.stats.as_dict(), figures)


def _figures(decoder: Decoder, own_bytes: int, num_passes: int) -> list[RankFigures]:
    """Return the figures of all ranks, or of a single process its passes since the first tokens."""
    if told := decoder.target.figures():
        return told
    plan = decoder.plan
    stream = decoder.target.stream
    moved = (num_passes, 0, plan.streamed_bytes, stream.bytes_read, stream.stall_s)
    return [RankFigures(plan.ram_bytes, own_bytes, peak_rss_bytes(), *moved, 0, {}, 0.0)]


def tell(value: Any) -> None:
    """Print one line of JSON."""
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
