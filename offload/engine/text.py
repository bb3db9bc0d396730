"""Between text and tokens: prompts in, pieces of text out as tokens are accepted, stop strings in
between.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from offload.checkpoint.checkpoint import ModelFiles
from offload.checkpoint.files import read_json
from offload.checkpoint.gguf import require_reader
from offload.checkpoint.sizes import model_shape
from offload.checkpoint.small_files import (
    PROCESSOR_TEMPLATE,
    TEMPLATE,
    TOKENIZER_CONFIG,
    check_tokenizer_files,
    has_tokenizer,
    no_chat_template,
)
from offload.errors import UserError, ensure, refusing
from offload.guarded_process import MOST_CHARS, GuardedProcess, ProgramExceeded, ProgramFailed

# What an incomplete UTF-8 sequence decodes to.
_REPLACEMENT = "\ufffd"
# Tokens decoded before the new ones: some tokenizers glue, or drop a leading space.
_CONTEXT_TOKENS = 8
# Seconds of a processor for one rendering, which takes milliseconds, and of the clock.
_CPU_S = 5
_WAIT_S = 60.0
_TIMES_TOLD = 8  # it may repeat what it was told, and write it as JSON, this many times as long
_SPACE = "\u2581"  # SentencePiece writes a space so


# a `PreTrainedTokenizerBase` of transformers, which takes a second to import
Tokenizer: TypeAlias = Any


def load_tokenizer(directory: os.PathLike[str] | str) -> Tokenizer | None:
    """Return the tokenizer in a folder or GGUF file; None for none. Raises `UserError`."""
    from transformers import AutoTokenizer

    how = {"trust_remote_code": False, "local_files_only": True}
    if os.path.isfile(directory):
        file = Path(directory)
        require_reader(file)
        remedy = "give `config`, the original model's folder or hub id"
        with refusing(f"cannot read the tokenizer in {file.name}", remedy):
            return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, **how)
    if not has_tokenizer(Path(directory)):
        return None
    check_tokenizer_files(Path(directory))
    with refusing(f"cannot read the tokenizer in {directory}", "download its files again"):
        _check_names(Path(directory))
        config = _config_beside(Path(directory))
        tokenizer = AutoTokenizer.from_pretrained(directory, config=config, **how)
    beside = Path(directory) / PROCESSOR_TEMPLATE
    if not tokenizer.chat_template and os.path.isfile(beside):
        tokenizer.chat_template = read_json(beside).get(TEMPLATE)
    return tokenizer


class Vocabulary(NamedTuple):
    """The vocabulary of a model, and ids that begin its own text behind what an encoder reads."""

    vocab_size: int
    start_ids: tuple[int, ...] = ()
    ids: Mapping[str, int] | None = None  # by token; None where no tokenizer tells


def check_vocabulary(
    tokenizer: Tokenizer | None, files: ModelFiles, target: Vocabulary, draft: Vocabulary
) -> None:
    """Do what `require_one_vocabulary` does, by the tokenizers of both as they are loaded."""
    assert files.draft is not None, "there is one to compare with"
    other = load_tokenizer(files.draft.tokenizer_path)
    if tokenizer is not None and other is not None:
        target = target._replace(ids=tokenizer.get_vocab())
        draft = draft._replace(ids=other.get_vocab())
    require_one_vocabulary(files, target, draft)


def require_described_vocabulary(files: ModelFiles) -> None:
    """Do what `require_one_vocabulary` does, as far as files here tell without transformers."""
    both = [one for one in files if one is not None and not one.is_copy]
    if len(both) < 2:
        return
    ids = [_ids_in(one.tokenizer_path) for one in both]
    is_bare = any(one.is_here and not has_tokenizer(one.tokenizer_path) for one in both)
    if is_bare or None not in ids:
        sizes = (model_shape(one).vocab_size for one in both)
        words = (Vocabulary(size, ids=own) for size, own in zip(sizes, ids, strict=True))
        require_one_vocabulary(files, *words)


def require_one_vocabulary(files: ModelFiles, target: Vocabulary, draft: Vocabulary) -> None:
    """Raise `UserError` where an id of the draft means another token than the target's.

    Widths may differ where only padding does, which tokenizers can tell.
    """
    name = files.draft.name if files.draft else ""
    is_same = target.vocab_size == draft.vocab_size
    if target.ids is not None and draft.ids is not None:
        is_exact = not any(one and os.path.isfile(one.tokenizer_path) for one in files)
        is_same = are_same(target.ids, draft.ids, is_exact=is_exact)
    if not is_same:
        raise UserError(
            f"the draft must share the target's vocabulary, {name} has {draft.vocab_size} entries "
            f"of its own against {target.vocab_size}: choose a smaller model of the target's family"
        )
    if target.start_ids != draft.start_ids:
        raise UserError(
            f"{name}: decoder_start_token_id must be the target's, "
            f"{target.start_ids[0]}, got {draft.start_ids[0]}: take another draft, "
            "or mend its generation_config.json"
        )


def are_same(one: Mapping[str, int], other: Mapping[str, int], *, is_exact: bool) -> bool:
    """Return whether two vocabularies give the same meaning to the same ids.

    GGUF files pad theirs to the width of the embedding, and their tokenizers are rebuilt (not
    `is_exact`): then the larger must contain the smaller.
    """
    if is_exact:
        return one == other
    small, large = sorted((one, other), key=len)
    return all(large.get(token) == index for token, index in small.items())


def _ids_in(directory: Path) -> dict[str, int] | None:
    """Return the vocabulary without the tokens that transformers may add, or None if unreadable."""
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    if not os.path.isfile(file):
        return None
    try:
        return dict(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=False))
    # tokenizers raises nothing more specific; loading tells what is wrong
    except Exception:
        return None


def _config_beside(directory: Path) -> Any:
    """Return what the model's config says of its tokenizer; None where there is none.

    Raises `OSError`, `ValueError`. The library takes a file that the disk does not give for none,
    and may choose another class of tokenizer: other ids.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if not os.path.isfile(directory / "config.json"):
        return None
    told = read_json(directory / "config.json")
    try:
        return AutoConfig.for_model(
            str(told.get("model_type")), tokenizer_class=told.get("tokenizer_class")
        )
    # of a kind that it does not know, or that needs more than this
    except (ValueError, StrictDataclassError):
        return None


def _check_names(directory: Path) -> None:
    """Raise `ValueError` for a file elsewhere that transformers would open for tokenizer.json."""
    told = directory / TOKENIZER_CONFIG
    names = read_json(told).get("fast_tokenizer_files", ()) if os.path.exists(told) else ()
    for name in names:
        ensure(
            isinstance(name, str) and Path(name).name == name,
            f"{name!r:.80} is no file beside {told.name}",
        )


def encode_prompt(tokenizer: Tokenizer, prompt: str, *, raw: bool = False) -> list[int]:
    """Return a prompt's token ids, in the chat template where there is one, unless `raw`."""
    if not prompt:
        raise UserError("the prompt is empty: give some text")
    if raw or not tokenizer.chat_template:
        with refusing("the model's tokenizer failed", "download its files again"):
            return list(tokenizer(prompt, verbose=False)["input_ids"])
    return _in_template(tokenizer, [{"role": "user", "content": prompt}], "leave it out with `raw`")


def encode_messages(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> list[int]:
    """Return the token ids of a conversation up to where the model has to answer.

    `tools` are told to templates that know such. Raises `UserError` without a chat template.
    """
    if not tokenizer.chat_template:
        raise no_chat_template()
    return _in_template(
        tokenizer,
        messages,
        "some know no system prompt, all want user and assistant in turn",
        tools,
    )


def render_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
    """Return a conversation in the model's chat template. Raises `ProgramFailed`.

    `how` has arguments of `apply_chat_template`, such as `add_generation_prompt` and `tools`.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str):  # there are several, by name
        template = tokenizer.get_chat_template(tools=how.get("tools"))
    if not isinstance(template, str):
        raise ProgramFailed(f"it must be text, got {template!r:.80}")
    said = [
        {name: value for name, value in message.items() if value is not None}
        for message in messages
    ]
    variables = {**tokenizer.special_tokens_map, **how}
    most_chars = MOST_CHARS + _TIMES_TOLD * len(json.dumps([said, variables], default=str))
    told = {**variables, "chat_template": template, "conversations": [said]}
    return _renderer_of(os.getpid()).ask(told, most_chars)


@cache
def _renderer_of(pid: int) -> GuardedProcess:
    """Return the one process that all models share: an answer depends on nothing but the request.

    Of this pid, since a fork that read the same pipe would take others' answers.
    """
    return GuardedProcess("render", cpu_s=_CPU_S, wait_s=_WAIT_S)


def _in_template(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    remedy: str,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    told = {"tools": [*tools]} if tools else {}
    with refusing("the model's chat template failed", remedy):
        text = _rendered(tokenizer, messages, told)
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]], told: dict[str, Any]) -> str:
    """Return the messages in the tokenizer's template.

    Templates of some models that also see look for lists of parts, and pass over plain text.
    """
    last = str(messages[-1]["content"]).strip()
    failure = None
    try:
        text = render_chat(tokenizer, messages, add_generation_prompt=True, **told)
    except ProgramExceeded:
        raise
    except ProgramFailed as error:
        text = ""
        failure = error
    if failure is None and last in text:
        return text
    parts = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]
    try:
        in_parts = render_chat(tokenizer, parts, add_generation_prompt=True, **told)
    except ProgramFailed:
        in_parts = ""
    if in_parts and last in in_parts:
        return in_parts
    if failure is not None:
        raise failure
    return text


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
