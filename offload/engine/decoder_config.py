"""What loading found and decided for all runs of a decoder."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from offload.calibration.invariance import Invariance
from offload.calibration.kernels import NO_KERNELS, KernelChoice
from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.generation_config import end_ids_of, stated_settings
from offload.checkpoint.sizes import config_sizes
from offload.drafting.lookup import NO_SOURCES, GuessSources
from offload.engine.identities import Identities
from offload.engine.run_trees import TreeSelector
from offload.engine.setup import Setup
from offload.engine.tokenizer import Tokenizer, tokenizer_end_ids
from offload.kernels.registry import KernelSet
from offload.memory.plan import MemoryPlan
from offload.sampling.grammar_mask import Grammars
from offload.sampling.model_rules import ModelRules
from offload.threads import ThreadPolicy


class PromptPlace(NamedTuple):
    """A folder for prompts that were read."""

    directory: Path
    most_bytes: int
    on_fault: Callable[[str], None]  # called with lines for the user

    @classmethod
    def from_setup(cls, setup: Setup, notes: list[str]) -> "PromptPlace | None":
        """Return the folder that the options name, or None; faults become notes."""
        options = setup.options
        if options.prompt_cache is None:
            return None

        def note(line: str) -> None:
            notes.append(line)
            setup.hooks.on_note(line)

        directory = Path(options.prompt_cache).expanduser()
        return cls(directory, options.prompt_folder_bytes, note)


class TextRules(NamedTuple):
    """What holds for every text of one model."""

    end_ids: frozenset[int]  # tokens that end a text
    grammars: Grammars  # that requests may name
    stated: ModelRules  # of generation_config.json

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, tokenizer: Tokenizer | None, vocab_size: int
    ) -> "TextRules":
        """Return the rules of a model's files. Raises `UserError`."""
        end_ids = end_ids_of(checkpoint)
        grammars = Grammars(tokenizer, vocab_size, end_ids | tokenizer_end_ids(tokenizer))
        stated = ModelRules(stated_settings(checkpoint), end_ids, vocab_size)
        return cls(end_ids, grammars, stated)


class DecoderConfig(NamedTuple):
    """Settings of all runs; a rank's decoder has no others."""

    plan: MemoryPlan
    identities: Identities
    trees: TreeSelector
    rule: str  # unless a run names another
    texts: TextRules
    threads: ThreadPolicy
    lenience: float = 1.0
    choice: KernelChoice[KernelSet] = NO_KERNELS
    tokenizer: Tokenizer | None = None
    invariance: Invariance = Invariance()
    sources: GuessSources = NO_SOURCES
    prompts: PromptPlace | None = None  # a folder for what was computed for prompts

    @classmethod
    def without_trees(
        cls, setup: Setup, plan: MemoryPlan, tokenizer: Tokenizer | None
    ) -> "DecoderConfig":
        """Return the config of a decoder whose target, and guesses, other ranks compute."""
        vocab_size = config_sizes(setup.files.target)["vocab_size"]
        return cls(
            plan=plan,
            identities=Identities(setup.files, setup.open_source, dtype=setup.dtype),
            trees=TreeSelector.without_trees(plan),
            rule=setup.options.rule,
            threads=ThreadPolicy.fixed(torch.get_num_threads()),
            tokenizer=tokenizer,
            texts=TextRules.from_checkpoint(setup.files.target, tokenizer, vocab_size),
        )
