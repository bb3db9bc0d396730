"""A draft that scores after a token, whatever came before it, so that its trees are known beforehand."""

import torch
from torch import Tensor

from offload.model.kv_cache import KVCache

NUM_TOKENS = 5


class BigramModel:
    """Remembers how many rows its passes had."""

    num_layers, send, foreign_ids = 1, None, ()

    def __init__(self, num_tokens: int = NUM_TOKENS, spread: float = 2.0) -> None:
        self.vocab_size, self.num_rows = num_tokens, list[int]()
        self.logits_VV = spread * torch.randn(num_tokens, num_tokens, generator=torch.Generator().manual_seed(3))

    def new_cache(self, num_slots: int, *others: object) -> KVCache:
        return KVCache(self.num_layers, num_slots, *others)  # type: ignore[arg-type]

    def encode_prompt(self, *_: object) -> None:
        """There is no encoder."""

    def forward(self, token_T: Tensor, *_: object, num_logits: int = 0) -> Tensor:
        self.num_rows.append(len(token_T))
        return self.logits_VV[token_T][-num_logits:]

    forward_chain = forward
