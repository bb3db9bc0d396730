"""How much a study measures: minutes on two cores, as much as its error bars deserve, or just enough for a test."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Amounts; what is measured does not depend on them."""

    num_prompts: int  # measured texts
    num_tokens: int = 128  # new tokens of each
    num_calibration: int  # prompts for the acceptance vectors, other files than the measured ones
    num_calibration_tokens: int = 64  # logged positions after each of them
    num_ranks: int = 32  # entries of an acceptance vector, the most children a node may have
    max_depth: int = 32  # of Sequoia's trees; the paper's largest are 23 deep
    sizes: tuple[int, ...]
    temperatures: tuple[float, ...]
    top_ps: tuple[float, ...]
    num_children: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


FULL = Scale(
    num_prompts=96,
    num_calibration=64,
    sizes=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768),
    temperatures=(0.2, 0.4, 0.6, 0.8, 1.0),
    top_ps=(0.8, 0.9, 1.0),
    num_children=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32),
)
QUICK = Scale(
    num_prompts=24,
    num_calibration=16,
    sizes=(1, 8, 32, 128, 512),
    temperatures=(0.2, 0.6, 1.0),
    top_ps=(0.8, 0.9, 1.0),
    num_children=(1, 2, 4, 8, 16, 32),
)
TINY = Scale(
    num_prompts=2,
    num_tokens=6,
    num_calibration=2,
    num_calibration_tokens=4,
    num_ranks=8,
    max_depth=8,
    sizes=(1, 9),
    temperatures=(0.6,),
    top_ps=(0.9,),
    num_children=(1, 2, 8),
)
