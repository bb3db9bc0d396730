"""A text on disk: its tokens, with the keys and values that both models computed for them.

It is one safetensors file, written whole or not at all and without a second copy in memory: the
format's own library needs all bytes at once, which for a long text fill a budget. Invariant: tokens
are taken only for the same model, keys and values only for the same weights and type that they were
computed with, and all of it only if names, types, shapes and a checksum prove the file whole.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from offload.checkpoint.files import open_regular
from offload.checkpoint.identity import ModelIdentity, same_model
from offload.checkpoint.safetensors import read_header
from offload.engine.cache_pool import CachePool
from offload.engine.identities import Identities
from offload.engine.state_tensors import (
    PARTS,
    ROWS,
    STATES,
    SUM,
    TAILS,
    by_layer,
    check_states,
    kept_layers,
    names_of,
    num_kept,
    point_of,
    point_tensors,
    state_name,
    write_tensors,
)
from offload.errors import ReadError, UserError, ensure, reason, require
from offload.memory.plan import MemoryPlan
from offload.model.kv_cache import KVCache
from offload.model.recurrent_cache import RecurrentCache

_FORMAT = "offload session, version 2"
_TOLD = ("role", "content")
_TOKENS = "tokens"
_AFRESH = "name another file, or delete it to begin anew"


def data_sum(path: Path) -> str:
    """Return the checksum noted in a file, eight hexadecimal digits. Raises `OSError`."""
    total = 0
    with path.open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        while block := file.read(1 << 20):
            total = zlib.crc32(block, total)
    return f"{total:08x}"


class Session(NamedTuple):
    """The content of a file besides keys and values."""

    tokens: list[int]
    messages: list[dict[str, str]] | None  # messages of a conversation; empty for a plain text
    num_turns: int  # turns so far


def save_session(
    path: Path,
    identities: Identities,
    pool: CachePool,
    arithmetic: str,
    messages: list[dict[str, str]] | None,
    num_turns: int,
) -> None:
    """Write what the caches hold, and the conversation. Raises `UserError`.

    `arithmetic` names what bits of keys and values depend on besides weights and types; empty if
    they depend on more.
    """
    tokens = pool.tokens
    tensors = {_TOKENS: torch.tensor(pool.tokens, dtype=torch.int64)}
    for part, cache in pool.caches.saved().items():
        for layer, held in cache.states(len(tokens)).items():
            tensors |= {state_name(part, kind, layer): state for kind, state in held.items()}
        tensors |= _recurrent_tensors(part, cache, len(tokens))
    notes = {
        "messages": json.dumps(messages),
        "num_turns": str(num_turns),
        "arithmetic": arithmetic,
    }
    notes |= {f"{part}_dtype": dtype for part, dtype in identities.dtypes.items()}
    notes["is_long"] = str(pool.caches.target.is_long)
    try:
        for part in PARTS:
            identity = identities.for_part(part)
            notes[part] = json.dumps(identity.as_dict()) if identity else ""
        write_tensors(path, {**notes, "format": _FORMAT}, tensors)
    # the weights have changed since: that need not end a conversation
    except ReadError as error:
        raise UserError(f"cannot tell of which weights a session would be: {error}") from None
    except OSError as error:
        raise UserError(
            f"cannot write the session to {path} ({error.strerror}): name another file"
        ) from None


def _saved_identity(notes: Mapping[str, str], part: str) -> ModelIdentity | None:
    """Return a part's identity from a file; None for no model. Raises `KeyError`."""
    text = notes[part]
    try:
        return ModelIdentity.parse(json.loads(text))
    except (ValueError, RecursionError):
        return None


def can_use(identities: Identities, part: str, notes: Mapping[str, str]) -> bool:
    """Return True if a file with these notes has this part's weights, in its type."""
    saved = _saved_identity(notes, part)
    mine = identities.for_part(part)
    is_same = saved is not None and mine is not None and not same_model(saved, mine)
    return is_same and notes.get(f"{part}_dtype") == identities.dtypes[part]


def load_session(
    path: Path, identities: Identities, plan: MemoryPlan, pool: CachePool, arithmetic: str
) -> Session:
    """Fill the caches from a file. Raises `UserError`.

    Rows of another draft are not taken, nor the target's if their bits would differ from those
    computed here.
    """
    with _opened(path) as file:
        session = _checked(path, file, identities, plan)
        if data_sum(path) != file.metadata().get(SUM):
            raise _broken(path, "its checksum does not fit")
        pool.release_all()
        pool.caches.clear()
        pool.caches.target.is_long = file.metadata().get("is_long") == str(True)
        for part, cache in pool.caches.saved().items():
            has_same_bits = part == "draft" or arithmetic in ("", file.metadata().get("arithmetic"))
            if has_same_bits and can_use(identities, part, file.metadata()):
                kept = kept_layers(file, part)
                cache.refill(_held(file, part), num_kept(file, part) if kept else 0)
                if kept and isinstance(cache, RecurrentCache):
                    states = names_of(file, part, (TAILS, STATES))
                    tensors = {name: file.get_tensor(name) for name in states}
                    cache.restore(point_of(part, tensors, num_kept(file, part)))
    pool.filled_for(session.tokens)
    return session


def _held(file: Any, part: str) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield the layers' rows of the text, one after another."""
    for layer, names in sorted(by_layer(names_of(file, part, ROWS)).items()):
        yield layer, {name.split(".")[1]: file.get_tensor(name) for name in names}


def require_sessions(start_ids: tuple[int, ...], parallel: int = 1, kv_dtype: str = "auto") -> None:
    """Raise `UserError` if no text can be saved, as behind an encoder."""
    requirement = "`session` keeps the keys and values of the model's own type"
    require(kv_dtype == "auto", requirement, f"`kv_dtype` {kv_dtype}", "leave one of them out")
    requirement = "`session` keeps the one text that is written, `parallel` must be 1"
    require(parallel == 1, requirement, parallel, "leave it out")
    if start_ids:
        raise UserError(
            "`session` keeps a text that goes on, a model with an encoder writes anew: leave it out"
        )


def check_session(path: Path, identities: Identities, plan: MemoryPlan) -> Session:
    """Return a file's content, checked by its header. Raises `UserError`."""
    with _opened(path) as file:
        return _checked(path, file, identities, plan)


def _checked(path: Path, file: Any, identities: Identities, plan: MemoryPlan) -> Session:
    """Return a file's session. Raises `UserError` for another model or type, damage, and length."""
    notes = file.metadata() or {}
    if notes.get("format") != _FORMAT:
        raise UserError(
            f"{path} is no {_FORMAT}, but {notes.get('format', 'something else')}: {_AFRESH}"
        )
    saved = _saved_identity(notes, "target") if "target" in notes else None
    if saved is None:
        raise _broken(path, "it does not tell of which model it is")
    if difference := identities.difference(saved):
        raise UserError(f"{path} was computed with another model ({difference}): {_AFRESH}")
    if notes.get("target_dtype") != (mine := identities.dtypes["target"]):
        raise UserError(
            f"{path} was computed with other `dtype` ({notes.get('target_dtype')}, not {mine}): "
            f"{_AFRESH}"
        )
    try:
        session = _contents(file, notes)
        for part in PARTS:
            if can_use(identities, part, notes):
                check_states(file, part, identities, len(session.tokens))
    except (KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
        raise _broken(path, reason(error)) from None
    if len(session.tokens) >= plan.context:
        remedy = "" if plan.has_longest_context else "raise `context`, or "
        raise UserError(
            f"{path} has {len(session.tokens)} tokens, the context {plan.context}: "
            f"{remedy}{_AFRESH}"
        )
    return session


def _contents(file: Any, notes: Mapping[str, str]) -> Session:
    """Return tokens and messages of a file. Raises `ValueError` or `KeyError` for damage."""
    header = file.get_slice(_TOKENS)
    ensure(
        header.get_dtype() == "I64" and len(header.get_shape()) == 1,
        "tokens are a row of whole numbers",
    )
    messages = json.loads(notes["messages"])
    ensure(messages is None or isinstance(messages, list), "messages are a list")
    are_texts = all(
        isinstance(message, dict) and {type(message[key]) for key in _TOLD} == {str}
        for message in messages or []
    )
    ensure(are_texts, "a message has a role and a content of text")
    return Session(file.get_tensor(_TOKENS).tolist(), messages, int(notes["num_turns"]))


def _recurrent_tensors(part: str, cache: KVCache, num_tokens: int) -> dict[str, Tensor]:
    """Return recurrent layers' states after the kept positions, each as one row."""
    if not isinstance(cache, RecurrentCache):
        return {}
    return point_tensors(part, cache.point_at(cache.reusable_prefix(num_tokens)))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Yield an open session file. Raises `UserError` if it cannot be read or is damaged."""
    try:
        with open_regular(path):
            _require_no_holes(path)
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise UserError(
            f"cannot read the session {path} ({error.strerror or error}): check the path"
        ) from None
    except SafetensorError as error:
        raise _broken(path, reason(error)) from None


def _require_no_holes(path: Path) -> None:
    """Raise if a file is larger than its tensors: it is mapped whole, and memory may be smaller."""
    try:
        read_header(path)
    except UserError as error:
        raise _broken(path, str(error).rpartition(":")[0]) from None


def _broken(path: Path, reason: str) -> UserError:
    return UserError(f"the session {path} is broken ({reason}): {_AFRESH}")
