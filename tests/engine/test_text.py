"""Pieces of text that never have to be taken back, and where a text ends, whatever tree and bursts brought it."""

import codecs
import errno
import json
import os
import random
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from matrix import matrix
from reciting import NUM_SAID, PROMPT, SAID, TREES, open_decoder
from tiny import save_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from offload import load
from offload.engine.conversation import encode_messages, encode_prompt
from offload.engine.request import Request, samples_of
from offload.engine.text_stream import TextStream
from offload.engine.tokenizer import load_tokenizer
from offload.errors import UserError
from offload.sampling_options import MOST_SAMPLES

PIECES = ["the", " the", "he", "END", "EN", "D\n", "日", "日本", "é", b"\xe6\x97", b"\xa5x"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<bot>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), PIECES)


@pytest.fixture(scope="module")
def with_spaces() -> PreTrainedTokenizerFast:
    """As SentencePiece has it: a word brings its space along, and the first one loses it when decoded."""
    return by_words(["<s>", "\u2581Once", "\u2581upon", "\u2581a", "\u2581time", ",", "\u2581", "s"])


def by_words(words: Sequence[str]) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<s>"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Byte by byte."""
    return list(tokenizer(text)["input_ids"])


def bursts_of(tokens: Sequence[int], rng: np.random.Generator) -> list[list[int]]:
    """Yield the tokens as trees of some size might yield them."""
    bursts, rest = [], list(tokens)
    while rest:
        size = int(rng.integers(1, 6))
        bursts.append(rest[:size])
        rest = rest[size:]
    return bursts


def stream_to_end(stream: TextStream, bursts: Sequence[Sequence[int]]) -> tuple[list[str], bool]:
    pieces = []
    for burst in bursts:
        piece, has_stopped = stream.push(burst)
        pieces.append(piece)
        if has_stopped:
            return pieces, True
    return [*pieces, stream.finish()], False


@matrix("seed", range(20), always=[0], daily=3)
def test_pieces_make_up_the_whole_text(seed: int, tokenizer: PreTrainedTokenizerFast) -> None:
    """This holds for any tokens, valid UTF-8 or not."""
    rng = np.random.default_rng(seed)
    prompt, tokens = ids_of(tokenizer, "Say: "), rng.integers(3, len(tokenizer), 40).tolist()
    stream = TextStream(tokenizer, prompt)
    pieces, has_stopped = stream_to_end(stream, bursts_of(tokens, rng))
    assert not has_stopped
    assert "".join(pieces) == stream.text == stream.whole() == tokenizer.decode(prompt + tokens)[len("Say: ") :]


CHARACTERS = ["", "é", "", "", "€", "", "", "日", "", "", "", "😀", "x"]
STREAMS: dict[str, tuple[str, int, tuple[str, ...], list[int], list[str], str | None]] = {
    # text, how many tokens of it are the prompt's, stops, bursts, what each shows, the rest, or None behind a stop
    "a character when it is complete": ("aé€日😀x", 1, (), [1] * 13, CHARACTERS, ""),
    "a character that the prompt begins": ("a日b", 3, (), [0, 2], ["", "日b"], ""),
    "no special tokens": ("ab</s>c", 1, (), [3], ["bc"], ""),
    "what may become a stop": ("axENEXyE", 1, ("END", "EX!"), [1] * 7, ["x", "", "", "EN", "", "EXy", ""], "E"),
    "a special token that is a stop": ("ab</s>c", 1, ("</s>",), [1, 2], ["b", ""], None),
    "a stop around a special token": ("ab</s>cd", 1, ("b</s>c",), [1, 1, 2], ["", "", ""], None),
    "a special token that no stop is": ("ab</s>c", 1, ("b</s>d",), [1, 1, 1], ["", "", "bc"], ""),
    "a stop at once, not that of the prompt": ("ENDEND", 3, ("END",), [3], [""], None),
}


@pytest.mark.parametrize(("text", "num_prompt", "stops", "sizes", "shown", "rest"), STREAMS.values(), ids=STREAMS)
def test_what_is_shown_and_when(
    text: str, num_prompt: int, stops: tuple[str, ...], sizes: list[int], shown: list[str], rest: str | None,
    tokenizer: PreTrainedTokenizerFast,
) -> None:  # fmt: skip
    tokens = iter(ids_of(tokenizer, text))
    stream = TextStream(tokenizer, [*islice(tokens, num_prompt)], stops)
    seen = [stream.push([*islice(tokens, size)]) for size in sizes]
    assert not [*tokens] and [piece for piece, _ in seen] == shown
    assert [has_stopped for _, has_stopped in seen] == [*[False] * (len(sizes) - 1), rest is None]
    assert rest is None or stream.finish() == rest
    assert stream.text == "".join(shown) + (rest or "")


def test_spaces_between_prompt_and_text_are_kept_and_not_taken_back(
    with_spaces: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tokenizers drop the space before punctuation when they decode, which by then has been shown."""
    assert with_spaces.decode([2]) == "upon", "the tokenizer drops a leading space: this is what the test is about"
    stream = TextStream(with_spaces, [1])
    assert [stream.push([token])[0] for token in (2, 3, 4, 5)] == [" upon", " a", " time", ","]
    alone = TextStream(with_spaces, [])
    assert alone.push([1, 2])[0] == "Once upon"
    monkeypatch.setattr(with_spaces, "clean_up_tokenization_spaces", True)
    assert with_spaces.decode([1, 6, 5]) == "Once,", "and one within the text"
    stream = TextStream(with_spaces, [1])
    assert "".join(stream.push([token])[0] for token in (6, 5, 2)) == stream.whole() == " , upon"


def metaspace() -> PreTrainedTokenizerFast:
    """As T5's: the first token of a text loses its space."""
    return by_words(["<s>", *(f"\u2581{letter}" for letter in "abcde"), *"fghij", "\u2581"])


def joining() -> PreTrainedTokenizerFast:
    """As BERT's: a word that goes on has a mark, and some spaces are dropped."""
    words = ["<s>", "a", "bc", "##d", "##ef", ".", "'", "s", "n", "t", "do"]
    raw = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="<s>"))
    raw.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")


MAKERS: dict[str, Callable[[Path], PreTrainedTokenizerFast]] = {
    "bytes": lambda path: save_tokenizer(path, PIECES),
    "bytes of words": lambda _: byte_fallback(),
    "spaces": lambda _: metaspace(),
    "words that go on": lambda _: joining(),
}


def drawn_tokens(tokenizer: PreTrainedTokenizerFast, num: int, rng: random.Random) -> list[int]:
    """Stretches of characters as they are, of anything, of one token, and of tokens that are no text."""
    known = [*range(len(tokenizer))]
    whole = tokenizer("日本 é 😀 the END a b. do n't", add_special_tokens=False)["input_ids"]
    ends = tokenizer.all_special_ids
    tokens = list[int]()
    while len(tokens) < num:
        most = rng.choice([3, 20, 60])
        tokens += rng.choice([whole, rng.choices(known, k=most), [rng.choice(known)] * most, rng.choices(ends, k=most)])
    return tokens[:num]


@pytest.mark.parametrize("name", MAKERS)
@matrix("seed", range(30), always=[0, 1], daily=3)
def test_a_long_text_is_that_of_all_its_tokens_decoded_at_once(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    tokenizer = MAKERS[name](tmp_path)
    stops = [(), ("END",), ("日本 é 😀 the ENDx", "\ufffd\ufffd\ufffd!"), ("never said", "b. do", "a a a")][seed % 4]
    prompt, tokens = drawn_tokens(tokenizer, rng.randrange(12), rng), drawn_tokens(tokenizer, 400, rng)
    monkeypatch.setattr("offload.engine.text_stream._MOST_TOKENS", 10**9)
    whole = TextStream(tokenizer, prompt, stops)
    bursts = bursts_of(tokens, np.random.default_rng(seed))
    wanted = [whole.push(burst) for burst in bursts]
    monkeypatch.setattr("offload.engine.text_stream._MOST_TOKENS", rng.choice([8, 20, 64]))
    stream = TextStream(tokenizer, prompt, stops)
    for burst, piece in zip(bursts, wanted, strict=True):
        assert stream.push(burst) == piece
        if piece[1]:
            break
        assert stream.whole().startswith(stream.text)
    assert (stream.tokens, stream.text) == (whole.tokens[: len(stream.tokens)], whole.text[: len(stream.text)])
    if not any(has_stopped for _, has_stopped in wanted):
        assert stream.whole() == whole.whole()
        assert stream.finish() == whole.finish() and stream.text == whole.text


def test_a_long_prompt_changes_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = ids_of(tokenizer, "日本 é" * 50)
    for cut in range(10):
        stream = TextStream(tokenizer, prompt[: len(prompt) - cut * 3])
        stream.push(ids_of(tokenizer, "the 日x"))
        assert stream.text.endswith("the 日x")


STOPS = {
    "one token": ("D",),
    "several tokens": ("END",),
    "a prefix that comes to nothing": ("the!",),
    "one inside another": ("ENDS", "ND"),
    "two that end together": ("END", "D"),
    "a longer one around it": ("the t", "he"),
    "of other bytes": ("本",),
}
TEXT = "the then the EN the END of 日本 ENDS the!"


@pytest.mark.parametrize("name", STOPS)
@matrix("seed", range(10), daily=1)
def test_stops_do_not_depend_on_how_tokens_arrive(name: str, seed: int, tokenizer: PreTrainedTokenizerFast) -> None:
    rng, tokens = np.random.default_rng(seed), ids_of(tokenizer, TEXT)
    single = TextStream(tokenizer, ids_of(tokenizer, "a"), STOPS[name])
    many = TextStream(tokenizer, ids_of(tokenizer, "a"), STOPS[name])
    pieces, has_stopped = stream_to_end(single, [[token] for token in tokens])
    assert has_stopped
    assert stream_to_end(many, bursts_of(tokens, rng))[1]
    assert "".join(pieces) == single.text == many.text
    assert single.tokens == many.tokens
    first = min(TEXT.find(stop) + len(stop) for stop in STOPS[name])
    assert single.text == TEXT[: min(TEXT.find(stop) for stop in STOPS[name] if stop in TEXT[:first])]
    assert len(single.tokens) == len(ids_of(tokenizer, TEXT[:first])), "what came later was accepted in vain"


@pytest.mark.parametrize("sizes", [[1] * 7, [2, 5], [7]], ids=str)
def test_half_a_character_is_no_stop_string(sizes: list[int], tokenizer: PreTrainedTokenizerFast) -> None:
    """Until the next token tells, bytes may be the beginning of a character; then they may be none."""
    tokens = ids_of(tokenizer, "日x")
    stream = TextStream(tokenizer, ids_of(tokenizer, "a"), ["\ufffd"])
    given = iter([*tokens, tokens[0], *ids_of(tokenizer, "yz")])
    assert any(stream.push([*islice(given, size)])[1] for size in sizes)
    assert stream.text == "日x" and stream.tokens == [*tokens, tokens[0], *ids_of(tokenizer, "y")]


def test_a_stop_may_end_before_the_token_does(tokenizer: PreTrainedTokenizerFast) -> None:
    (token,) = (t for t in range(len(tokenizer)) if tokenizer.decode([t]) == " the")
    stream = TextStream(tokenizer, ids_of(tokenizer, "a"), ["th"])
    assert stream.push([*ids_of(tokenizer, "x"), token, token]) == ("x ", True)
    assert stream.tokens == [*ids_of(tokenizer, "x"), token]


@pytest.mark.parametrize("number", [0, MOST_SAMPLES + 1, 2**70])
def test_samples_without_end_are_refused(number: int) -> None:
    with pytest.raises(UserError, match="`num_samples` must lie in 1 to"):
        next(samples_of(Request([1, 2]), number))


def test_without_a_tokenizer_there_is_no_text(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    stream = TextStream(None, [1, 2])
    assert stream.push([3, 4]) == ("", False) and stream.finish() == "" == stream.text
    with pytest.raises(UserError, match="no tokenizer: leave it out"):
        Request([1, 2], stop="END").ids(None, 10, 512)


@pytest.mark.parametrize(
    ("kind", "stated", "is_recut"),
    [("qwen2", "TokenizersBackend", True), ("qwen2", "Qwen2Tokenizer", False), ("llama", "TokenizersBackend", False)],
)
def test_a_class_that_cuts_otherwise_than_the_file_is_told_of(
    kind: str, stated: str, is_recut: bool, tmp_path: Path
) -> None:
    """transformers 5.24 passes over the class that the files of a Qwen2 state."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(["In 1999"] * 9, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(kind, vocab_size=words.get_vocab_size(), num_key_value_heads=2, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": stated}))
    with load(tmp_path, None) as decoder:
        assert any("cuts texts otherwise" in note for note in decoder.notes) == is_recut


def test_prompts_go_through_the_chat_template_unless_raw(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    chatty = save_tokenizer(tmp_path, chat_template=TEMPLATE)
    assert chatty.decode(encode_prompt(chatty, "hi")) == "<user>hi<bot>"
    assert chatty.decode(encode_prompt(chatty, "hi", raw=True)) == "hi"
    assert chatty.decode(encode_prompt(load_tokenizer(tmp_path), "hi")) == "<user>hi<bot>"
    assert tokenizer.decode(encode_prompt(tokenizer, "hi")) == "hi", "a model without a template takes it as it is"
    with pytest.raises(UserError, match="the prompt is empty"):
        encode_prompt(tokenizer, "")


PARTS = (  # as LLaVA's: what is not a list of parts has none
    "{% for m in messages %}<{{ m.role }}>{% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ c.text }}"
    "{% endfor %}{% endfor %}<bot>"
)
STRICT_PARTS = PARTS.replace("{% for m", "{{ messages[0].content[0].type.upper() }}{% for m", 1)
QUOTED = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}<bot>"


@pytest.mark.parametrize(
    ("template", "prompt"),
    [(PARTS, '<user>say "hi"<bot>'), (STRICT_PARTS, 'TEXT<user>say "hi"<bot>'), (QUOTED, '"say \\"hi\\""<bot>')],
)
def test_templates_of_models_that_also_see(template: str, prompt: str, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, chat_template=template)
    assert tokenizer.decode(encode_prompt(tokenizer, 'say "hi"')) == prompt
    assert tokenizer.decode(encode_messages(tokenizer, [{"role": "user", "content": 'say "hi"'}])) == prompt


def test_a_config_that_the_disk_does_not_give_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its model type the tokenizer's class is chosen; without one, ids may be others."""
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    kind = type(load_tokenizer(tmp_path))

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("transformers.configuration_utils.PreTrainedConfig._dict_from_json_file", refuse)
    assert type(load_tokenizer(tmp_path)) is kind
    monkeypatch.setattr("offload.checkpoint.files.read_object", refuse)
    with pytest.raises(UserError, match=r"cannot read .*config\.json \(Input/output error\)"):
        load_tokenizer(tmp_path)
    monkeypatch.undo()
    (tmp_path / "config.json").unlink()
    assert load_tokenizer(tmp_path) is not None, "a folder that has none is read as before"


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


SAID_STOPS = [
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
        for stops, text in SAID_STOPS:
            results = [decoder.generate(PROMPT, stop=stops, tree=tree) for tree in TREES]
            pieces = ["".join(decoder.stream(PROMPT, stop=stops, tree=tree)) for tree in TREES]
            assert {result.text for result in results} == {text}
            assert set(pieces) == {text}, "nothing of a stop string was shown before it was complete"
            assert len({tuple(result.token_ids) for result in results}) == 1
            assert {result.finish_reason for result in results} == {"stop"}


def test_bytes_that_are_no_text_are_shown_once_it_is_certain(tokenizer: PreTrainedTokenizerFast) -> None:
    lone, letter = ids_of(tokenizer, "日")[0], ids_of(tokenizer, "a")[0]
    stream = TextStream(tokenizer, ids_of(tokenizer, "äöü 日:"))
    assert [stream.push([token])[0] for token in (lone, letter, lone)] == ["", "\ufffda", ""]
    assert stream.whole() == "\ufffda\ufffd" and stream.text == "\ufffda", "looking takes nothing"
    assert stream.finish() == "\ufffd"


def byte_fallback(num_bytes: int = 256, unknown: str | None = "<unk>") -> PreTrainedTokenizerFast:
    """As Llama 2's: words bring their space along, and each byte of what the vocabulary lacks is a token."""
    words = ["<unk>", "<s>", "\u2581", "\u2581a", "b", *(f"<0x{byte:02X}>" for byte in range(num_bytes))]
    raw = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True))
    spaces = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(spaces)
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", unk_token=unknown)


@pytest.mark.parametrize("unknown", ["<unk>", None])
@pytest.mark.parametrize("num_bytes", [0, 255])
def test_a_vocabulary_may_lack_bytes_and_what_stands_for_the_unknown(num_bytes: int, unknown: str | None) -> None:
    """As transformers 5.17 makes of a file of llama.cpp whose tokens are not Llama's own."""
    stream = TextStream(byte_fallback(num_bytes, unknown), [2])
    assert stream.push([3, 4])[0] + stream.finish() == " ab"


SAMPLES = ["é", "日", "😀", "a", "日本", "\ufffd"]


def drawn_bytes(rng: random.Random, num: int) -> bytes:
    """Characters, half ones, and bytes that begin none."""
    raw = [rng.choice(SAMPLES).encode() for _ in range(num)]
    return b"".join(character[rng.choice([0, 0, 1]) : rng.choice([2, 9])] for character in raw)


@pytest.mark.parametrize("is_fallback", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_a_character_that_the_prompt_begins_is_new_text_once_it_is_whole(
    seed: int, is_fallback: bool, tmp_path: Path
) -> None:
    """Else what stands for it is the prompt's, and no part of an answer that has to be valid."""
    rng = random.Random(seed)
    tokenizer = byte_fallback() if is_fallback else save_tokenizer(tmp_path)
    before, after = drawn_bytes(rng, rng.randrange(4)), drawn_bytes(rng, 5)
    names = {b: f"<0x{b:02X}>" if is_fallback else value for b, value in bytes_to_unicode().items()}
    id_of = {byte: token for byte, name in names.items() if (token := tokenizer.get_vocab().get(name)) is not None}
    before, after = (bytes(byte for byte in raw if byte in id_of) for raw in (before, after))
    begun = codecs.getincrementaldecoder("utf-8")(errors="replace")
    begun.decode(before)
    half = begun.getstate()[0]
    joined = (half + after).decode(errors="replace")
    wanted = joined[1:] if half and joined.startswith("\ufffd") else joined
    stream = TextStream(tokenizer, [*tokenizer("a b")["input_ids"], *(id_of[byte] for byte in before)])
    pieces, _ = stream_to_end(stream, bursts_of([id_of[byte] for byte in after], np.random.default_rng(seed)))
    assert "".join(pieces) == stream.whole() == stream.text == wanted
