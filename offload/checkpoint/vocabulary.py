"""Whether two models mean the same by their token ids, as far as their files tell before anything is built.

Invariant: no pair is refused that loading accepts, where complete tokenizers are compared.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from offload.checkpoint.safetensors import Checkpoint
from offload.checkpoint.sizes import model_shape
from offload.errors import UserError


def require_one_vocabulary(target: Checkpoint, draft: Checkpoint) -> None:
    """Raises `UserError` where tokenizers differ, or where there are none and widths do."""
    sizes = [model_shape(checkpoint).vocab_size for checkpoint in (target, draft)]
    known = [_vocabulary(checkpoint.tokenizer_path) for checkpoint in (target, draft)]
    is_bare = any(
        all(map(os.path.isfile, one.shards)) and not _has_tokenizer(one.tokenizer_path) for one in (target, draft)
    )
    if known[0] != known[1] if None not in known else is_bare and sizes[0] != sizes[1]:
        raise other_vocabulary(draft.directory.name, *sizes)


def are_same(one: Mapping[str, int], other: Mapping[str, int], *, is_exact: bool) -> bool:
    """Whether two vocabularies mean the same by their ids.

    GGUF files fill theirs up to the width of the embedding, and tokenizers are made anew of them (not `is_exact`): then
    it is enough that the smaller has no token with another id.
    """
    if is_exact:
        return one == other
    small, large = sorted((one, other), key=len)
    return all(large.get(token) == index for token, index in small.items())


def other_vocabulary(draft: str, target_size: int, draft_size: int) -> UserError:
    """What to say of a draft whose tokens are not the target's."""
    return UserError(
        f"the draft must share the target's vocabulary, {draft} has {draft_size} entries "
        f"of its own against {target_size}: choose a smaller model of the target's family"
    )


def _vocabulary(directory: Path) -> dict[str, int] | None:
    """Without what transformers may add; None where there is none to be read."""
    from tokenizers import Tokenizer

    if not os.path.isfile(directory / "tokenizer.json"):
        return None
    try:
        return dict(Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab(with_added_tokens=False))
    except Exception:  # nothing more specific; loading says what is wrong with it
        return None


def _has_tokenizer(directory: Path) -> bool:
    return os.path.isfile(directory) or any(
        map(os.path.isfile, (directory / "vocab.json", *directory.glob("tokenizer*")))
    )
