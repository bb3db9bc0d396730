"""What several runs in flight yield: counted, with all trees along the target's own text, for a small pair.

While one tree is in the last stage, the next ones are in the stages before it, and most of those are for nothing: what
the first one ends in is not what they begin with. No torch.
"""

import math

import numpy as np

SOURCE = "counted for a pair of 16 and 1 million weights, greedy, an ideal draft"
_RUNS = (1, 2, 4, 8)
_GAINS = {  # nodes of each tree -> tokens per second over those of one run at a time on the same stages
    4: (1.0, 1.15, 1.27, 1.39),
    8: (1.0, 1.07, 1.14, 1.23),
    16: (1.0, 1.04, 1.10, 1.18),
    64: (1.0, 1.04, 1.09, 1.16),
    128: (1.0, 1.01, 1.04, 1.10),
}


def in_flight_gain(num_runs: int, num_nodes: int) -> float:
    """How many times faster than one run at a time, where all stages take equally long; straight in logarithms."""
    sizes = [math.log2(size) for size in _GAINS]
    columns = zip(*_GAINS.values(), strict=True)
    gains = [float(np.interp(math.log2(num_nodes), sizes, column)) for column in columns]
    return float(np.interp(math.log2(num_runs), [math.log2(runs) for runs in _RUNS], gains))
