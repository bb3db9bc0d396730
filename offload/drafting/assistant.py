"""Gemma 4's assistants: a small model that keeps no keys, but reads those of the target's last layers.

A row mixes the target's embedding of a token with the target's state before it, or with what the
assistant made of the parent's row. All rows of a tree stand at the root's position and see the
committed tokens' keys and no other row, so a node costs one row, and there is no cache at all.
Names and form: `checkpoint.assistants`, after transformers 5.24 `gemma4_assistant`.

Invariant: keys that are read are of committed tokens alone.

Shape letters, in this file only: E width of the target.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offload.checkpoint.carried import MIXER
from offload.drafting.base import DraftText
from offload.drafting.draft_model import Draft
from offload.drafting.head_model import empty_linear, mixer_shapes, score_apart, stored_numbers
from offload.drafting.lookup import NO_GUESSES, Guesses
from offload.drafting.model_drafter import DraftSetup
from offload.drafting.mtp import CarriedDraft, CarriedDrafter
from offload.model.carried_model import CarriedCache, CarriedModel, add_mixer
from offload.model.kv_cache import KEYS, VALUES, KVCache
from offload.model.parts import BatchPart, causal
from offload.trees.token_tree import TokenTree

_OF_KEYS = ("k_proj", "v_proj", "k_norm", "v_norm")


class AssistantCache(CarriedCache):
    """What is fed to a text's next rows; keys and values are the target's."""

    @property
    def saved(self) -> None:
        """Return None: the draft has no cache to save."""

    def skip_to(self, length: int) -> None:
        """Pass over rows whose states no later row needs."""
        self._end_at(max(self.length, length))

    def can_follow(self, num_positions: int) -> int:
        """Return all where the last token's state is in the log, else where it will be."""
        log = None if self.target is None else self.target.taps
        assert log is not None, "a text has a target"
        is_there = log.first < num_positions <= log.end
        return num_positions if is_there else max(0, num_positions - 1)


class AssistantModel(CarriedModel):
    """Layers that attend to the target's keys, between two projections."""

    _cache_class = AssistantCache
    _lent: dict[str, tuple[Tensor, Tensor]]

    def _adapt(self, meta_model: Any) -> None:
        decoder = meta_model.get_decoder()
        for layer in decoder.layers:
            layer.self_attn.is_kv_shared_layer = True
            layer.self_attn.store_full_length_kv = False
            for name in _OF_KEYS:
                setattr(layer.self_attn, name, None)
        add_mixer(decoder, _Projections(decoder.embed_tokens, mixer_shapes(self.checkpoint)))

    def _name_in_target(self, name: str) -> str:
        return name.replace(f"{MIXER}table.", "model.embed_tokens.")

    @property
    def _fed_width(self) -> int:
        return int(mixer_shapes(self.checkpoint)["post_projection.weight"][0])

    def forward_parts(self, parts: Sequence[BatchPart], *, num_logits: int = 0) -> Tensor:
        """See `TreeModel`; only rows of one text can share a pass."""
        (part,) = parts
        self._lent = self._keys_of(part.cache, int(part.position_U[-1]))
        logits_TV = super().forward_parts(parts, num_logits=num_logits)
        if self._carried.clusters is None:
            return logits_TV
        return self._of_best_clusters(logits_TV)

    def _keys_of(self, cache: KVCache, root: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Return keys and values (1, G, P, K) of the target's layers, by kind, before a position."""
        assert isinstance(cache, AssistantCache), "a cache of this model's"
        lent = dict[str, tuple[Tensor, Tensor]]()
        for kind, layer in self._carried.lent:
            window = self.meta_model.config.sliding_window if kind == "sliding_attention" else None
            if cache.target is None:
                # passes are timed
                lent[kind] = self._no_keys(kind)
                continue
            length = min(cache.target.length, root)
            first = 0 if window is None else max(0, length - window - 1)
            states = cache.target.layer_states(layer)
            both = (cache.target.expanded(states, name, length) for name in (KEYS, VALUES))
            keys, values = (rows[:, :, first:] for rows in both)
            lent[kind] = (keys.to(self.dtype), values.to(self.dtype))
        return lent

    def _no_keys(self, kind: str) -> tuple[Tensor, Tensor]:
        attention = next(
            layer.self_attn
            for layer in self.meta_model.get_decoder().layers
            if layer.self_attn.layer_type == kind
        )
        num_heads = self.meta_model.config.num_attention_heads // attention.num_key_value_groups
        nothing = torch.zeros(1, num_heads, 1, attention.head_dim, dtype=self.dtype)
        return self.send(nothing), self.send(nothing)

    def _masks_of(self, position_U: Tensor, ancestor_TU: Tensor, cache: KVCache) -> Any:
        """Return no masks: only visible keys are lent."""
        return dict.fromkeys(self.windows)

    def _call(self, token_1T: Tensor, **inputs: Any) -> Any:
        return super()._call(token_1T, **inputs, shared_kv_states=self._lent)

    def _mix(self, _: nn.Module, args: Any, embedded_1TD: Tensor) -> Tensor:
        fed_1TE = self._fed_TD[None].to(embedded_1TD)
        mixed_1TD: Tensor = self._mixer(args[0], fed_1TE)
        return mixed_1TD

    def _keep_output(self, _: nn.Module, __: Any, normed_1TD: Tensor) -> None:
        self._normed_TD = normed_1TD[0]
        self._output_TD = self._mixer.post_projection(normed_1TD)[0]

    def _of_best_clusters(self, logits_TV: Tensor) -> Tensor:
        """Let words outside of each row's best clusters have less than all others."""
        assert self._carried.clusters is not None, "words lie in clusters"
        entry, num_best = self._carried.clusters
        score_TC = self._mixer.centroids(self._normed_TD[-len(logits_TV) :])
        num_clusters = score_TC.shape[1]
        if self._cluster_V is None:
            word_V = torch.from_numpy(stored_numbers(self.checkpoint, entry))
            cluster_V = torch.arange(len(word_V)) // (len(word_V) // num_clusters)
            self._cluster_V = self.send(torch.empty_like(cluster_V).scatter_(0, word_V, cluster_V))
        is_best_TC = torch.zeros_like(score_TC, dtype=torch.bool)
        is_best_TC.scatter_(1, score_TC.topk(min(num_best, num_clusters)).indices, True)
        is_best_TV = is_best_TC[:, self._cluster_V]
        least_T1 = logits_TV.masked_fill(~is_best_TV, torch.inf).amin(1, keepdim=True)
        return torch.where(is_best_TV, logits_TV, least_T1 - 1)

    _cluster_V: Tensor | None = None


MODEL = AssistantModel


class _Projections(nn.Module):
    """The target's table, and what leads into the assistant's width and out of it."""

    def __init__(self, table: Any, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        width, num_inputs = shapes["pre_projection.weight"]
        dtype = table.weight.dtype
        target_width = num_inputs // 2
        # scaled as the target's is
        self.table = type(table)(1, 1, None, target_width**0.5)
        rows = table.weight.new_empty(table.num_embeddings, target_width)
        self.table.weight = nn.Parameter(rows, requires_grad=False)
        self.pre_projection = empty_linear(num_inputs, width, dtype)
        self.post_projection = empty_linear(width, target_width, dtype)
        if "centroids.weight" in shapes:
            self.centroids = empty_linear(width, shapes["centroids.weight"][0], dtype)

    def forward(self, token_1T: Tensor, fed_1TE: Tensor) -> Tensor:
        """Return the input of the first layer."""
        mixed_1TD: Tensor = self.pre_projection(torch.cat([self.table(token_1T), fed_1TE], dim=-1))
        return mixed_1TD


@dataclass(frozen=True)
class _AssistantDraft(CarriedDraft):
    """Rows that all stand at the root's position."""

    _cache: AssistantCache

    def _missing(self, tokens: Sequence[int]) -> Tensor:
        self._cache.skip_to(len(tokens) - 2)
        return super()._missing(tokens)

    def _run_committed(self, token_T: Tensor, num_logits: int) -> Tensor:
        root_T = torch.full_like(token_T, self._cache.length + 1)
        rows = (self._known(token_T), root_T, causal(len(token_T)), self._cache)
        logits = self._model.forward(*rows, num_logits=num_logits)
        self._cache.commit(range(len(token_T)))
        return logits

    def run(self, token_W: Tensor, position_U: Tensor, ancestor_WU: Tensor) -> Tensor:
        root_U = torch.full_like(position_U, self._cache.length + 1)
        return super().run(token_W, root_U, ancestor_WU)


class AssistantDrafter(CarriedDrafter):
    """Grows trees with an assistant, each text's by itself: each has keys of its own."""

    def observe(self, tokens: Sequence[int], state: KVCache) -> None:
        """Let go of the prompt's states but the last."""
        assert isinstance(state, AssistantCache), "a cache of this drafter's"
        log = None if state.target is None else state.target.taps
        if log is not None and log.end > log.first:
            log.take(log.end - 1, log.end)

    def propose(
        self, batch: Sequence[DraftText], guesses: Sequence[Guesses] = ()
    ) -> list[TokenTree]:
        """Return a tree for each text."""
        mixed = guesses or [NO_GUESSES] * len(batch)
        texts = zip(batch, mixed, strict=True)
        return [
            tree
            for text, guess in texts
            for tree in super(AssistantDrafter, self).propose([text], [guess])
        ]

    def score(self, tokens: Sequence[int], start: int, state: KVCache) -> Iterator[Tensor]:
        """Yield logits (1, V), see `Proposer`."""
        return score_apart(self, tokens, start, state)

    def _draft(self, state: KVCache) -> Draft:
        assert isinstance(state, AssistantCache), "a cache of this drafter's"
        return _AssistantDraft(self.model, self._vocab_size, state)


def open_proposer(setup: DraftSetup) -> AssistantDrafter:
    """Return the drafter of a model that is bound for good."""
    return AssistantDrafter(*setup)
