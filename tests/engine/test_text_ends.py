"""Where a text ends, at a token, a length or a stop string: at the same place whatever tree and bursts brought it.

Why: what is shown in pieces cannot be taken back. Invariant: no character is broken, nothing of a stop string is shown.
"""

import codecs
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from reciting import NUM_SAID, PIECES, PROMPT, SAID, TREES, open_decoder
from tiny import save_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from offload.engine.text import TextStream


def test_end_token_stops(ender: Path) -> None:
    with open_decoder(ender) as decoder:
        for tree in TREES:
            result = decoder.generate(PROMPT, tree=tree)
            assert result.finish_reason == "stop" and result.text == SAID
            assert len(result.token_ids) == NUM_SAID + 1 and result.token_ids[-1] == 2, "the end is a token, not text"


def test_length_stops_inside_a_burst(looper: Path) -> None:
    with open_decoder(looper) as decoder:
        for num_tokens in range(1, 14):
            results = [decoder.generate(PROMPT, max_new_tokens=num_tokens, tree=tree) for tree in TREES]
            assert {len(result.token_ids) for result in results} == {num_tokens}
            assert {result.finish_reason for result in results} == {"length"}
            assert len({result.text for result in results}) == 1


STOPS = [
    (("wör",), " Hello "),  # begins and ends within tokens
    (("o wörld 日",), " Hell"),  # over seven tokens, and a character in three parts
    (("\n",), " Hello wörld 日 😀!"),
    ((" ",), ""),
    (("never said",), SAID),
    (("😀", "日"), " Hello wörld "),  # the order in which they are given does not matter
    (("日", "😀"), " Hello wörld "),
    (("lo w", "o"), " Hell"),  # the first one to be complete counts, not the first one to begin
    (("😀!\n", "Hello there"), " Hello wörld 日 "),
]


def test_stop_strings_end_every_tree_at_the_same_place(ender: Path) -> None:
    with open_decoder(ender) as decoder:
        for stops, text in STOPS:
            results = [decoder.generate(PROMPT, stop=stops, tree=tree) for tree in TREES]
            pieces = ["".join(decoder.stream(PROMPT, stop=stops, tree=tree)) for tree in TREES]
            assert {result.text for result in results} == {text}
            assert set(pieces) == {text}, "nothing of a stop string was shown before it was complete"
            assert len({tuple(result.token_ids) for result in results}) == 1
            assert {result.finish_reason for result in results} == {"stop"}


# Text in pieces


@pytest.fixture(scope="session")
def stream_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TextStream]:
    tokenizer = save_tokenizer(tmp_path_factory.mktemp("tokenizer"), PIECES)
    return lambda stop=(): TextStream(tokenizer, tokenizer("äöü 日:")["input_ids"], stop)


def bursts(tokens: list[int], rng: random.Random) -> Iterator[list[int]]:
    while tokens:
        length = rng.randrange(1, 6)
        yield tokens[:length]
        tokens = tokens[length:]


def test_bytes_that_are_no_text_are_shown_once_it_is_certain(
    stream_of: Callable[..., TextStream], tmp_path: Path
) -> None:
    tokenizer = save_tokenizer(tmp_path)
    lone, letter = tokenizer("日")["input_ids"][0], tokenizer("a")["input_ids"][0]
    stream = stream_of()
    assert [stream.push([token])[0] for token in (lone, letter, lone)] == ["", "\ufffda", ""]
    assert stream.whole() == "\ufffda\ufffd" and stream.text == "\ufffda", "looking takes nothing"
    assert stream.finish() == "\ufffd"


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2's: words bring their space along, and each byte of what the vocabulary lacks is a token."""
    words = ["<unk>", "<s>", "\u2581", "\u2581a", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    raw = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True))
    spaces = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(spaces)
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", unk_token="<unk>")


SAMPLES = ["é", "日", "😀", "a", "日本", "\ufffd"]


def drawn_bytes(rng: random.Random, num: int) -> bytes:
    """Characters, half ones, and bytes that begin none."""
    raw = [rng.choice(SAMPLES).encode() for _ in range(num)]
    return b"".join(one[rng.choice([0, 0, 1]) : rng.choice([2, 9])] for one in raw)


@pytest.mark.parametrize("is_fallback", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_a_character_that_the_prompt_begins_is_new_text_once_it_is_whole(
    seed: int, is_fallback: bool, tmp_path: Path
) -> None:
    """Else what stands for it is the prompt's, and no part of an answer that has to be valid."""
    rng = random.Random(seed)
    tokenizer = byte_fallback() if is_fallback else save_tokenizer(tmp_path)
    before, after = drawn_bytes(rng, rng.randrange(4)), drawn_bytes(rng, 5)
    names = {b: f"<0x{b:02X}>" if is_fallback else one for b, one in bytes_to_unicode().items()}
    id_of = {byte: token for byte, name in names.items() if (token := tokenizer.get_vocab().get(name)) is not None}
    before, after = (bytes(byte for byte in raw if byte in id_of) for raw in (before, after))
    begun = codecs.getincrementaldecoder("utf-8")(errors="replace")
    begun.decode(before)
    half = begun.getstate()[0]
    joined = (half + after).decode(errors="replace")
    wanted = joined[1:] if half and joined.startswith("\ufffd") else joined
    stream = TextStream(tokenizer, [*tokenizer("a b")["input_ids"], *(id_of[byte] for byte in before)])
    shown = "".join(
        [*(stream.push(burst)[0] for burst in bursts([id_of[byte] for byte in after], rng)), stream.finish()]
    )
    assert shown == stream.whole() == stream.text == wanted
