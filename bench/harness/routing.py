"""Which experts each token of a text is routed to, and the passes of decoding such a text.

Routing is recorded while a model reads texts, or made up: experts have a popularity that changes
with the subject, tokens nearby resemble each other, and the first layer knows no popularity, as is
seen in trained models.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

# chance of a guess whose predecessors were right
ACCEPTANCE = 0.8


class Routing(NamedTuple):
    """The experts that some texts in a row were routed to."""

    chosen_TLK: np.ndarray  # ids of experts, by token, layer and rank
    # experts of a layer
    num_experts: int
    starts: tuple[int, ...] = (0,)  # first tokens of the texts

    @property
    def num_blocks(self) -> int:
        return self.chosen_TLK.shape[1] * self.num_experts


class Pass(NamedTuple):
    """One forward of some rows."""

    blocks: list[np.ndarray]  # by layer: what the pass needs, ascending, each once
    # by layer: how many rows need each of these
    rows: list[np.ndarray]
    num_rows: int
    # tokens by which the text has grown
    num_tokens: int


class MadeUp(NamedTuple):
    """How routing is made up; the strengths are of normal numbers added to a token's own."""

    num_layers: int = 12
    num_experts: int = 128
    num_chosen: int = 8
    # strength of what lasts for all texts
    popularity: float = 0.8
    # strength of what lasts for one text
    subject: float = 0.9
    # strength of what fades within some tokens
    nearby: float = 0.9
    fading: float = 0.85  # how much of it is left in the next token
    num_texts: int = 4
    # tokens of a text
    num_tokens: int = 300


def made_up(how: MadeUp, seed: int = 0) -> Routing:
    """Return texts on one subject each, one after the other."""
    rng = np.random.default_rng(seed)
    shape = (how.num_layers, how.num_experts)
    strength_L1 = np.ones((how.num_layers, 1))
    strength_L1[0] = 0.0
    lasting = how.popularity * rng.normal(size=shape)
    near = rng.normal(size=shape)
    chosen = []
    for _ in range(how.num_texts):
        popular = strength_L1 * (lasting + how.subject * rng.normal(size=shape))
        for _ in range(how.num_tokens):
            near = how.fading * near + (1 - how.fading**2) ** 0.5 * rng.normal(size=shape)
            scores_LE = popular + how.nearby * near + rng.normal(size=shape)
            chosen.append(np.argpartition(-scores_LE, how.num_chosen, axis=1)[:, : how.num_chosen])
    starts = tuple(range(0, how.num_texts * how.num_tokens, how.num_tokens))
    return Routing(np.stack(chosen), how.num_experts, starts)


def recorded(model: torch.nn.Module, texts: Sequence[Sequence[int]]) -> Routing:
    """Return what a model of `transformers` is routed to while it reads these token ids.

    Every module named `experts` is called with the ids of the chosen ones second.
    """
    modules = [module for name, module in model.named_modules() if name.endswith(".experts")]
    seen: dict[torch.nn.Module, list[np.ndarray]] = {module: [] for module in modules}

    def listen(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        seen[module].append(given[1].reshape(-1, given[1].shape[-1]).cpu().numpy())

    hooks = [module.register_forward_pre_hook(listen) for module in modules]
    try:
        with torch.inference_mode():
            for text in texts:
                model(input_ids=torch.tensor([list(text)]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    sizes = [len(text) for text in texts]
    chosen_TLK = np.stack([np.concatenate(seen[module]) for module in modules], axis=1)
    return Routing(
        chosen_TLK, int(modules[0].num_experts), tuple(np.cumsum([0, *sizes[:-1]]).tolist())
    )


def passes(
    routing: Routing, num_rows: int, seed: int = 0, *, prompt_tokens: int = 0
) -> Iterator[Pass]:
    """Yield the passes of decoding every text with `num_rows` rows a pass.

    The accepted rows go on with the text, others are rejected. A rejected row is routed like any
    other token of its text. The first `prompt_tokens` of a text are one pass.
    """
    rng = random.Random(seed)
    num_all = len(routing.chosen_TLK)
    for start, end in zip(routing.starts, (*routing.starts[1:], num_all), strict=True):
        token = start
        if prompt_tokens:
            token = min(start + prompt_tokens, end)
            yield _pass_of(routing, range(start, token), token - start)
        while token < end:
            accepted = 1
            while accepted < min(num_rows, end - token) and rng.random() < ACCEPTANCE:
                accepted += 1
            others = [rng.randrange(start, end) for _ in range(num_rows - accepted)]
            yield _pass_of(routing, [*range(token, token + accepted), *others], accepted)
            token += accepted


def _pass_of(routing: Routing, tokens: Sequence[int], num_tokens: int) -> Pass:
    chosen = routing.chosen_TLK[list(tokens)]
    found = [np.unique(chosen[:, layer], return_counts=True) for layer in range(chosen.shape[1])]
    blocks = [layer * routing.num_experts + experts for layer, (experts, _) in enumerate(found)]
    return Pass(blocks, [rows for _, rows in found], len(tokens), num_tokens)
