"""llama.cpp through llama-cpp-python, on the mapped GGUF.

Option `draft_tokens` is the draft's n-max, 0 without one; `lookup` how many tokens its prompt
lookup guesses instead.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

from offload.bench.peers.child import Emit, Order

_CONTEXT = 512
_GREEDY = {"temp": 0.0, "top_k": 1, "repeat_penalty": 1.0}


class LlamaCpp:
    """One context of the target, and one of the draft where asked for."""

    def __init__(self, order: Order) -> None:
        self._draft: _Draft | _Lookup | None = None
        if num_drafted := order.options["draft_tokens"]:
            self._draft = _Draft(order.draft, num_drafted)
        if "lookup" in order.options:
            self._draft = _Lookup(num_pred_tokens=order.options["lookup"])
        self._model = _open(order.target, self._draft)

    def use_threads(self, count: int) -> None:
        small = [self._draft.model] if isinstance(self._draft, _Draft) else []
        for model in (self._model, *small):
            llama_cpp.llama_set_n_threads(model.ctx, count, count)

    def generate(self, prompt_ids: list[int], num_tokens: int, limit_s: float, emit: Emit) -> None:
        stop = perf_counter() + limit_s
        burst = list[int]()

        def end_pass() -> None:
            emit(burst.copy())
            burst.clear()

        if self._draft:
            self._draft.before = end_pass
        self._model.reset()
        for token in islice(self._model.generate(prompt_ids, **_GREEDY), num_tokens):
            burst.append(int(token))
            if not self._draft:
                end_pass()
            if perf_counter() > stop:
                break


class _Draft(LlamaDraftModel):
    """Continues greedily with a small model, which keeps the shared prefix of texts cached."""

    def __init__(self, path: str, num_tokens: int) -> None:
        self.model = _open(path, None)
        self._num_tokens = num_tokens
        self.before: Callable[[], None] = lambda: None  # called when a pass of the target is over

    def __call__(self, input_ids: Sequence[int], /, **_: Any) -> np.ndarray:
        self.before()
        tokens = self.model.generate([int(token) for token in input_ids], **_GREEDY)
        return np.fromiter(islice(tokens, self._num_tokens), dtype=np.intc)


class _Lookup(LlamaPromptLookupDecoding):
    """Copies what followed the last tokens earlier in the text."""

    before: Callable[[], None]  # as above

    def __call__(self, input_ids: np.ndarray, /, **inputs: Any) -> np.ndarray:
        self.before()
        guesses: np.ndarray = super().__call__(input_ids, **inputs)
        return guesses


def _open(path: str, draft: LlamaDraftModel | None) -> llama_cpp.Llama:
    """Open a model on the map: reordered copies of quantised weights do not fit under a cap."""
    usual = llama_cpp.llama_cpp.llama_model_default_params

    def mapped() -> Any:
        params = usual()
        params.use_extra_bufts = False
        return params

    llama_cpp.llama_cpp.llama_model_default_params = mapped
    options: dict[str, Any] = {"n_ctx": _CONTEXT, "use_mmap": True, "verbose": False}
    try:
        return llama_cpp.Llama(path, draft_model=draft, **options)
    finally:
        llama_cpp.llama_cpp.llama_model_default_params = usual


open_peer = LlamaCpp
