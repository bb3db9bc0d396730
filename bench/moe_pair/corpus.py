"""The text that the pair learns: the standard library's source, as for the packaged pair.

Invariant: held-out files are those of `prompts`, so benches prompt with text that no pair has seen;
a step's windows depend on the seed and the step alone, so a run that goes on sees what an uncut one
would have.
"""

import random

import torch
from torch import Tensor
from transformers import AutoTokenizer

from offload.bench.harness.prompts import held_out_files, library_files, read_source
from offload.checkpoint.packaged import PAIR

END_OF_TEXT = 0


def library_ids(*, held_out: bool) -> Tensor:
    """Return ids of all files in random order, the end of text before each."""
    kept_back = held_out_files()
    learnt = set(library_files()).difference(kept_back)
    files = sorted(kept_back if held_out else learnt)
    texts = [read_source(path) for path in random.Random(0).sample(files, len(files))]
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target", trust_remote_code=False)
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return torch.tensor([token for document in ids for token in (END_OF_TEXT, *document)])


def windows(ids: Tensor, num_tokens: int, length: int, seed: int) -> Tensor:
    """Return `num_tokens` ids as (windows, length), from random places."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(ids) - length, (num_tokens // length,), generator=generator)
    return torch.stack([ids[start : start + length] for start in starts])
