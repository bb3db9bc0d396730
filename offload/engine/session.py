"""A text on disk: its tokens, with the keys and values that both models have computed for them.

It is one safetensors file, written all or nothing and without a second copy in memory: the format's
own library wants all bytes at once, which for a long text is a budget's worth. Invariant: tokens
are taken in only for the very model, keys and values only for the very weights and the type that
they were computed with, and all of it only where names, types, shapes and a checksum prove the file
whole.
"""

import json
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.files import open_regular, replacing
from offload.checkpoint.identity import ModelIdentity, same_model
from offload.checkpoint.safetensors import header_bytes, read_header
from offload.checkpoint.tensors import TensorEntry
from offload.encoding.base import PLAIN_OF, STORED
from offload.engine.cache_pool import CachePool
from offload.engine.identities import Identities
from offload.errors import ReadError, UserError, ensure, reason, require
from offload.memory.plan import MemoryPlan
from offload.model.kv_cache import INDEX, KEYS, VALUES, KVCache
from offload.model.recurrent_cache import Point, RecurrentCache

SUM = "crc32"  # the note that has the checksum of all that lies behind the header
_ALIGN_BYTES = 8  # where the data of a safetensors file begin
_TYPES = {getattr(torch, encoding.dtype): encoding.name for encoding in STORED.values()}


def write_tensors(path: Path, notes: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of any type in this order, with notes about them. Raises `OSError`."""
    entries = dict[str, TensorEntry]()
    end = 0
    for name, tensor in tensors.items():
        start = end
        end += tensor.numel() * tensor.element_size()
        entries[name] = TensorEntry(0, _TYPES[tensor.dtype], tuple(tensor.shape), start, end)
    with replacing(path) as scratch, scratch.open("wb") as file:
        file.write(header_bytes(entries, {**notes, SUM: "0" * 8}, _ALIGN_BYTES))
        total = 0
        for tensor in tensors.values():
            data = tensor.cpu().contiguous().view(torch.uint8).numpy().data
            total = zlib.crc32(data, total)
            file.write(data)
        file.seek(0)
        file.write(header_bytes(entries, {**notes, SUM: f"{total:08x}"}, _ALIGN_BYTES))
        file.flush()
        os.fsync(file.fileno())


def data_sum(path: Path) -> str:
    """Return the checksum that a file should have noted, eight digits. Raises `OSError`."""
    total = 0
    with path.open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        while block := file.read(1 << 20):
            total = zlib.crc32(block, total)
    return f"{total:08x}"


_FORMAT = "offload session, version 2"
_TOLD = ("role", "content")
_TOKENS = "tokens"
_PARTS = ("target", "draft")
_KINDS = (KEYS, VALUES)
# of recurrent layers
_TAILS = "tails"
_STATES = "states"
_AFRESH = "name another file, or delete it to begin anew"


class Session(NamedTuple):
    """What a file holds beside keys and values."""

    tokens: list[int]
    messages: list[dict[str, str]] | None  # of a conversation; a plain text is none
    num_turns: int  # of it so far


def save_session(
    path: Path,
    identities: Identities,
    pool: CachePool,
    arithmetic: str,
    messages: list[dict[str, str]] | None,
    num_turns: int,
) -> None:
    """Write what the caches hold, and what was said. Raises `UserError`.

    `arithmetic` is what bits of keys and values depend on beside weights and types; empty if on
    more.
    """
    tokens = pool.tokens
    tensors = {_TOKENS: torch.tensor(pool.tokens, dtype=torch.int64)}
    for part, cache in _caches(pool).items():
        for layer, held in cache.states(len(tokens)).items():
            tensors |= {_name(part, kind, layer): state for kind, state in held.items()}
        tensors |= _recurrent_tensors(part, cache, len(tokens))
    told = {"messages": json.dumps(messages), "num_turns": str(num_turns), "arithmetic": arithmetic}
    told |= {f"{part}_dtype": dtype for part, dtype in identities.dtypes.items()}
    told["is_long"] = str(pool.caches.target.is_long)
    try:
        for part in _PARTS:
            identity = identities.of(part)
            told[part] = json.dumps(identity.as_dict()) if identity else ""
        write_tensors(path, {**told, "format": _FORMAT}, tensors)
    # of the weights, which have changed since: that need not end a conversation
    except ReadError as error:
        raise UserError(f"cannot tell of which weights a session would be: {error}") from None
    except OSError as error:
        raise UserError(
            f"cannot write the session to {path} ({error.strerror}): name another file"
        ) from None


def _told_identity(notes: Mapping[str, str], part: str) -> ModelIdentity | None:
    """Return a part's identity as a file tells it; None for no model. Raises `KeyError`."""
    told = notes[part]
    try:
        return ModelIdentity.parse(json.loads(told))
    except (ValueError, RecursionError):
        return None


def can_use(identities: Identities, part: str, notes: Mapping[str, str]) -> bool:
    """Return whether a file with these notes has this part's weights, in its type; nothing is read."""
    told = _told_identity(notes, part)
    mine = identities.of(part)
    is_same = told is not None and mine is not None and not same_model(told, mine)
    return is_same and notes.get(f"{part}_dtype") == identities.dtypes[part]


def load_session(
    path: Path, identities: Identities, plan: MemoryPlan, pool: CachePool, arithmetic: str
) -> Session:
    """Fill the caches with what a file holds for them. Raises `UserError`.

    Of another draft nothing is taken, and of the target nothing that would have other bits if
    computed here.
    """
    with _opened(path) as file:
        session = _checked(path, file, identities, plan)
        if data_sum(path) != file.metadata().get(SUM):
            raise _broken(path, "its checksum does not fit")
        pool.take_back()
        pool.caches.clear()
        pool.caches.target.is_long = file.metadata().get("is_long") == str(True)
        for part, cache in _caches(pool).items():
            has_same_bits = part == "draft" or arithmetic in ("", file.metadata().get("arithmetic"))
            if has_same_bits and can_use(identities, part, file.metadata()):
                kept = _kept_layers(file, part)
                cache.refill(_held(file, part), _num_kept(file, part) if kept else 0)
                if kept and isinstance(cache, RecurrentCache):
                    cache.restore(_point(file, part))
    pool.filled_for(session.tokens)
    return session


def _held(file: Any, part: str) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield what layers hold of the text, one after another."""
    of_layer = defaultdict[int, list[str]](list)
    for name in _names(file, part, (*_KINDS, INDEX)):
        of_layer[int(name.rsplit(".", 1)[1])].append(name)
    for layer, names in sorted(of_layer.items()):
        yield layer, {name.split(".")[1]: file.get_tensor(name) for name in names}


def require_sessions(start_ids: tuple[int, ...], parallel: int = 1) -> None:
    """Raise `UserError` where no text could be kept in a file, as behind an encoder."""
    rule = "`session` keeps the one text that is written, `parallel` must be 1"
    require(parallel == 1, rule, parallel, "leave it out")
    if start_ids:
        raise UserError(
            "`session` keeps a text that goes on, a model with an encoder writes anew: leave it out"
        )


def check_session(path: Path, identities: Identities, plan: MemoryPlan) -> Session:
    """Return what a file holds, proved by its header to fit; fills nothing. Raises `UserError`."""
    with _opened(path) as file:
        return _checked(path, file, identities, plan)


def _checked(path: Path, file: Any, identities: Identities, plan: MemoryPlan) -> Session:
    notes = file.metadata() or {}
    if notes.get("format") != _FORMAT:
        raise UserError(
            f"{path} is no {_FORMAT}, but {notes.get('format', 'something else')}: {_AFRESH}"
        )
    told = _told_identity(notes, "target") if "target" in notes else None
    if told is None:
        raise _broken(path, "it does not tell of which model it is")
    if what := identities.difference(told):
        raise UserError(f"{path} was computed with another model ({what}): {_AFRESH}")
    if notes.get("target_dtype") != (mine := identities.dtypes["target"]):
        raise UserError(
            f"{path} was computed with other `dtype` ({notes.get('target_dtype')}, not {mine}): "
            f"{_AFRESH}"
        )
    try:
        session = _contents(file, notes)
        for part in _PARTS:
            if can_use(identities, part, notes):
                _check_states(file, part, identities, len(session.tokens))
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
    header = file.get_slice(_TOKENS)
    ensure(
        header.get_dtype() == "I64" and len(header.get_shape()) == 1,
        "tokens are a row of whole numbers",
    )
    messages = json.loads(notes["messages"])
    ensure(messages is None or isinstance(messages, list), "messages are a list")
    are_texts = all(
        isinstance(one, dict) and {type(one[key]) for key in _TOLD} == {str}
        for one in messages or []
    )
    ensure(are_texts, "a message has a role and a content of text")
    return Session(file.get_tensor(_TOKENS).tolist(), messages, int(notes["num_turns"]))


def _check_states(file: Any, part: str, identities: Identities, num_tokens: int) -> None:
    """Check keys and values of every layer by the config's shapes. Raises `ValueError`."""
    checkpoint: Checkpoint | None = getattr(identities.files, part)
    kept = _kept_layers(file, part)
    if checkpoint is None or not kept:
        ensure(not kept, f"{part} has keys and values, and there is none")
        return
    layers = checkpoint.layers
    computed = PLAIN_OF[identities.dtypes[part]]
    keeping = [index for index, layer in enumerate(layers) if any(layer.keys)]
    ensure(kept == keeping, f"{part} has {len(keeping)} layers with keys and values, not {kept}")
    states = dict[str, tuple[list[int], str]]()
    for index, layer in enumerate(layers):
        if layer.states and layer.states.num_taps > 1:
            tail = [layer.states.num_taps - 1, layer.states.num_channels]
            states[_name(part, _TAILS, index)] = (tail, computed.name)
        if layer.states and layer.states.state:
            states[_name(part, _STATES, index)] = ([layer.states.state], "F32")
    what = f"{part} has states of {len(states)} kinds"
    _check_shapes(file, _names(file, part, (_TAILS, _STATES)), states, what)
    num_kept = _num_kept(file, part)
    keys = {
        _name(part, INDEX, index): ([1, 1, num_kept, layer.index_width], computed.name)
        for index, layer in enumerate(layers)
        if layer.index_width
    }
    what = f"{part} has index keys of {len(keys)} layers"
    _check_shapes(file, _names(file, part, (INDEX,)), keys, what)
    ensure(0 < num_kept <= num_tokens, f"{part} has {num_kept} positions of {num_tokens} tokens")
    for index in kept:
        for kind, (heads, head) in ((KEYS, layers[index].keys), (VALUES, layers[index].values)):
            header = file.get_slice(_name(part, kind, index))
            shape = header.get_shape()
            is_sound = header.get_dtype() == computed.name and shape == [1, heads, num_kept, head]
            ensure(
                is_sound,
                f"{part}.{kind}.{index} has shape {shape} and type {header.get_dtype()}",
            )


def _kept_layers(file: Any, part: str) -> list[int]:
    """Return the layers with keys and values in the file, each with both. Raises `ValueError`."""
    names = {name for name in file.keys() if name.startswith(f"{part}.")}  # noqa: SIM118
    names -= _names(file, part, (_TAILS, _STATES, INDEX))
    kept = sorted({int(name.rsplit(".", 1)[1]) for name in names})
    ensure(
        names == {_name(part, kind, index) for kind in _KINDS for index in kept},
        f"names of {part} do not pair",
    )
    return kept


def _num_kept(file: Any, part: str) -> int:
    return int(file.get_slice(_name(part, "keys", _kept_layers(file, part)[0])).get_shape()[2])


def _names(file: Any, part: str, kinds: tuple[str, ...]) -> set[str]:
    return {
        name
        for name in file.keys()  # noqa: SIM118
        if name.startswith(tuple(f"{part}.{kind}." for kind in kinds))
    }


def _check_shapes(
    file: Any, found: set[str], wanted: Mapping[str, tuple[list[int], str]], what: str
) -> None:
    """Check tensors by config and headers; `what` tells of them in words. Raises `ValueError`."""
    ensure(found == {*wanted}, f"{what}, not {sorted(found)}"[:200])
    for name, (shape, kind) in wanted.items():
        header = file.get_slice(name)
        ensure(
            header.get_shape() == shape and header.get_dtype() == kind,
            f"{name} has shape {header.get_shape()} and type {header.get_dtype()}, not {shape} "
            f"and {kind}",
        )


def _recurrent_tensors(part: str, cache: KVCache, num_tokens: int) -> dict[str, Tensor]:
    """Return recurrent layers' states behind the positions that are kept, each as one row."""
    if not isinstance(cache, RecurrentCache):
        return {}
    point = cache.point_at(cache.keepable(num_tokens))
    tails = {_name(part, _TAILS, layer): tail for layer, tail in point.tails.items()}
    return tails | {
        _name(part, _STATES, layer): state.flatten() for layer, state in point.states.items()
    }


def _point(file: Any, part: str) -> Point:
    layers = {name: int(name.rsplit(".", 1)[1]) for name in _names(file, part, (_TAILS, _STATES))}
    found = {
        kind: {
            layer: file.get_tensor(name) for name, layer in layers.items() if f".{kind}." in name
        }
        for kind in (_TAILS, _STATES)
    }
    return Point(_num_kept(file, part), found[_TAILS], found[_STATES])


def _caches(pool: CachePool) -> dict[str, KVCache]:
    """Return the caches of both models; a drafter without one keeps nothing worth a file."""
    target, draft = pool.caches
    parts = zip(_PARTS, (target, draft.saved), strict=True)
    return {part: cache for part, cache in parts if cache is not None}


def _name(part: str, kind: str, index: int) -> str:
    return f"{part}.{kind}.{index}"


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
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
    """Raise where a file is larger than its tensors: all is mapped, and memory may be smaller."""
    try:
        read_header(path)
    except UserError as error:
        raise _broken(path, str(error).rpartition(":")[0]) from None


def _broken(path: Path, what: str) -> UserError:
    return UserError(f"the session {path} is broken ({what}): {_AFRESH}")
