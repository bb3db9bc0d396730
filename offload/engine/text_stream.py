"""From tokens to text: pieces as tokens are accepted, and stop strings in between.

Special tokens mark places and are no text: stop strings are looked for with them, what is handed
out as text is without, and `segments` has both apart.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from offload.engine.tokenizer import TOKENIZER_FAILED, Tokenizer
from offload.errors import refusing
from offload.words.parts import Special

# What an incomplete UTF-8 sequence decodes to.
_REPLACEMENT = "\ufffd"
# Tokens decoded before the new ones: some tokenizers glue, or drop a leading space.
_CONTEXT_TOKENS = 8
_MOST_TOKENS = 128  # that are decoded again with those of a pass
_SPACE = "\u2581"  # SentencePiece writes a space so


class TokenPieces:
    """What each token of a vocabulary adds to a text, as bytes and as text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """Return the text of a token, with U+FFFD for incomplete characters."""
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


class MarkedText(NamedTuple):
    """A text with its special tokens: `spans` are where they stand, [first, end), in order."""

    text: str
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def has_words(self) -> bool:
        """Return True if there is more than special tokens."""
        return len(self.text) > sum(end - first for first, end in self.spans)

    def between(self, first: int, end: int) -> list[str]:
        """Return the segments of a part; a special token that is cut is left out."""
        segments = list[str]()
        place = first
        for lo, hi in self.spans:
            if hi > first and lo < end:
                segments.append(self.text[place : max(lo, place)])
                segments += [Special(self.text[lo:hi])] if first <= lo and hi <= end else []
                place = hi
        segments.append(self.text[place:end])
        return [segment for segment in segments if segment]


class TextStream:
    """Turns tokens into text, handed out once characters are whole and no stop string can begin
    there.

    A character that the prompt begins is new text if new tokens complete it. What a push decodes
    are the last tokens, the window, however long the text is. Places count special tokens' texts.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest = max((len(stop_text) - 1 for stop_text in self._stop), default=0)
        self._byte_of = _byte_tokens(tokenizer)
        self._special = special_tokens(tokenizer)
        # what a token adds to a text; results hold this, and not the stream
        self.text_of: Callable[[int], str | None] = (
            _no_text if tokenizer is None else TokenPieces(tokenizer).text
        )
        self.tokens: list[int] = []  # that were pushed, up to the one that completed a stop string
        self._segments: list[str] = []  # that were handed out
        self.stopped_by = ""  # the stop string that has ended the text
        # the window: its first token, the tokens before it, and the length of its text handed out
        self._first = 0
        self._context = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._num_shown = 0
        # where its special tokens stand, by their index
        self._places = dict[int, int]()
        self._most_tokens = _MOST_TOKENS

    @property
    def text(self) -> str:
        """Return the text that was handed out."""
        return plain_text(self._segments)

    @property
    def num_segments(self) -> int:
        """Return the number of segments that were handed out."""
        return len(self._segments)

    def segments_from(self, first: int) -> tuple[str, ...]:
        """Return the text that was handed out from this segment on, special tokens included."""
        return tuple(self._segments[first:])

    def push(self, tokens: Sequence[int]) -> tuple[str, bool]:
        """Take new tokens; return the piece that has become certain, and whether a stop came."""
        known = self.tokens[self._first :]
        window = [*known, *tokens]
        marked = self._marked(self._context, window, self._places)
        settled = self._settled(marked)
        if not self._stops_in(settled):
            self.tokens += tokens
            piece = self._hand_out(marked, self._certain(marked, settled))
            self._move_on(window, marked)
            return piece, False
        for end in range(len(known), len(window) + 1):
            marked = self._marked(self._context, window[:end], self._places)
            settled = self._settled(marked)
            if stops := self._stops_in(settled):
                break
        self.tokens += window[len(known) : end]
        place, self.stopped_by = min(stops)
        return self._hand_out(marked, place), True

    def finish(self) -> str:
        """Return the last piece, incomplete characters included."""
        marked = self._window()
        return self._hand_out(marked, len(marked.text))

    def whole(self) -> str:
        """Return all text so far, what is still held back included."""
        return plain_text(self.whole_segments())

    def whole_segments(self) -> tuple[str, ...]:
        """Return the whole text, with special tokens."""
        marked = self._window()
        return (*self._segments, *marked.between(self._num_shown, len(marked.text)))

    def _window(self) -> MarkedText:
        return self._marked(self._context, self.tokens[self._first :], self._places)

    def _hand_out(self, marked: MarkedText, end: int) -> str:
        """Hand out the window's text up to a place."""
        segments = marked.between(self._num_shown, end)
        self._segments += segments
        self._num_shown = max(self._num_shown, end)
        return plain_text(segments)

    def _settled(self, marked: MarkedText) -> str:
        """Return the window's text as far as no later token changes it."""
        return marked.text.rstrip(_REPLACEMENT)

    def _stops_in(self, settled: str) -> list[tuple[int, str]]:
        """Return where stop strings begin: nowhere in what was handed out, see `_certain`."""
        places = ((settled.find(stop, self._num_shown), stop) for stop in self._stop)
        return [(place, stop) for place, stop in places if place >= 0]

    def _certain(self, marked: MarkedText, settled: str) -> int:
        """Return up to where no stop string can begin, and no special token is cut."""
        num_new = max(0, len(settled) - self._num_shown)
        for size in range(min(self._longest, num_new), 0, -1):
            if any(stop.startswith(settled[-size:]) for stop in self._stop):
                end = len(settled) - size
                return next((lo for lo, hi in marked.spans if lo < end < hi), end)
        return max(len(settled), self._num_shown)

    def _move_on(self, window: list[int], marked: MarkedText) -> None:
        """Let a long window begin later, behind text that was handed out, where that is the same.

        It is where the parts make up the whole: then no character lies over the border, and what a
        tokenizer does at the beginning of a text was done to the tokens before it.
        """
        if len(window) < self._most_tokens:
            return
        # one of this many neighbours is a border: characters have four bytes at most
        for middle in range(len(window) // 2, len(window) // 2 - 4, -1):
            before = self._marked(self._context, window[:middle], self._places).text
            if len(before) > self._num_shown:
                continue
            context = [*self._context, *window[:middle]][-_CONTEXT_TOKENS:]
            places = dict[int, int]()
            behind = self._marked(context, window[middle:], places)
            if behind.has_words and before + behind.text == marked.text:
                self._first += middle
                self._places = places
                self._context = context
                self._num_shown -= len(before)
                self._most_tokens = _MOST_TOKENS
                return
        self._most_tokens = len(window) + len(window) // 4

    def _marked(
        self, context: Sequence[int], tokens: Sequence[int], places: dict[int, int]
    ) -> MarkedText:
        """Return the text that tokens add behind those before them, special tokens in between.

        `places` has where special tokens stand in the text without them, as far as that is known.
        """
        text = self._text_behind(context, tokens)
        if self._special.keys().isdisjoint(tokens):
            return MarkedText(text)
        spans = list[tuple[int, int]]()
        pieces = list[str]()
        num_chars = 0
        place = 0
        for index in (index for index, token in enumerate(tokens) if token in self._special):
            if index not in places:
                before = self._text_behind(context, tokens[:index]).rstrip(_REPLACEMENT)
                places[index] = max(place, len(before))
            name = self._special[tokens[index]]
            pieces += [text[place : places[index]], name]
            num_chars += places[index] - place
            spans.append((num_chars, num_chars + len(name)))
            num_chars += len(name)
            place = places[index]
        return MarkedText("".join(pieces) + text[place:], tuple(spans))

    def _text_behind(self, context: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text that tokens add behind those before them."""
        before = self._decode(context)
        text = self._decode([*context, *tokens])
        num_before = len(before)
        if before.endswith(_REPLACEMENT) and not text.startswith(_REPLACEMENT, num_before - 1):
            num_before -= 1
        return text[num_before:]

    def _decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        ids = _as_utf8([*tokens], self._byte_of)
        # Some tokenizers would drop spaces before punctuation afterwards: the text would change
        # behind what was shown.
        with refusing(*TOKENIZER_FAILED):
            return str(
                self._tokenizer.decode(
                    ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
            )


def plain_text(segments: Sequence[str]) -> str:
    """Return segments as text, without special tokens."""
    return "".join(segment for segment in segments if not isinstance(segment, Special))


def special_tokens(tokenizer: Tokenizer | None) -> dict[int, str]:
    """Return the texts of special tokens, by their ids."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {int(index): token.content for index, token in added.items() if token.special}


def _no_text(_: int) -> None:
    """Return nothing: there is no tokenizer."""


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
