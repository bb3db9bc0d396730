"""What loading has found out and decided for all runs of a decoder."""

from typing import NamedTuple

from offload.calibration.invariance import Invariance
from offload.calibration.kernels import NO_KERNELS, KernelChoice
from offload.drafting.lookup import NO_SOURCES, GuessSources
from offload.engine.identities import Identities
from offload.engine.text import Tokenizer
from offload.kernels.registry import KernelSet
from offload.memory.plan import MemoryPlan
from offload.planning.selector import TreeSelector
from offload.sampling.grammar_mask import Grammars
from offload.threads import ThreadPolicy


class DecoderConfig(NamedTuple):
    """What holds for all runs; a rank's decoder has no more than what it names."""

    plan: MemoryPlan
    identities: Identities
    trees: TreeSelector
    rule: str  # where a run names none
    grammars: Grammars  # that texts may be asked to keep
    threads: ThreadPolicy
    lenience: float = 1.0
    choice: KernelChoice[KernelSet] = NO_KERNELS
    tokenizer: Tokenizer | None = None
    end_ids: frozenset[int] = frozenset()  # tokens that end a text
    invariance: Invariance = Invariance()
    sources: GuessSources = NO_SOURCES
