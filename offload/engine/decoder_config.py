"""What loading has found out and decided for all runs of a decoder."""

from typing import NamedTuple

import torch

from offload.calibration.invariance import Invariance
from offload.calibration.kernels import NO_KERNELS, KernelChoice
from offload.checkpoint.generation_config import end_ids_of
from offload.checkpoint.sizes import config_sizes
from offload.drafting.lookup import NO_SOURCES, GuessSources
from offload.engine.identities import Identities
from offload.engine.setup import Setup
from offload.engine.tokenizer import Tokenizer
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

    @classmethod
    def without_trees(
        cls, setup: Setup, plan: MemoryPlan, tokenizer: Tokenizer | None
    ) -> "DecoderConfig":
        """Return what a decoder has to know whose target other ranks compute, guesses included."""
        end_ids = end_ids_of(setup.files.target)
        vocab_size = config_sizes(setup.files.target)["vocab_size"]
        return cls(
            plan=plan,
            identities=Identities(setup.files, setup.open_source, dtype=setup.dtype),
            trees=TreeSelector.without_trees(plan),
            rule=setup.options.rule,
            threads=ThreadPolicy.fixed(torch.get_num_threads()),
            tokenizer=tokenizer,
            end_ids=end_ids,
            grammars=Grammars(tokenizer, vocab_size, end_ids),
        )
