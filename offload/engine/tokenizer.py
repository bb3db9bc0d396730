"""Tokenizers: read from files, compared with the draft's, and given prompts and conversations."""

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
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
from offload.errors import HostFault, UserError, ensure, refusing
from offload.guarded_process import MOST_CHARS, GuardedProcess, ProgramExceeded, ProgramFailed

# how `refusing` tells of it
TOKENIZER_FAILED = ("the model's tokenizer failed", "download its files again", HostFault)
# Seconds of a processor for one rendering, which takes milliseconds, and of the clock.
_CPU_S = 5
_WAIT_S = 60.0
_TIMES_TOLD = 8  # it may repeat what it was told, and write it as JSON, this many times as long


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
        with refusing(*TOKENIZER_FAILED):
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
