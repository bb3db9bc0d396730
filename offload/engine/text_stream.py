"""From tokens to text: pieces as tokens are accepted, and stop strings in between."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby

from offload.engine.tokenizer import Tokenizer
from offload.errors import refusing

# What an incomplete UTF-8 sequence decodes to.
_REPLACEMENT = "\ufffd"
# Tokens decoded before the new ones: some tokenizers glue, or drop a leading space.
_CONTEXT_TOKENS = 8
_SPACE = "\u2581"  # SentencePiece writes a space so


class TokenPieces:
    """What each token of a vocabulary adds to a text, as bytes and as text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """Return the text of a token; what is half a character stands as a replacement."""
        return self.bytes_of(token).decode(errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token."""
        raw: str = self._tokenizer.convert_ids_to_tokens(token) or ""
        if self._byte_of and all(char in self._byte_of for char in raw):
            return bytes(self._byte_of[char] for char in raw)
        if len(raw) == 6 and raw.startswith("<0x") and raw.endswith(">"):
            return bytes([int(raw[3:5], 16)])
        return raw.replace(_SPACE, " ").encode()

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """Return the byte of each character; empty for vocabularies that write bytes otherwise."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        is_byte_level = backend is None or "ByteLevel" in repr(backend.decoder)
        return {char: byte for byte, char in bytes_to_unicode().items()} if is_byte_level else {}


class TextStream:
    """Turns tokens into text, handed out once characters are whole and no stop string can begin
    there.

    A character that the prompt begins is new text if new tokens complete it.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._byte_of = _byte_tokens(tokenizer)
        self._context = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._context_text = self._decode([])
        self._tokens: list[int] = []
        self.text = ""  # what was handed out

    def texts_of(self, tokens: Iterable[int]) -> dict[int, str]:
        """Return what each of these tokens adds to a text; nothing without a tokenizer."""
        if self._tokenizer is None:
            return {}
        pieces = TokenPieces(self._tokenizer)
        return {token: pieces.text(token) for token in {*tokens}}

    def push(self, tokens: Sequence[int]) -> tuple[str, bool]:
        """Take new tokens; return the piece that has become certain, and whether a stop came."""
        known = self._tokens
        whole = [*known, *tokens]
        text = self._settled(whole)
        if not self._stops_in(text):
            self._tokens = whole
            return self._hand_out(self._certain(text)), False
        counts = range(len(known), len(whole) + 1)
        end = next(one for one in counts if self._stops_in(self._settled(whole[:one])))
        text = self._settled(whole[:end])
        self._tokens = whole[:end]
        return self._hand_out(text[: min(self._stops_in(text))]), True

    def finish(self) -> str:
        """Return the last piece, incomplete characters included."""
        return self._hand_out(self.whole())

    def whole(self) -> str:
        """Return all text so far, what is still held back included."""
        return self._text_of(self._tokens)

    @property
    def tokens(self) -> list[int]:
        """Return the pushed tokens up to the one that completed a stop string."""
        return list(self._tokens)

    def _hand_out(self, certain: str) -> str:
        piece = certain[len(self.text) :]
        self.text += piece
        return piece

    def _settled(self, tokens: Sequence[int]) -> str:
        """Return the text of whole characters, which no later token changes."""
        return self._text_of(tokens).rstrip(_REPLACEMENT)

    def _stops_in(self, text: str) -> list[int]:
        """Return where stop strings begin."""
        return [text.find(stop) for stop in self._stop if stop in text]

    def _certain(self, text: str) -> str:
        """Return as much as no stop string can begin in."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                return text[:-size]
        return text

    def _text_of(self, tokens: Sequence[int]) -> str:
        text = self._decode(tokens)
        num_before = len(self._context_text)
        if self._context_text.endswith(_REPLACEMENT) and not text.startswith(
            _REPLACEMENT, num_before - 1
        ):
            num_before -= 1
        return text[num_before:]

    def _decode(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        ids = _as_utf8([*self._context, *tokens], self._byte_of)
        # Some tokenizers would drop spaces before punctuation afterwards: the text would change
        # behind what was shown.
        with refusing("the model's tokenizer failed", "download its files again"):
            return str(
                self._tokenizer.decode(
                    ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
            )


def _byte_tokens(tokenizer: Tokenizer | None) -> dict[int, int]:
    """Return bytes of tokens such as `<0xE6>`; empty where bytes are written otherwise."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if tokenizer is None or "ByteFallback" not in repr(getattr(backend, "decoder", None)):
        return {}
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = tokenizer.convert_tokens_to_ids(names)
    # None stands for a name that it lacks, where it has no token for what is unknown
    is_whole = None not in tokens and tokenizer.convert_ids_to_tokens(tokens) == names
    return {token: byte for byte, token in enumerate(tokens)} if is_whole else {}


def _as_utf8(ids: list[int], byte_of: Mapping[int, int]) -> list[int]:
    """Return the tokens with replacement characters for bytes that are no UTF-8, each by itself.

    A tokenizer would replace all byte tokens that stand together, complete characters included.
    """
    if byte_of.keys().isdisjoint(ids):
        return ids
    token_of = {byte: token for token, byte in byte_of.items()}
    mended = list[int]()
    for is_byte, run in groupby(ids, byte_of.__contains__):
        if is_byte:
            raw = bytes(byte_of[token] for token in run)
            mended += [token_of[byte] for byte in raw.decode(errors="replace").encode()]
        else:
            mended += run
    return mended
