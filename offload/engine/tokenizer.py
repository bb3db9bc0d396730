"""Tokenizers: read from files, and compared with the draft's."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from offload.checkpoint.checkpoint import Checkpoint, ModelFiles
from offload.checkpoint.files import read_json
from offload.checkpoint.gguf import require_reader
from offload.checkpoint.sizes import config_sizes
from offload.checkpoint.small_files import (
    PROCESSOR_TEMPLATE,
    TEMPLATE,
    TOKENIZER_CONFIG,
    check_tokenizer_files,
    has_tokenizer,
)
from offload.errors import HostFault, UserError, ensure, refusing
from offload.units import plural

# Entries in which a draft's vocabulary may differ: added tokens are renamed, and new ones come.
_MOST_FOREIGN = 128
_MOST_FOREIGN_SHARE = 0.05
# how `refusing` tells of it
_REMEDY = "download its files again, or take a model whose tokenizer this transformers reads"
TOKENIZER_FAILED = ("the model's tokenizer failed", _REMEDY, HostFault)
# cut in other places by each family: numbers, contractions, letters, marks, white space
_PROBE = "In 1999 it's  x_1,\n\n\tAND 3.14 (a+b) cafés"
# the class of transformers that takes tokenizer.json as it is
_AS_WRITTEN = "TokenizersBackend"
# a `PreTrainedTokenizerBase` of transformers, which takes a second to import
Tokenizer: TypeAlias = Any


def load_tokenizer(directory: os.PathLike[str] | str) -> Tokenizer | None:
    """Return the tokenizer in a folder or GGUF file, None if it has none. Raises `UserError`."""
    from transformers import AutoTokenizer

    safety = {"trust_remote_code": False, "local_files_only": True}
    if os.path.isfile(directory):
        file = Path(directory)
        require_reader(file)
        remedy = "give `config`, the original model's folder or hub id"
        with refusing(f"cannot read the tokenizer in {file.name}", remedy):
            return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, **safety)
    if not has_tokenizer(Path(directory)):
        return None
    check_tokenizer_files(Path(directory))
    with refusing(f"cannot read the tokenizer in {directory}", _REMEDY):
        _check_names(Path(directory))
        config = _config_beside(Path(directory))
        tokenizer = AutoTokenizer.from_pretrained(directory, config=config, **safety)
    beside = Path(directory) / PROCESSOR_TEMPLATE
    if not tokenizer.chat_template and os.path.isfile(beside):
        tokenizer.chat_template = read_json(beside).get(TEMPLATE)
    return tokenizer


def class_note(directory: Path, tokenizer: Tokenizer | None) -> str | None:
    """Return a line for the user if texts are cut otherwise than tokenizer.json says; None if not.

    For some kinds of models (qwen2) transformers 5.24 passes over the class that the files state,
    and takes vocabulary and merges alone; its own class cuts the text before them.
    """
    file = directory / "tokenizer.json"
    if tokenizer is None or not os.path.isfile(file) or not _states_another(directory, tokenizer):
        return None
    from tokenizers import Tokenizer as FileTokenizer

    written = FileTokenizer.from_file(str(file)).encode(_PROBE, add_special_tokens=False).ids
    if tokenizer(_PROBE, add_special_tokens=False).input_ids == written:
        return None
    return (
        f"transformers takes {type(tokenizer).__name__} for this model, which cuts texts otherwise "
        "than its tokenizer.json says: answers may be worse; the model can be given token ids"
    )


def _states_another(directory: Path, tokenizer: Tokenizer) -> bool:
    """Return True if a class cuts texts that is not the one that the files state."""
    taken = type(tokenizer).__name__
    path = directory / TOKENIZER_CONFIG
    stated = read_json(path).get("tokenizer_class") if os.path.isfile(path) else None
    is_stated = str(stated).removesuffix("Fast") == taken.removesuffix("Fast")
    return stated is not None and not is_stated and taken != _AS_WRITTEN


def tokenizer_end_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the token that ends a text by its tokenizer."""
    end = getattr(tokenizer, "eos_token_id", None)
    return frozenset() if end is None else frozenset((int(end),))


class Vocabulary(NamedTuple):
    """The vocabulary of a model, and ids that begin its own text behind what an encoder reads."""

    vocab_size: int
    start_ids: tuple[int, ...] = ()
    ids: Mapping[str, int] | None = None  # by token; None where no tokenizer tells


def check_vocabulary(
    tokenizer: Tokenizer | None, files: ModelFiles, target: Vocabulary, draft: Vocabulary
) -> tuple[int, ...]:
    """Do what `require_one_vocabulary` does, by the tokenizers of both as they are loaded."""
    other = load_tokenizer(_draft_of(files).tokenizer_path)
    if tokenizer is not None and other is not None:
        target = target._replace(ids=tokenizer.get_vocab())
        draft = draft._replace(ids=other.get_vocab())
    return require_one_vocabulary(files, target, draft)


def _draft_of(files: ModelFiles) -> Checkpoint:
    _, draft = files
    assert draft is not None, "there is one to compare with"
    return draft


def foreign_note(foreign_ids: Sequence[int]) -> str:
    """Return a line for the user about ids that a draft never guesses."""
    num = plural(len(foreign_ids), "token")
    return f"the draft never guesses {num} of its vocabulary: the target has other words there"


def require_described_vocabulary(files: ModelFiles) -> None:
    """Check as `require_one_vocabulary` does, as far as local files allow without transformers."""
    both = [checkpoint for checkpoint in files if checkpoint is not None and not checkpoint.is_copy]
    if len(both) < 2:
        return
    ids = [_ids_in(checkpoint.tokenizer_path) for checkpoint in both]
    is_bare = any(
        checkpoint.is_here and not has_tokenizer(checkpoint.tokenizer_path) for checkpoint in both
    )
    if is_bare or None not in ids:
        sizes = (config_sizes(checkpoint).get("vocab_size", 0) for checkpoint in both)
        words = (
            Vocabulary(size, ids=known_ids) for size, known_ids in zip(sizes, ids, strict=True)
        )
        require_one_vocabulary(files, *words)


def require_one_vocabulary(
    files: ModelFiles, target: Vocabulary, draft: Vocabulary
) -> tuple[int, ...]:
    """Return the ids of the draft that mean another token than the target's: a few may.

    Raises `UserError` for more, or widths that differ where no tokenizers tell whether only padding
    does. Guesses cost time and never text, so ids that differ are left out of them.
    """
    name = _draft_of(files).name
    foreign = tuple[int, ...]()
    requirement = "the draft must share the target's vocabulary"
    remedy = "choose a smaller model of the target's family"
    if target.ids is not None and draft.ids is not None:
        is_exact = not any(
            checkpoint and os.path.isfile(checkpoint.tokenizer_path) for checkpoint in files
        )
        if not are_same(target.ids, draft.ids, is_exact=is_exact):
            foreign = differing_ids(target.ids, draft.ids)
        if len(foreign) > min(_MOST_FOREIGN, len(target.ids) * _MOST_FOREIGN_SHARE):
            first = foreign[0]
            kinds = (
                f"{_name_of(first, vocabulary.ids)} in {of}"
                for vocabulary, of in ((target, "the target"), (draft, name))
            )
            difference = (
                f"{len(foreign)} tokens differ, the first has the id {first}: {', '.join(kinds)}"
            )
            raise UserError(f"{requirement}, {difference}: {remedy}")
    elif target.vocab_size != draft.vocab_size:
        raise UserError(
            f"{requirement}, {name} has {draft.vocab_size} entries "
            f"of its own against {target.vocab_size}: {remedy}"
        )
    if target.start_ids != draft.start_ids:
        raise UserError(
            f"{name}: decoder_start_token_id must be the target's, "
            f"{target.start_ids[0]}, got {draft.start_ids[0]}: take another draft, "
            "or mend its generation_config.json"
        )
    return foreign


def differing_ids(ids: Mapping[str, int], other_ids: Mapping[str, int]) -> tuple[int, ...]:
    """Return the ids, in order, that name another token in one vocabulary than in the other."""
    names = {index: token for token, index in ids.items()}
    others = {index: token for token, index in other_ids.items()}
    return tuple(
        sorted(
            index for index in names.keys() | others.keys() if names.get(index) != others.get(index)
        )
    )


def _name_of(index: int, ids: Mapping[str, int] | None) -> str:
    token = next((token for token, known in (ids or {}).items() if known == index), None)
    return "none" if token is None else f"{token!r:.40}"


def are_same(first: Mapping[str, int], other: Mapping[str, int], *, is_exact: bool) -> bool:
    """Return True if two vocabularies give the same meaning to the same ids.

    GGUF files pad theirs to the width of the embedding, and their tokenizers are rebuilt (not
    `is_exact`): then the larger must contain the smaller.
    """
    if is_exact:
        return first == other
    small, large = sorted((first, other), key=len)
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
    """Return the tokenizer's settings in the model's config; None if it has no config.

    Raises `OSError`, `ValueError`. The library takes a file that the disk does not give for none,
    and may choose another class of tokenizer: other ids.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if not os.path.isfile(directory / "config.json"):
        return None
    settings = read_json(directory / "config.json")
    try:
        return AutoConfig.for_model(
            str(settings.get("model_type")), tokenizer_class=settings.get("tokenizer_class")
        )
    # a kind of config that transformers does not know, or that needs more than this file
    except (ValueError, StrictDataclassError):
        return None


def _check_names(directory: Path) -> None:
    """Raise `ValueError` for a file elsewhere that transformers would open for tokenizer.json."""
    config_path = directory / TOKENIZER_CONFIG
    names = (
        read_json(config_path).get("fast_tokenizer_files", ())
        if os.path.exists(config_path)
        else ()
    )
    for name in names:
        ensure(
            isinstance(name, str) and Path(name).name == name,
            f"{name!r:.80} is no file beside {config_path.name}",
        )
