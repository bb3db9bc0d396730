"""Sessions: a text that is taken up from its file goes on as if it had not been laid down, and reads nothing again."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import join, split
from test_chat import CONTEXT, QUESTIONS, open_pair, said
from tiny import finished

import offload
from offload.checkpoint import identity
from offload.checkpoint.identity import PARTS, SUM, ModelIdentity
from offload.engine.decoder import Decoder
from offload.engine.generation import Generation
from offload.engine.load import open_decoder
from offload.engine.request import Request
from offload.engine.session import can_use
from offload.errors import UserError
from offload.model.kv_cache import VALUES
from offload.model.parts import BatchPart
from offload.planning.load_options import LoadOptions
from offload.sampling_options import Sampling

PROMPT = list(range(20, 60))
NUM_NEW, NUM_FIRST = 24, 9


def counted(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows of the text, the root not counted, each sweep of the target has taken in from now on."""
    taken, score = list[int](), decoder.target.score

    def counting(parts: Sequence[BatchPart]) -> Any:
        taken.append(sum(part.num_pending for part in parts))
        return score(parts)

    monkeypatch.setattr(decoder.target, "score", counting)
    return taken


def lay_down(decoder: Decoder, path: Path, num_new: int = NUM_FIRST, **options: Any) -> list[int]:
    """Write a text's beginning and its session: its tokens."""
    ids = decoder.generate(PROMPT, max_new_tokens=num_new, **options).token_ids
    decoder.save_session(path)
    return [*PROMPT, *ids]


def gone_on(decoder: Decoder, tokens: list[int], **options: Any) -> Generation:
    """The rest of a text whose beginning was loaded, or written just before."""
    num_new = NUM_NEW - len(tokens) + len(PROMPT)
    return finished(decoder.run(tokens, Sampling(**options), max_new_tokens=num_new, continues=True))


@pytest.mark.parametrize(
    ("family", "tree", "temperature"),
    [("llama", "8x3", 0.0), ("llama", "none", 0.9), ("gemma3", "grown:16x4", 0.8), ("mixtral", "chain:3", 0.0)],
)
def test_a_text_goes_on_as_if_it_had_not_stopped(
    family: str, tree: str, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"temperature": temperature, "seed": 3}
    with open_pair(family, tmp_path, tree) as decoder:
        whole = decoder.generate(PROMPT, max_new_tokens=NUM_NEW, **options)
        first = lay_down(decoder, tmp_path / "text.session", **options)
    with open_pair(family, tmp_path, tree) as decoder:
        session, taken = decoder.load_session(tmp_path / "text.session"), counted(decoder, monkeypatch)
        assert session.tokens == first and session.messages is None
        result = gone_on(decoder, session.tokens, **options)
    assert first + result.token_ids == PROMPT + whole.token_ids
    assert set(taken) == {0} and len(taken) == result.stats.num_sweeps + 1, "no sweep for the prompt"
    assert result.stats.num_kept_tokens == len(session.tokens) - 1


def test_without_its_keys_and_values_the_prompt_would_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above; and with wrong ones, the text would be another."""
    with open_pair("llama", tmp_path, "8x3") as decoder:
        whole = decoder.generate(PROMPT, max_new_tokens=NUM_NEW).token_ids
        tokens = lay_down(decoder, tmp_path / "text.session")
        taken = counted(decoder, monkeypatch)
        rest = decoder.generate(tokens, max_new_tokens=NUM_NEW - NUM_FIRST).token_ids
        assert whole[NUM_FIRST:] == rest and taken[0] == len(tokens) - 1
        decoder.load_session(tmp_path / "text.session")
        with torch.inference_mode():
            decoder._pool.caches.target.layer_states(0)[VALUES].zero_()
        assert gone_on(decoder, tokens).token_ids != rest


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_conversation_goes_on(temperature: float, tmp_path: Path) -> None:
    path, sampling = tmp_path / "chat.session", Sampling(temperature=temperature, seed=5)
    with open_pair("llama", tmp_path, "8x3") as decoder:
        chat = offload.Chat(decoder, sampling, system="Be.", max_new_tokens=NUM_NEW)
        wanted = [said(chat, question) for question in QUESTIONS]
        kept = chat.turn.result().stats.num_kept_tokens if chat.turn else 0
        chat = offload.Chat(decoder, sampling, system="Be.", max_new_tokens=NUM_NEW)
        assert [said(chat, question) for question in QUESTIONS[:2]] == wanted[:2]
        chat.save(path)
    with open_pair("llama", tmp_path, "8x3") as decoder:
        chat = offload.Chat(decoder, sampling, max_new_tokens=NUM_NEW)
        chat.load(path)
        assert said(chat, QUESTIONS[2]) == wanted[2] and chat.turn is not None
        assert chat.turn.result().stats.num_kept_tokens == kept > 0
        chat.clear()
        assert chat.messages == [{"role": "system", "content": "Be."}], "the system prompt is the file's"


def test_another_draft_is_no_hindrance(tmp_path: Path) -> None:
    with open_pair("llama", tmp_path, "8x3") as decoder:
        whole = decoder.generate(PROMPT, max_new_tokens=NUM_NEW).token_ids
        lay_down(decoder, tmp_path / "text.session")
    target = tmp_path / "target"
    for draft, tree in ((None, "none"), (target, "8x3")):  # the second of the target's weights
        with offload.load(target, draft, "1GiB", tree, context=CONTEXT, dtype="float32", threads=1) as decoder:
            session = decoder.load_session(tmp_path / "text.session")
            kept = {part: cache.length for part, cache in decoder._pool.caches.saved().items()}
            assert kept.pop("target") == len(session.tokens) - 1 and not any(kept.values()), "of another draft nothing"
            result = gone_on(decoder, session.tokens)
            assert result.token_ids == whole[NUM_FIRST:] and result.stats.num_kept_tokens


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    path, line = tmp_path / "text.session", r"cannot write the session to .* \(No space left on device\): name another"
    with open_pair("llama", tmp_path, "8x3") as decoder:
        lay_down(decoder, path, 2)
        before = path.read_bytes()
        decoder.generate(PROMPT[:-1], max_new_tokens=2)
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=line):
            decoder.save_session(path)
        assert path.read_bytes() == before and len(list(tmp_path.glob(".*"))) == 0


@pytest.mark.parametrize("which", ["*.safetensors", "config.json"])
def test_keys_and_values_are_never_said_to_be_of_files_that_came_later(which: str, tmp_path: Path) -> None:
    """The files are replaced while a text is written: it goes on with those that are open, and is kept as of none."""
    with open_pair("llama", tmp_path, "8x3") as decoder:
        decoder.generate(PROMPT, max_new_tokens=NUM_FIRST)
        for path in sorted(tmp_path.rglob(which)):
            path.with_name("other").write_bytes(path.read_bytes())
            path.with_name("other").replace(path)
        line = r"of which weights a session would be: .*\.(safetensors|json) changed since the model was opened"
        with pytest.raises(UserError, match=line):
            decoder.save_session(tmp_path / "text.session")
    assert not (tmp_path / "text.session").exists()


ALONE: dict[str, Any] = {"ram": "1GiB", "tree": "none", "context": CONTEXT, "dtype": "float32", "threads": 1}


@pytest.mark.parametrize("has_samples", [True, False])
def test_a_session_of_weights_that_differ_in_one_byte_is_refused(
    has_samples: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_samples:
        monkeypatch.setattr(identity, "_sampled", lambda checkpoint: "0" * 32)
    open_pair("llama", tmp_path, "8x3").close()
    with open_decoder(LoadOptions(tmp_path / "target", **ALONE), Request(is_kept=True)) as decoder:
        lay_down(decoder, tmp_path / "text.session")
    copy = shutil.copytree(tmp_path / "target", tmp_path / "copy")
    with open_decoder(LoadOptions(copy, **ALONE)) as decoder:
        decoder.load_session(tmp_path / "text.session")
    path = sorted(copy.glob("*.safetensors"))[1]
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"computed with another model \(weights differ\)"):
        open_decoder(LoadOptions(copy, **ALONE), Request(session=tmp_path / "text.session"))


SAME = ModelIdentity(dict.fromkeys(PARTS, "a"), {SUM: "1" * 32})


@pytest.mark.parametrize(
    ("saved", "dtype", "is_taken"),
    [
        (SAME, "float32", True),
        (SAME, "bfloat16", False),
        (SAME._replace(parts={**SAME.parts, "weights": "b"}), "float32", False),
        (SAME._replace(proofs={SUM: "2" * 32}), "float32", False),
        (SAME._replace(proofs={"files": "3"}), "float32", False),
        (None, "float32", False),
    ],
    ids=["same", "another type", "other weights", "another sum", "nothing proves it", "no draft"],
)
def test_states_are_taken_of_the_same_weights_in_the_same_type(
    saved: ModelIdentity | None, dtype: str, is_taken: bool
) -> None:
    mine: Any = SimpleNamespace(for_part=lambda _: SAME, dtypes={"draft": "float32"})
    notes = {"draft": json.dumps(saved.as_dict()) if saved else "", "draft_dtype": dtype}
    assert can_use(mine, "draft", notes) == is_taken


# What is refused


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Decoder, Path]]:
    folder = tmp_path_factory.mktemp("saved")
    with open_pair("llama", folder, "8x3") as decoder:
        lay_down(decoder, folder / "sound", 2)
    pair = (folder / "target", folder / "draft")
    with offload.load(*pair, "1GiB", "8x3", context=CONTEXT, dtype="float32", threads=1) as decoder:
        yield decoder, folder / "sound"


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def edit(content: bytes) -> bytes:
        header, data = split(content)
        change(header)
        return join(json.dumps(header).encode(), data)

    return edit


def notes(**changes: str | None) -> Callable[[bytes], bytes]:
    def change(header: dict[str, Any]) -> None:
        noted = {**header["__metadata__"], **changes}
        header["__metadata__"] = {key: value for key, value in noted.items() if value is not None}

    return edited(change)


def of_another(part: str) -> Callable[[bytes], bytes]:
    """The session of a model that has another such part."""

    def change(header: dict[str, Any]) -> None:
        identity = json.loads(header["__metadata__"]["target"])
        header["__metadata__"]["target"] = json.dumps({**identity, part: "0" * 32})

    return edited(change)


def renamed(name: str, other: str) -> Callable[[bytes], bytes]:
    return edited(lambda header: header.update({other: header.pop(name)}))


def reshaped(name: str, shape: Callable[..., list[int]], dtype: str = "F32") -> Callable[[bytes], bytes]:
    """Another shape of the same size."""
    return edited(lambda header: header[name].update(shape=shape(*header[name]["shape"]), dtype=dtype))


def flipped(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 4]) + content[-8:]


def without_a_layer(content: bytes) -> bytes:
    """Without the draft's last one, which lies at the end."""
    header, data = split(content)
    last = f"draft.keys.{max(int(name.rsplit('.', 1)[1]) for name in header if name.startswith('draft'))}"
    gone = [header.pop(name)["data_offsets"][0] for name in (last, last.replace("keys", "values"))]
    return join(json.dumps(header).encode(), data[: min(gone)])


OTHER_FORMAT = "is no offload session, version 2, but {}: name another file"


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (of_another("weights"), r"was computed with another model \(weights differ\): name another file, or"),
        (of_another("tokenizer"), r"was computed with another model \(tokenizer differs\): name another file, or"),
        (notes(target=None), "is broken .it does not tell of which model it is"),
        (notes(target="0" * 64), "is broken .it does not tell of which model it is"),
        (notes(target_dtype="bfloat16"), r"other `dtype` \(bfloat16, not float32\): name another file"),
        (notes(format="x"), OTHER_FORMAT.format("x")),
        (notes(format="offload session, version 1"), OTHER_FORMAT.format("offload session, version 1")),
        (notes(format=None), OTHER_FORMAT.format("something else")),
        (notes(messages=None), "is broken .*messages"),
        (notes(messages="{}"), "is broken .messages are a list"),
        (notes(messages='[{"role": 5, "content": ""}]'), "is broken .a message has a role and a content"),
        (notes(num_turns="many"), "is broken"),
        (notes(draft=None), "is broken .*draft"),
        (flipped, "is broken .its checksum does not fit"),
        (edited(lambda header: header["__metadata__"].pop("crc32")), "is broken .its checksum does not fit"),
        (lambda content: content[:-1], "is broken"),
        (lambda content: content[:5], "is broken"),
        (lambda content: content + bytes(64), "is broken .*belong to no tensor"),
        (lambda content: b"", "is broken"),
        (lambda content: b"\x80\x04" + content, "is broken"),
        (reshaped("target.keys.1", lambda _, g, p, k: [1, 2 * g, p, k // 2]), "is broken .target.keys.1 has shape"),
        (reshaped("draft.keys.1", lambda _, g, p, k: [p, g, 1, k]), "is broken .draft.keys.1 has shape"),
        (reshaped("target.keys.1", lambda _, g, p, k: [1, g, p, 2 * k], "BF16"), "keys.1 has shape .* type BF16"),
        (reshaped("target.keys.1", lambda _, g, p, k: [g, p * k]), "is broken"),
        (reshaped("tokens", lambda p: [p], "F64"), "is broken .tokens are a row"),
        (renamed("target.keys.1", "target.keys.7"), "do not pair"),
        (renamed("target.keys.1", "target.keys.x"), "is broken"),
        (renamed("tokens", "tokenz"), "is broken"),
        (without_a_layer, r"draft has \d layers with keys and values, not \["),
    ],
)
def test_broken_files_are_refused(
    breaks: Callable[[bytes], bytes], words: str, saved: tuple[Decoder, Path], tmp_path: Path
) -> None:
    decoder, sound = saved
    path = tmp_path / "broken"
    path.write_bytes(breaks(sound.read_bytes()))
    with pytest.raises(UserError, match=words) as error:
        decoder.load_session(path)
    assert "\n" not in str(error.value)


def test_a_decoder_goes_on_behind_a_broken_file(saved: tuple[Decoder, Path], tmp_path: Path) -> None:
    decoder, sound = saved
    wanted = decoder.generate(PROMPT, max_new_tokens=2).token_ids
    (tmp_path / "broken").write_bytes(flipped(sound.read_bytes()))
    with pytest.raises(UserError, match="checksum"):
        decoder.load_session(tmp_path / "broken")
    assert decoder.generate(PROMPT, max_new_tokens=2).token_ids == wanted
    decoder.load_session(sound)


@pytest.mark.usefixtures("_no_weights")
def test_a_session_that_cannot_be_used_is_refused_before_weights_are_read(saved: tuple[Decoder, Path]) -> None:
    folder, request = saved[1].parent, Request(PROMPT, max_new_tokens=1, session=saved[1])
    for context, dtype, asked, words in (
        (42, "float32", request, r"has 42 tokens, the context 42: raise `context`"),
        (99, "bfloat16", request, "other `dtype`"),
        (99, "float32", Request(session=folder / "none"), "cannot read the session"),
    ):
        with pytest.raises(UserError, match=words):
            offload.load(folder / "target", ram="1GiB", context=context, dtype=dtype, threads=1, request=asked)
