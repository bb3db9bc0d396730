"""Tokens by themselves, as clients are told of them: text, bytes, chances, and the tree that a pass has scored.

A token's text alone may be half a character; its bytes are exact. Byte-level vocabularies write each byte as a
character of their own (GPT-2's table), SentencePiece's write some as `<0xE6>` and a space as a block.
"""

from collections.abc import Sequence, Set
from functools import cached_property, lru_cache
from typing import Any

from offload.engine.logprobs import TokenLogprob
from offload.engine.sequence import PassFigures
from offload.engine.text import Tokenizer

_SPACE = "\u2581"  # SentencePiece's
_LEAST = -9999.0  # in place of minus infinity, which JSON has no word for


class TokenNames:
    """What the tokens of one vocabulary are called; those that end a text are no part of it, and not told of."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Set[int]) -> None:
        self._tokenizer, self._end_ids = tokenizer, end_ids
        self.text = lru_cache(maxsize=1 << 14)(self._text)  # a tree has hundreds of tokens, and passes have trees

    def of_chat(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Of `TokenLogprob`s, as chat completions have them."""
        return [
            {**self._named(one.token, one.logprob), "top_logprobs": [self._named(*pair) for pair in one.top]}
            for one in logprobs
            if one.token not in self._end_ids
        ]

    def of_completion(self, logprobs: Sequence[TokenLogprob], num_chars: int) -> dict[str, Any]:
        """Of `TokenLogprob`s, as plain completions have them, behind so many characters of text."""
        logprobs = [one for one in logprobs if one.token not in self._end_ids]
        tokens, offsets = [self.text(one.token) for one in logprobs], list[int]()
        for token in tokens:
            offsets.append(num_chars)
            num_chars += len(token)
        tops = [{self.text(token): _finite(number) for token, number in one.top} for one in logprobs]
        own = [_finite(one.logprob) for one in logprobs]
        return {"tokens": tokens, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets}

    def told(self, passed: PassFigures) -> dict[str, Any]:
        """What a pass did, for the page: its tree with the text of each node, and what it took."""
        return {
            "parents": passed.parents,
            "tokens": [self.text(token) for token in passed.tokens],
            "accepted": passed.accepted,
            "num_texts": passed.num_texts,
            "draft_s": passed.draft_s,
            "sweep_s": passed.sweep_s,
            "stall_s": passed.moved.stall_s,
            "num_bytes": passed.moved.num_bytes,
        }

    def bytes_of(self, token: int) -> bytes:
        """What a token adds to a text."""
        raw = self._tokenizer.convert_ids_to_tokens(token) or ""
        if self._byte_of and all(char in self._byte_of for char in raw):
            return bytes(self._byte_of[char] for char in raw)
        if len(raw) == 6 and raw.startswith("<0x") and raw.endswith(">"):
            return bytes([int(raw[3:5], 16)])
        return raw.replace(_SPACE, " ").encode()

    def _text(self, token: int) -> str:
        return self.bytes_of(token).decode(errors="replace")

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": _finite(logprob), "bytes": list(self.bytes_of(token))}

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """The byte that a character stands for; empty for vocabularies that do not write bytes so."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        is_byte_level = backend is None or "ByteLevel" in repr(backend.decoder)
        return {char: byte for byte, char in bytes_to_unicode().items()} if is_byte_level else {}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
