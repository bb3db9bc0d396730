"""Safetensors checkpoints, read by their headers alone; every tensor's place is checked first.

The files may be hostile, so sizes, offsets, names and shard references are checked here, once; all
other code works with `TensorEntry` values that are known to lie inside their file. Every byte of a
file that passes belongs to its header or to one tensor. What headers of GGUF files have in common
with these is here as well.

`settled_dtype` chooses the type that quantised weights are expanded into, where the user names
none. They are stored for GPUs, mostly with scales in float16. CPUs multiply float16 2 to 8 times
slower than bfloat16, even those with instructions for both; in memory both take the same. Packed
weights keep the type of the original model.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from offload.checkpoint.download import (
    SINGLE,
    download_shards,
    download_small,
    download_unindexed,
    is_hub_id,
)
from offload.checkpoint.families import TextPart, text_part, with_shared_layers, with_turned_stacks
from offload.checkpoint.files import (
    Stamp,
    name_of_folder,
    open_regular,
    read_json,
    readable,
    stamp_of,
)
from offload.checkpoint.held import Held
from offload.checkpoint.small_files import check_method, has_encoder, read_config, stored_dtype
from offload.checkpoint.tensors import TensorEntry, with_codings
from offload.encoding.base import AGAIN, ENCODINGS, STORED, Coding
from offload.encoding.exponents import Exponents
from offload.errors import UnreadError, UserError, did_you_mean, ensure, reason

_Others = ParamSpec("_Others")
_Found = TypeVar("_Found")

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_LOOK = "models of the Llama, Qwen, Mistral, Phi3, Gemma, Mixtral and T5 kind work"
INFLATED = "inflation.json"  # in folders of `inflate`
SUMS = "offload_sums.json"  # in folders that `offload verify` was asked about
_MOST_NAMES = 1000  # of a folder, among which one may be meant
INDEX = "model.safetensors.index.json"
MANIFEST = "offload_pack.json"  # in folders of `offload pack`
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
# beyond any tensor that a file can hold; arithmetic on them stays cheap
_MAX_DIMS = 8
_MAX_SIZE = 2**63
# Kimi K2 with four for each matrix has 280,000 tensors, and a million take a minute.
_MAX_TENSORS = 1 << 19
# Patterns that names are told by take up to the square of it.
_MAX_NAME_CHARS = 1024
_LFS = b"version https://git-lfs"


class FileHeader(NamedTuple):
    """The header of one weight file, found sound."""

    tensors: dict[str, TensorEntry]  # by the names in the file, with `coded` not yet set
    stamp: Stamp
    metadata: Mapping[str, Any]  # texts in safetensors


def damaged(what: str, directory: Path | None = None) -> UserError:
    """Return the error for a file that contradicts itself; the folder tells how it was made."""
    is_packed = directory is not None and os.path.isfile(directory / MANIFEST)
    return UserError(f"{what}: {'pack the model again' if is_packed else AGAIN}")


def lfs_pointer(path: Path) -> UserError:
    """Return the error for a file that stands for one that was not fetched."""
    what = f"{path.name} is a pointer of Git LFS, not the weights"
    return UserError(f"{what}: run git lfs pull in its folder")


def check_extents(path: Path, entries: dict[str, TensorEntry], file_bytes: int) -> None:
    """Raise `UserError` where tensors leave the file or overlap."""
    end = 0
    before = ""
    for name, entry in in_file_order(entries):
        if entry.hi > file_bytes:
            where = f"{name} ends at byte {entry.hi}, the file at {file_bytes}"
            raise damaged(f"{path.name}: {where}: truncated", path.parent)
        if entry.lo < end:
            raise damaged(f"{path.name}: {name} and {before} overlap", path.parent)
        end = entry.hi
        before = name


def in_file_order(entries: Mapping[str, TensorEntry]) -> list[tuple[str, TensorEntry]]:
    """Return the tensors of one file in the order of their bytes."""
    return sorted(entries.items(), key=lambda item: (item[1].lo, item[1].hi))


def read_header(path: Path, shard: int = 0) -> FileHeader:
    """Read one file's header. Raises `UserError` for one that is false."""
    raw, stamp = read_raw_header(path)
    tensors, metadata = parse_header(path, raw, stamp.num_bytes, shard)
    return FileHeader(tensors, stamp, metadata)


def read_raw_header(path: Path) -> tuple[bytes, Stamp]:
    """Return the JSON that a file begins with, and its stamp. Raises `UserError` without one."""
    with readable(path), open_regular(path) as file:
        stamp = Stamp.of(file.fileno())
        start = file.read(len(_LFS))
        file.seek(8)
        header_bytes = int.from_bytes(start[:8], "little")
        is_inside = stamp.num_bytes >= 8 and header_bytes <= stamp.num_bytes - 8
        is_sound = start != _LFS and is_inside and header_bytes <= _MAX_HEADER_BYTES
        raw = file.read(header_bytes) if is_sound else b""
    if start == _LFS:
        raise lfs_pointer(path)
    if not is_sound:
        what = f"header of {header_bytes} bytes in a file of {stamp.num_bytes}"
        raise damaged(f"{path.name}: {what}", path.parent)
    return raw, stamp


def parse_header(
    path: Path, raw: bytes, file_bytes: int, shard: int = 0
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the entries, and the metadata.

    Raises `UserError` where the header contradicts itself or the file.
    """
    data_lo = 8 + len(raw)
    found, metadata = _parse_json(path, raw)
    require_few(path.name, len(found))
    entries = {
        name: checked_entry(path, name, meta, shard, data_lo) for name, meta in found.items()
    }
    check_extents(path, entries, file_bytes)
    # in bytes between tensors other programs may see another file
    end = data_lo
    places = [(entry.lo, entry.hi) for _, entry in in_file_order(entries)]
    for lo, hi in (*places, (file_bytes, file_bytes)):
        if lo != end:
            raise damaged(f"{path.name}: bytes {end} to {lo} belong to no tensor", path.parent)
        end = hi
    return entries, metadata


def header_bytes(
    entries: Mapping[str, TensorEntry], notes: Mapping[str, str], align_bytes: int
) -> bytes:
    """Return what a file begins with: the length of its JSON, and the JSON, padded with blanks.

    Places of entries are counted from the end of it, which is a multiple of `align_bytes`.
    """
    told = {
        name: {"dtype": one.dtype, "shape": one.shape, "data_offsets": (one.lo, one.hi)}
        for name, one in entries.items()
    }
    text = json.dumps({"__metadata__": notes, **told}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align_bytes)
    return len(text).to_bytes(8, "little") + text


def require_few(where: str, num_tensors: int) -> None:
    """Raise `UserError` for a file, or a model, of more tensors than any has."""
    if num_tensors > _MAX_TENSORS:
        rule = f"{where} must have at most {_MAX_TENSORS} tensors"
        raise UnreadError(f"{rule}, got {num_tensors}: {AGAIN}")


def _parse_json(path: Path, raw: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the header's tensors, and the file's metadata."""
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        what = f"its header is not valid JSON ({reason(error)})"
        raise damaged(f"{path.name}: {what}", path.parent) from None
    if not isinstance(header, dict):
        what = f"its header is a JSON {type(header).__name__}, not an object"
        raise damaged(f"{path.name}: {what}", path.parent)
    metadata = header.pop("__metadata__", None) or {}
    are_texts = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if not are_texts:
        raise damaged(f"{path.name}: __metadata__ in its header must be texts by name", path.parent)
    return header, metadata


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    ensure(len(unique) == len(pairs), "a name occurs twice")
    return unique


def checked_entry(path: Path, name: str, meta: Any, shard: int, data_lo: int) -> TensorEntry:
    """Return one tensor's entry, checked; tensors begin at `data_lo`. Raises `UserError`."""
    if len(name) > _MAX_NAME_CHARS:
        what = f"its header has {name:.80} with a name of {len(name)} characters"
        raise damaged(f"{path.name}: {what}", path.parent)
    try:
        dtype = meta["dtype"]
        shape = meta["shape"]
        lo, hi = meta["data_offsets"]
        is_known = isinstance(dtype, str) and isinstance(shape, list) and len(shape) <= _MAX_DIMS
        numbers = (*shape, lo, hi) if is_known else (-1,)
        sound = all(type(n) is int and 0 <= n < _MAX_SIZE for n in numbers) and lo <= hi
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        what = f"{name} has a malformed header entry {json.dumps(meta)[:80]}"
        raise damaged(f"{path.name}: {what}", path.parent)
    wanted = STORED[dtype].stored_bytes(shape) if dtype in STORED else hi - lo
    if wanted != hi - lo:
        where = f"{path.name}: {name} of shape {shape} and {dtype}"
        raise damaged(f"{where} needs {wanted} bytes, has {hi - lo}", path.parent)
    return TensorEntry(shard, dtype, tuple(shape), data_lo + lo, data_lo + hi)


def remembered(
    function: Callable[Concatenate["Checkpoint", _Others], _Found],
) -> Callable[Concatenate["Checkpoint", _Others], _Found]:
    """Return the function with its results kept by checkpoint and arguments, but for errors.

    A result must not be changed, nor refer to the checkpoint, with which it is freed.
    """
    known: WeakKeyDictionary[Checkpoint, dict[Any, _Found]] = WeakKeyDictionary()

    @wraps(function)
    def ask(checkpoint: "Checkpoint", *others: _Others.args, **named: _Others.kwargs) -> _Found:
        own = known.setdefault(checkpoint, {})
        key = (others, tuple(sorted(named.items())))
        if key not in own:
            own[key] = function(checkpoint, *others, **named)
        return own[key]

    return ask


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model whose headers have been read and found sound."""

    directory: Path
    config: dict[str, Any]
    shards: tuple[Path, ...]
    tensors: dict[str, TensorEntry]
    # of the shards as their headers were read; none where only headers are known
    stamps: tuple[Stamp, ...] = ()
    # folder of small files such as generation_config.json, where it is not `directory`
    beside: Path | None = None
    tokenizer: Path | None = None  # folder, or GGUF file, that has it, where it is not `directory`
    held: Held | None = None  # of a draft, that lies in memory in fewer bits
    # bytes of tensors that no text needs, by what they are of
    left_out: Mapping[str, int] = field(default_factory=dict)
    config_stamp: Stamp | None = None  # of config.json as it was read

    @property
    def is_copy(self) -> bool:
        """Return whether it is a self draft: the target, quantised."""
        return self.held is not None and self.held.is_copy

    @property
    def has_encoder(self) -> bool:
        """Return whether an encoder reads the prompt."""
        return has_encoder(self.config)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for _, entry in self.stored_entries)

    @property
    def stored_entries(self) -> Iterator[tuple[str, TensorEntry]]:
        """Yield name and entry of all tensors that a text needs, companions included."""
        for name, entry in self.tensors.items():
            yield name, entry
            yield from ((f"{name} {suffix}", one) for suffix, one in entry.companions)

    @property
    def codings(self) -> list[Coding]:
        """Return the codings of all coded weights."""
        return [entry.coded.coding for entry in self.tensors.values() if entry.coded]

    @property
    def name(self) -> str:
        """Return the name in lines for users."""
        return name_of_folder(self.directory)

    @property
    def small_files(self) -> Path:
        return self.beside or self.directory

    @property
    def tokenizer_path(self) -> Path:
        """Return the folder, or GGUF file, for `load_tokenizer`; it need not have a tokenizer."""
        return self.tokenizer or self.directory


def open_checkpoint(model: str | os.PathLike[str]) -> Checkpoint:
    """Read config and headers of a Hugging Face folder or hub id. Raises `UserError`."""
    directory = _resolve(model)
    where = name_of_folder(directory)
    if not os.path.isfile(directory / "config.json"):
        _refuse_other_formats(directory)
    config_stamp = stamp_of(directory / "config.json")
    config = read_config(directory / "config.json")
    shards, weight_map = find_shards(directory)
    for path in shards:
        if not os.path.isfile(path):
            raise damaged(f"{directory}: the index names {path.name}, which is missing", directory)
    tensors = dict[str, TensorEntry]()
    stamps = list[Stamp]()
    for index, shard in enumerate(shards):
        header = read_header(shard, index)
        stamps.append(header.stamp)
        require_few(where, len(tensors) + len(header.tensors))
        for name, entry in header.tensors.items():
            if weight_map is None or weight_map.get(name) == shard.name:
                tensors[name] = entry
    for name, file in (weight_map or {}).items():
        if name not in tensors:
            what = f"the index places {name} in {file}, which lacks it"
            raise damaged(f"{where}: {what}", directory)
    weights, left_out = weights_of(where, config, tensors)
    return Checkpoint(
        directory,
        config,
        shards,
        weights,
        tuple(stamps),
        left_out=left_out,
        config_stamp=config_stamp,
    )


def weights_of(where: str, config: dict[str, Any], tensors: dict[str, TensorEntry]) -> TextPart:
    """Return a language model's tensors by its own names. Raises `UserError` for contradictions."""
    check_method(where, config)
    found = text_part(where, config, tensors)
    weights = with_codings(where, config, found.tensors)
    if config.get("quantization_config") and not any(entry.coded for entry in weights.values()):
        what = f"{where}: config.json says that weights are quantised, no tensor shows how"
        raise UserError(f"{what}: {AGAIN}")
    turned = with_turned_stacks(config, weights)
    return found._replace(tensors=with_shared_layers(config, turned))


def compute_dtype_name(checkpoint: Checkpoint, wish: str) -> str:
    """Return the type to compute in: `wish`, or for `auto` the config's or the most common one."""
    return _usual_dtype_name(checkpoint) if wish == "auto" else wish


@remembered
def _usual_dtype_name(checkpoint: Checkpoint) -> str:
    stored = Counter[str]()
    for entry in checkpoint.tensors.values():
        decoded = ENCODINGS.get(entry.dtype) if entry.coded is None else entry.coded.coding
        stored[decoded.dtype if decoded else entry.dtype] += math.prod(entry.shape)
    usual = stored.most_common(1)[0][0] if stored else "float32"
    remedy = "give `dtype` bfloat16, float16 or float32"
    return stored_dtype(checkpoint.config, checkpoint.name, usual, remedy)


def tokenizer_folder(model: str | os.PathLike[str]) -> Path:
    """Return where a tokenizer lies; the hub's is fetched without weights. Raises `UserError`."""
    return _resolve(model, with_weights=False)


def _resolve(model: str | os.PathLike[str], *, with_weights: bool = True) -> Path:
    path = Path(os.path.expanduser(model))
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        rule = "model must be a directory or a hub id"
        raise UserError(f"{rule}, {path} is a file: give the folder it lies in")
    if not is_hub_id(str(model)):
        raise _not_there(path)
    small = download_small(str(model))
    if not os.path.isfile(small / INDEX):
        return download_unindexed(str(model), small) if with_weights else small
    shards = _shard_names(small, read_json(small / INDEX).get("weight_map"))
    return download_shards(str(model), small, shards) if with_weights else small


def _not_there(path: Path) -> UserError:
    """Return the error of a name that is neither here nor a hub id, with what may be meant."""
    what = "file" if path.suffix.lower() == ".gguf" else "model directory"
    beside = os.listdir(path.parent) if os.path.isdir(path.parent) else []
    if meant := did_you_mean(path.name, beside[:_MOST_NAMES]):
        return UserError(f"no {what} at {path}{meant}")
    return UserError(f"no {what} at {path}: check the path, or give a hub id such as org/name")


def unsupported(checkpoint: Checkpoint, what: str) -> UserError:
    """Return the error for a model whose architecture is not supported."""
    kind = f"model type {checkpoint.config.get('model_type', 'unknown')}"
    where = checkpoint.name
    return UserError(f"{where}: {kind} is not supported ({what}): {_LOOK}")


def has_weights(directory: Path) -> bool:
    """Return whether a folder holds weights in any format, readable or not."""
    return any(
        True for pattern in ("*.safetensors*", *_PICKLES, "*.gguf") for _ in directory.glob(pattern)
    )


def find_shards(directory: Path) -> tuple[tuple[Path, ...], dict[str, str] | None]:
    """Return the weight files, there or not, and the index's map of tensors to them, if any.

    Raises `UserError` where there are no files, or the index makes no sense.
    """
    if os.path.isfile(directory / INDEX):
        weight_map = read_json(directory / INDEX).get("weight_map")
        names = _shard_names(directory, weight_map)
        return tuple(directory / name for name in names), weight_map
    shards = sorted(directory.glob("*.safetensors"))
    if os.path.isfile(directory / SINGLE):
        shards = [directory / SINGLE]
    if len(shards) == 1:
        return tuple(shards), None
    if shards:
        what = f"{directory} has {len(shards)} safetensors files but no {INDEX}"
        raise damaged(what, directory)
    pickles = sorted(p.name for pattern in _PICKLES for p in directory.glob(pattern))
    if pickles:
        what = f"{directory} has only pickled weights ({pickles[0]}), which can run code"
        raise UserError(f"{what}: convert to safetensors")
    _refuse_other_formats(directory)
    has_config = os.path.isfile(directory / "config.json")
    remedy = AGAIN if has_config else "give the folder of a Hugging Face model"
    raise UserError(f"no safetensors files in {directory}: {remedy}")


def _refuse_other_formats(directory: Path) -> None:
    """Raise `UserError` for a folder that holds an adapter without its model."""
    if os.path.isfile(directory / "adapter_config.json"):
        what = f"{directory} holds an adapter, such as LoRA, without its model"
        raise UserError(f"{what}: merge it into the model, give the result")


def _shard_names(directory: Path, weight_map: Any) -> list[str]:
    is_usable = isinstance(weight_map, dict) and bool(weight_map)
    if not is_usable or not all(isinstance(file, str) for file in weight_map.values()):
        raise damaged(f"{directory}: {INDEX} has no usable weight_map", directory)
    names = sorted(set(weight_map.values()))
    check_shard_names(directory, names)
    return names


def shard_name(index: int, count: int) -> str:
    """Return the name of one of `count` weight files."""
    return SINGLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def is_shard_name(name: object) -> bool:
    """Return whether a name that a file tells is of safetensors in the same folder."""
    is_name = isinstance(name, str) and Path(name).name == name and "\0" not in name
    return is_name and str(name).endswith(".safetensors")


def check_shard_names(directory: Path, names: Iterable[str]) -> None:
    """Raise `UserError` for names in an index that leave its folder or are not safetensors."""
    for name in names:
        if not is_shard_name(name):
            what = f"the index names {name!r}, which is not a file beside it"
            raise damaged(f"{directory}: {what}", directory)


def settled_dtype(target: Checkpoint, wish: str, *, is_on_cpu: bool) -> tuple[str, list[str]]:
    """Return `wish`, or bfloat16 in place of float16 on a CPU, and what to tell the user."""
    is_rounded = not all(isinstance(one, Exponents) for one in target.codings)
    is_open = wish == "auto" and is_on_cpu and is_rounded
    if not is_open or compute_dtype_name(target, wish) != "float16":
        return wish, []
    note = "computing in bfloat16: CPUs are slow with float16 (`dtype` float16 to have it)"
    return "bfloat16", [note]
