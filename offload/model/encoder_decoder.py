"""T5 over streamed weights: an encoder reads the prompt once, and every pass is the decoder's.

A text's tokens are its prompt, one start token, and the decoder's output. The cache counts all of
them; transformers' own cache of cross-attention has the prompt's keys and values. Scores get a bias
by distance, which transformers counts in rows. A node of a tree has its depth as position, so the
bias is computed here, together with the tree's mask.

Invariant: a cache's content belongs to the prompt that it names.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.generation_config import start_ids_of
from offload.errors import UserError, require
from offload.kernels.path_attention import Window
from offload.model.attention import tree_mask
from offload.model.kv_cache import KVCache
from offload.model.library import CACHE, DynamicCache, EncoderDecoderCache, cache_in
from offload.model.parts import PassCache
from offload.model.tree_model import Masks, TreeModel


class SourceCache(KVCache):
    """The cache of a decoder behind an encoder.

    Its first positions are those of the prompt, which has no slots here.

    Attributes:
        source: ids of the prompt that the encoder has read.
        hidden_1SD: the encoder's output for them; without a prompt one row of zeros, to time
            passes.
        cross: keys and values of cross-attention, for layers that have run.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.source = list[int]()
        self._is_under_way = False
        self._nothing_11D = torch.zeros(1, 1, width, dtype=dtype, device=device)
        self.read([], self._nothing_11D)

    def read(self, source: list[int], hidden_1SD: Tensor) -> None:
        """Begin a text whose prompt the encoder has turned into `hidden_1SD`."""
        self.hidden_1SD = hidden_1SD
        self.cross = DynamicCache()
        self._end_at(len(source))
        # last: everything else is set when this is
        self.source = source

    @property
    def num_elsewhere(self) -> int:
        """See `KVCache`."""
        return len(self.source)

    @contextmanager
    def passing(self, pass_cache: PassCache) -> Iterator[EncoderDecoderCache]:
        """Yield both caches of a pass; keys that a failed pass left without values are removed."""
        if self._is_under_way:
            self.cross = DynamicCache()
        self._is_under_way = True
        yield EncoderDecoderCache(pass_cache, self.cross)
        # not reached if the pass failed
        self._is_under_way = False

    def clear(self, num_kept: int = 0) -> None:
        """Keep only the first positions; a prompt is dropped whole, since its end affects all of
        it.
        """
        if num_kept < len(self.source):
            self.read([], self._nothing_11D)
        super().clear(num_kept)


class EncoderDecoderModel(TreeModel):
    """A `TreeModel` whose `encode_prompt` runs the encoder; passes run the decoder."""

    def __init__(self, checkpoint: Checkpoint, *args: Any, **kwargs: Any) -> None:
        super().__init__(checkpoint, *args, **kwargs)
        self.start_ids = start_ids_of(checkpoint)
        requirement = (
            f"{checkpoint.name}: decoder_start_token_id must be less than {self.vocab_size}"
        )
        start = self.start_ids[0]
        require(start < self.vocab_size, requirement, start, "mend generation_config.json")
        self._distance_TS = torch.empty(0, 0)
        self._num_scored = 0
        first: Any = self._layers[0]
        attention = first.layer[0].SelfAttention
        head = self.meta_model.get_output_embeddings()
        self._hooks += [
            attention.register_forward_pre_hook(self._give_bias, with_kwargs=True),
            head.register_forward_pre_hook(self._keep_scored),
        ]

    def new_cache(self, num_slots: int, gather: Callable[..., None] | None = None) -> SourceCache:
        """Return an empty cache for one text; its slots are of the decoder's positions."""
        rows = (self.meta_model.config.d_model, self.dtype, self.torch_device)
        return SourceCache(*rows, self.num_layers, num_slots, gather, self.send)

    @torch.inference_mode()
    def encode_prompt(
        self, tokens: Sequence[int], cache: KVCache, begin: Callable[[], None] = lambda: None
    ) -> None:
        """Run the encoder over the tokens before the first start, unless `cache` has read them."""
        assert isinstance(cache, SourceCache), "a cache of this model's"
        start = self.start_ids[0]
        requirement = f"a text must have the start of its decoder, {start}"
        require(start in tokens, requirement, tokens[-8:], "add it")
        source = list(tokens[: tokens.index(start)])
        requirement = "a prompt must have a token before the decoder's start"
        require(bool(source), requirement, tokens[:8], "give one")
        if source == cache.source:
            return
        cache.clear()
        begin()
        # a target may have ids that its draft lacks
        source_1S = torch.tensor([source]).clamp(max=self.vocab_size - 1)
        cache.read(source, self.meta_model.get_encoder()(input_ids=source_1S).last_hidden_state)

    def set_batch_invariant(self, rows: object) -> None:
        """Raise `UserError` unless `rows` is None: no rows are added up by position here."""
        if rows is not None:
            kind = self.meta_model.config.model_type
            raise UserError(f"{kind} models add a bias to their scores")

    def _takes_paths(self) -> bool:
        return False

    def _call(self, token_1T: Tensor, *, logits_to_keep: int = 0, **inputs: Any) -> Any:
        """Run decoder rows over the encoder's states that the cache holds."""
        pass_cache = cache_in(inputs)
        self._num_scored = logits_to_keep
        # without a cache, the rows that the decoder has computed are scored
        cache = None if pass_cache is None else pass_cache.parts[0].cache
        hidden_1SD = torch.empty(0) if cache is None else cache.hidden_1SD
        with nullcontext() if cache is None else cache.passing(pass_cache) as both:
            return self.meta_model(
                decoder_input_ids=token_1T,
                encoder_outputs=(hidden_1SD,),
                use_cache=True,
                **{CACHE: both},
            )

    def _build_masks(self, position_U: Tensor, ancestor_TU: Tensor, cache: KVCache) -> Masks:
        """Return masks of the decoder's positions; note each one's distance from each row."""
        assert isinstance(cache, SourceCache), "a cache of this model's"
        num_source = len(cache.source)
        ancestor_TU = self.send(ancestor_TU)
        prefix = torch.arange(num_source, cache.length, device=position_U.device)
        position_S = torch.cat([prefix, position_U])
        self._distance_TS = position_S - position_U[-len(ancestor_TU) :, None]
        mask = tree_mask(cache.length - num_source, position_U, ancestor_TU, None, self.dtype)
        return dict.fromkeys(self.windows, mask)

    def _give_mask(
        self, window: Window, index: int, layer: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        # the mask is part of the bias, which the first layer passes on to all others
        return args, kwargs

    def _give_bias(self, first: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Add T5's bias for each head, by position instead of row.

        Only the first layer has its table, which is bound by now.
        """
        config = self.meta_model.config
        num_buckets = config.relative_attention_num_buckets
        bucket_TS = buckets(self._distance_TS, num_buckets, config.relative_attention_max_distance)
        bias_1HTS = first.relative_attention_bias(bucket_TS).permute(2, 0, 1)[None]
        return args, {**kwargs, "position_bias": bias_1HTS + self._masks[None]}

    def _keep_scored(self, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Keep only the rows to be scored; T5 would score every row."""
        return (args[0][:, -self._num_scored :], *args[1:])


def buckets(distance_TS: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each distance of a column's position from its row's.

    In the first half each bucket has one distance, in the second ever more, by the logarithm;
    positions ahead count as distance 0 (T5, appendix: relative position embeddings).
    """
    back_TS = (-distance_TS).clamp(min=0)
    num_exact = num_buckets // 2
    share_TS = torch.log(back_TS.float() / num_exact) / math.log(max_distance / num_exact)
    far_TS = num_exact + (share_TS * (num_buckets - num_exact)).to(torch.long)
    return torch.where(back_TS < num_exact, back_TS, far_TS.clamp(max=num_buckets - 1))
