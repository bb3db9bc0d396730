"""The packaged pair, resident and batched: held-out prompts, and both models' scores while texts grow.

Why it exists: tokens per step do not depend on streaming, so studies of trees and rules need no stream; what they need
is many positions. All texts of a batch are equally long, so they advance together, one pass of both models per token.
Invariant: prompts come from files the pair was not trained on, and a file serves either calibration or measurement.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from offload.bench.train_pair import corpus_files, read_source
from offload.cli.demo import PAIR
from offload.config import Sampling
from offload.model.kv_cache import KVCache
from offload.sampling.sampler import Sampler

PROMPT_TOKENS = 128
Figures = dict[str, Any]
_NUM_SLOTS = 1024  # what the pair was trained for: prompt, new tokens, and the deepest tree beyond them
Part = Literal["calibrate", "measure"]


class Scale(NamedTuple):
    """How much a study measures: minutes on two cores, as much as its error bars deserve, or just enough for a test."""

    num_prompts: int  # measured texts
    num_tokens: int  # new ones of each
    num_calibration: int  # prompts for the acceptance vectors, other files than the measured ones
    num_calibration_tokens: int  # logged positions after each of them
    num_ranks: int  # entries of an acceptance vector, the most children a node may have
    max_depth: int  # of Sequoia's trees; the paper's largest are 23 deep
    sizes: tuple[int, ...]
    temperatures: tuple[float, ...]
    top_ps: tuple[float, ...]
    num_children: tuple[int, ...]


_SIZES, _CHILDREN = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
FULL = Scale(96, 128, 64, 64, 32, 32, _SIZES, (0.2, 0.4, 0.6, 0.8, 1.0), (0.8, 0.9, 1.0), _CHILDREN)
QUICK = Scale(24, 128, 16, 64, 32, 32, (1, 8, 32, 128, 512), (0.2, 0.6, 1.0), (0.8, 0.9, 1.0), (1, 2, 4, 8, 16, 32))
TINY = Scale(2, 6, 2, 4, 8, 8, (1, 9), (0.6,), (0.9,), (1, 2, 8))


class Pair:
    """Target and draft in float32, and the prompts of both parts."""

    def __init__(self) -> None:
        self.target, self.draft = (AutoModelForCausalLM.from_pretrained(PAIR / name, dtype=torch.float32).eval()
            for name in ("target", "draft"))  # fmt: skip
        self.vocab_size: int = self.target.config.vocab_size
        self._windows: dict[Part, list[list[int]]] = {"calibrate": [], "measure": []}
        self._fill_windows()

    def prompts(self, part: Part, num_prompts: int) -> Tensor:
        """Token ids (B, PROMPT_TOKENS), spread evenly over the files of the part."""
        windows = self._windows[part]
        assert num_prompts <= len(windows), f"only {len(windows)} prompts are held out for {part}"
        return torch.tensor([windows[index * len(windows) // num_prompts] for index in range(num_prompts)])

    def _fill_windows(self) -> None:
        """Files take turns between the two parts; windows of one file lie 512 tokens apart."""
        tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
        sources = [read_source(path)[:60000] for path in corpus_files(held_out=True)]
        ids = tokenizer([text for text in sources if len(text) > 1200], add_special_tokens=False)["input_ids"]
        for index, document in enumerate(ids):
            starts = range(0, len(document) - PROMPT_TOKENS, 512)
            part: Part = "measure" if index % 2 else "calibrate"
            self._windows[part] += [document[start : start + PROMPT_TOKENS] for start in starts]


class Texts:
    """Growing texts; `target_BV` and `draft_BV` are the scores of what comes next."""

    def __init__(self, pair: Pair, prompt_BT: Tensor) -> None:
        # Slots are written in place; transformers' own caches copy all keys and values for every token.
        self._models: list[tuple[Any, KVCache]] = [
            (model, KVCache(model.config.num_hidden_layers, _NUM_SLOTS)) for model in (pair.target, pair.draft)
        ]
        self.length = 0
        self._run(prompt_BT)

    def append(self, tokens: Sequence[int]) -> None:
        self._run(torch.tensor(tokens)[:, None])

    @torch.inference_mode()
    def _run(self, token_BT: Tensor) -> None:
        self.target_BV, self.draft_BV = (_advance(model, cache, token_BT) for model, cache in self._models)
        self.length += token_BT.shape[1]


def _advance(model: Any, cache: KVCache, token_BT: Tensor) -> Tensor:
    num_rows = token_BT.shape[1]
    cache.place(0, num_rows)
    logits = model(input_ids=token_BT, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    cache.commit(range(num_rows))
    return logits[:, -1]


class Rows(NamedTuple):
    """What both models said at R positions, prompt after prompt."""

    target_RV: Tensor  # logits
    draft_RV: Tensor
    num_prompts: int


def logged_rows(pair: Pair, sampling: Sampling, num_prompts: int, num_tokens: int) -> Rows:
    """Scores along texts that the target itself writes, since those are the contexts that decoding visits."""
    texts = Texts(pair, pair.prompts("calibrate", num_prompts))
    sampler = Sampler(sampling, pair.vocab_size)
    logged = []
    for _ in range(num_tokens):
        logged.append((texts.target_BV, texts.draft_BV))
        p_BV = sampler.distribution(texts.target_BV).double()
        # Inverting the sum with a fresh number per text: the keyed noise would be the same for all of them.
        coin_B1 = torch.from_numpy(sampler.uniform(num_prompts, 1))
        sum_BV = p_BV.cumsum(1)
        token_B1 = torch.searchsorted(sum_BV, coin_B1 * sum_BV[:, -1:], right=True).clamp(max=pair.vocab_size - 1)
        texts.append(token_B1[:, 0].tolist())
    target_RV, draft_RV = (torch.stack(rows, 1).flatten(0, 1) for rows in zip(*logged, strict=True))
    return Rows(target_RV, draft_RV, num_prompts)
