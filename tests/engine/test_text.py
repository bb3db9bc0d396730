"""Pieces of text that never have to be taken back: characters split over tokens, stop strings split over bursts."""

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from matrix import matrix
from tiny import save_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedTokenizerFast

from offload.declaration import whole_number
from offload.engine.request import Request, samples_of
from offload.engine.text import TextStream, encode_messages, encode_prompt, load_tokenizer
from offload.errors import UserError
from offload.sampling.sampler import Sampler
from offload.sampling_options import MOST_SAMPLES, Sampling

PIECES = ["the", " the", "he", "END", "EN", "D\n", "日", "日本", "é", b"\xe6\x97", b"\xa5x"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<bot>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), PIECES)


@pytest.fixture(scope="module")
def with_spaces() -> PreTrainedTokenizerFast:
    """As SentencePiece has it: a word brings its space along, and the first one loses it when decoded."""
    words = ["<s>", "\u2581Once", "\u2581upon", "\u2581a", "\u2581time", ",", "\u2581", "s"]
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


def test_a_character_is_handed_out_when_it_is_complete(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "é€日😀x"
    stream, seen = TextStream(tokenizer, ids_of(tokenizer, "a")), []
    for token in ids_of(tokenizer, text):
        seen.append(stream.push([token])[0])
    assert seen == ["", "é", "", "", "€", "", "", "日", "", "", "", "😀", "x"]
    assert stream.finish() == ""


def test_a_character_begun_by_the_prompt_is_not_lost(tokenizer: PreTrainedTokenizerFast) -> None:
    """Prompts given as ids may end anywhere."""
    bytes_of_day = ids_of(tokenizer, "日")
    stream = TextStream(tokenizer, [*ids_of(tokenizer, "a"), *bytes_of_day[:2]])
    assert stream.push([]) == ("", False)
    assert stream.push([*bytes_of_day[2:], *ids_of(tokenizer, "b")]) == ("日b", False)


def test_the_space_between_prompt_and_text_is_kept(with_spaces: PreTrainedTokenizerFast) -> None:
    assert with_spaces.decode([2]) == "upon", "the tokenizer drops a leading space: this is what the test is about"
    stream = TextStream(with_spaces, [1])
    assert [stream.push([token])[0] for token in (2, 3, 4, 5)] == [" upon", " a", " time", ","]
    alone = TextStream(with_spaces, [])
    assert alone.push([1, 2])[0] == "Once upon"


def test_spaces_are_not_taken_back(with_spaces: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tokenizers drop the space before punctuation when they decode, which by then has been shown."""
    monkeypatch.setattr(with_spaces, "clean_up_tokenization_spaces", True)
    assert with_spaces.decode([1, 6, 5]) == "Once,", "this is what the test is about"
    stream = TextStream(with_spaces, [1])
    assert "".join(stream.push([token])[0] for token in (6, 5, 2)) == stream.whole() == " , upon"


def test_a_long_prompt_changes_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = ids_of(tokenizer, "日本 é" * 50)
    for cut in range(10):
        stream = TextStream(tokenizer, prompt[: len(prompt) - cut * 3])
        stream.push(ids_of(tokenizer, "the 日x"))
        assert stream.text.endswith("the 日x")


def test_special_tokens_are_not_text(tokenizer: PreTrainedTokenizerFast) -> None:
    stream = TextStream(tokenizer, ids_of(tokenizer, "a"))
    assert stream.push([*ids_of(tokenizer, "b"), tokenizer.eos_token_id, *ids_of(tokenizer, "c")])[0] == "bc"


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
    one = TextStream(tokenizer, ids_of(tokenizer, "a"), STOPS[name])
    many = TextStream(tokenizer, ids_of(tokenizer, "a"), STOPS[name])
    pieces, has_stopped = stream_to_end(one, [[token] for token in tokens])
    assert has_stopped
    assert stream_to_end(many, bursts_of(tokens, rng))[1]
    assert "".join(pieces) == one.text == many.text
    assert one.tokens == many.tokens
    first = min(TEXT.find(stop) + len(stop) for stop in STOPS[name])
    assert one.text == TEXT[: min(TEXT.find(stop) for stop in STOPS[name] if stop in TEXT[:first])]
    assert len(one.tokens) == len(ids_of(tokenizer, TEXT[:first])), "what came later was accepted in vain"


def test_what_may_become_a_stop_is_held_back(tokenizer: PreTrainedTokenizerFast) -> None:
    stream = TextStream(tokenizer, ids_of(tokenizer, "a"), ["END", "EX!"])
    seen = [stream.push(ids_of(tokenizer, letter))[0] for letter in "xENEXyE"]
    assert seen == ["x", "", "", "EN", "", "EXy", ""]
    assert stream.finish() == "E"


def test_a_stop_may_end_before_the_token_does(tokenizer: PreTrainedTokenizerFast) -> None:
    (token,) = (t for t in range(len(tokenizer)) if tokenizer.decode([t]) == " the")
    stream = TextStream(tokenizer, ids_of(tokenizer, "a"), ["th"])
    assert stream.push([*ids_of(tokenizer, "x"), token, token]) == ("x ", True)
    assert stream.tokens == [*ids_of(tokenizer, "x"), token]


def test_a_stop_at_once_leaves_no_text(tokenizer: PreTrainedTokenizerFast) -> None:
    stream = TextStream(tokenizer, ids_of(tokenizer, "END"), ["END"])
    assert stream.push(ids_of(tokenizer, "END")) == ("", True), "the prompt's own does not count"
    assert stream.text == ""


def test_stops_without_text_to_look_into_are_refused() -> None:
    with pytest.raises(UserError, match="no tokenizer: leave it out"):
        Request([1, 2], stop="END").ids(None, 10, 512)


def test_whole_numbers_of_other_libraries_are_taken() -> None:
    sampling = Sampling(temperature=1.0, top_k=np.int64(3), seed=np.int64(2**62))
    assert type(sampling.seed) is type(sampling.top_k) is int
    assert Sampler(sampling, 10).draw(torch.arange(10.0), 3) == Sampler(
        Sampling(temperature=1.0, top_k=3, seed=2**62), 10
    ).draw(torch.arange(10.0), 3)


def test_a_truth_is_a_number_to_every_library() -> None:
    """Torch takes no `True` where it wants one."""
    assert type(whole_number(True, "it")) is int
    with pytest.raises(UserError, match="`stop` must be text"):
        Request([1, 2], stop=torch.tensor(1)).check()  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [0, MOST_SAMPLES + 1, 2**70])
def test_samples_without_end_are_refused(number: int) -> None:
    with pytest.raises(UserError, match="`num_samples` must lie in 1 to"):
        next(samples_of(Request([1, 2]), number))


def test_without_a_tokenizer_there_is_no_text() -> None:
    stream = TextStream(None, [1, 2])
    assert stream.push([3, 4]) == ("", False) and stream.finish() == "" == stream.text


def test_prompts_go_through_the_chat_template_unless_raw(tmp_path: Path) -> None:
    chatty = save_tokenizer(tmp_path, chat_template=TEMPLATE)
    assert chatty.decode(encode_prompt(chatty, "hi")) == "<user>hi<bot>"
    assert chatty.decode(encode_prompt(chatty, "hi", raw=True)) == "hi"
    assert chatty.decode(encode_prompt(load_tokenizer(tmp_path), "hi")) == "<user>hi<bot>"


PARTS = (  # as LLaVA's: what is not a list of parts has none
    "{% for m in messages %}<{{ m.role }}>{% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ c.text }}"
    "{% endfor %}{% endfor %}<bot>"
)
STRICT_PARTS = PARTS.replace("{% for m", "{{ messages[0].content[0].type.upper() }}{% for m", 1)
QUOTED = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}<bot>"


@pytest.mark.parametrize(
    ("template", "told"),
    [(PARTS, '<user>say "hi"<bot>'), (STRICT_PARTS, 'TEXT<user>say "hi"<bot>'), (QUOTED, '"say \\"hi\\""<bot>')],
)
def test_templates_of_models_that_also_see(template: str, told: str, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, chat_template=template)
    assert tokenizer.decode(encode_prompt(tokenizer, 'say "hi"')) == told
    assert tokenizer.decode(encode_messages(tokenizer, [{"role": "user", "content": 'say "hi"'}])) == told


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EAGAIN])
def test_what_the_machine_lacks_is_no_fault_of_a_template(number: int, tmp_path: Path) -> None:
    tokenizer, lacking = save_tokenizer(tmp_path, chat_template=TEMPLATE), OSError(number, os.strerror(number))
    with patch("offload.engine.text.render_chat", side_effect=lacking), pytest.raises(OSError) as told:
        encode_prompt(tokenizer, "hi")
    assert told.value.errno == number and not isinstance(told.value, UserError)


def test_a_processor_keeps_its_template_in_a_file_of_its_own(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(encode_prompt(tokenizer, "hi")) == "<user>hi<bot>"
    with patch.object(type(tokenizer), "get_chat_template", side_effect=NotImplementedError):  # as MistralCommonBackend
        assert tokenizer.decode(encode_prompt(tokenizer, "hi")) == "<user>hi<bot>"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(encode_prompt(tokenizer, "hi")) == "hi!"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(UserError, match=r"chat_template\.json is not valid JSON"):
        load_tokenizer(tmp_path)


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
    monkeypatch.setattr("offload.checkpoint.safetensors.read_object", refuse)
    with pytest.raises(UserError, match=r"cannot read .*config\.json \(Input/output error\)"):
        load_tokenizer(tmp_path)
    monkeypatch.undo()
    (tmp_path / "config.json").unlink()
    assert load_tokenizer(tmp_path) is not None, "a folder that has none is read as before"


def test_without_a_template_the_prompt_is_taken_as_it_is(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.decode(encode_prompt(tokenizer, "hi")) == "hi"
    with pytest.raises(UserError, match="the prompt is empty"):
        encode_prompt(tokenizer, "")


def test_a_checkpoint_may_ship_no_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


CLASSES = [None, "LlamaTokenizerFast", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "of nobody"]


KINDS = ["llama", "qwen2", "gemma3", "gpt_neox", "mistral", "phi3", "nougat", "of nobody", None]


@matrix("kind", KINDS, always=["llama", None], daily=1)
def test_the_class_of_a_tokenizer_is_the_librarys_choice(kind: str | None, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    told = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for named in CLASSES:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(told | {"tokenizer_class": named}))
        for own in (None, "GPT2Tokenizer"):
            config = {"model_type": kind, "tokenizer_class": own} if kind else {"tokenizer_class": own}
            (tmp_path / "config.json").write_text(json.dumps(config))
            wanted = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False, local_files_only=True)
            found = load_tokenizer(tmp_path)
            assert type(found) is type(wanted), (named, own)
            assert found.backend_tokenizer.to_str() == wanted.backend_tokenizer.to_str(), (named, own)


def test_a_kind_of_model_that_its_usual_sizes_do_not_fit(tmp_path: Path) -> None:
    """A config is checked as a whole where it is made: by its kind alone, this one could not be."""
    save_tokenizer(tmp_path)
    text = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4_assistant", "text_config": text}))
    if "gemma4_assistant" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no gemma4_assistant")
    assert type(load_tokenizer(tmp_path)) is type(AutoTokenizer.from_pretrained(tmp_path, local_files_only=True))
