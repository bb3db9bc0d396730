"""The identity of a model by its files, under which results, sessions and profiles are kept.

At start every tensor is sampled in a few places, and all other files on which a text depends are
read whole. That takes milliseconds, but misses differences between the samples. So an identity also
has proofs of all bytes: unchanged files, the hub's checksums, or a sum of all bytes.

Invariant: two models count as the same only where a proof agrees and none contradicts.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.files import Stamp, cache_folder, open_regular, read_json, write_whole
from offload.checkpoint.generation_config import generation_settings
from offload.checkpoint.gguf_header import read_gguf_header
from offload.checkpoint.small_files import TEMPLATE, TOKENIZER_CONFIG, is_template, text_files
from offload.checkpoint.whole import hub_sum, is_as_downloaded, is_sha256
from offload.errors import ReadError, UserError, system_reason

PARTS = ("weights", "config", "generation config", "tokenizer", "chat template")
FILES = "files"
HUB = "hub"
# names the method: sums by different methods cannot be compared
SUM = "xxh3"
# Models whose sums differ are different; files may differ for the same model.
_DECISIVE = (SUM, HUB)
# Samples of each tensor.
_NUM_SAMPLES = 2
_SAMPLE_BYTES = 2048
# Reads over all tensors: a mixture of experts has tens of thousands of them.
_MOST_READS = 2048
_NUM_READERS = 8
_EXPERT = ".experts."
_DIGEST_CHARS = 32
_SUM_TEXT = re.compile(r"[0-9a-f]{32}")
# Raise it when a sum or digest is computed from anything else.
_VERSION = 2
# settings in config.json or tokenizer_config.json that only name things
_NAMES_OF_CONFIG = (
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "tokenizer_file",
    "special_tokens_map_file",
)
# other generation settings that matter are part of a request
_SPECIAL_TOKENS = ("eos_token_id", "bos_token_id", "decoder_start_token_id")


class ModelIdentity(NamedTuple):
    """The name of a model by its content."""

    parts: Mapping[str, str]  # digests by the names in `PARTS`
    proofs: Mapping[str, str]  # proofs of all bytes of the weights, by kind

    def as_dict(self) -> dict[str, Any]:
        """Return the form that is written to files."""
        return {**self.parts, "proofs": dict(self.proofs)}

    @classmethod
    def parse(cls, saved: Any) -> "ModelIdentity | None":
        """Return the identity that a file states, or None for anything else."""
        if not isinstance(saved, dict) or not isinstance(proofs := saved.get("proofs"), dict):
            return None
        parts = {name: value for name, value in saved.items() if name != "proofs"}
        are_texts = all(isinstance(value, str) for value in (*parts.values(), *proofs.values()))
        return cls(parts, proofs) if are_texts and parts.keys() >= set(PARTS) else None

    def difference(self, other: "ModelIdentity") -> str:
        """Return in words which parts differ as far as samples show; empty if none does."""
        both = {**self.parts, **other.parts}
        names = [name for name in both if self.parts.get(name) != other.parts.get(name)]
        return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)

    def has_weights_of(self, other: "ModelIdentity") -> bool | None:
        """Return True if the weights' bytes are equal, False if not, None if that is unproved."""
        if self.parts["weights"] != other.parts["weights"]:
            return False
        return proved(self.proofs, other.proofs)

    @property
    def has_sum(self) -> bool:
        """Return True if there is a sum of all bytes, to compare with other weights."""
        return SUM in self.proofs

    def drafted_by(self, draft: "ModelIdentity | None") -> "ModelIdentity":
        """Return the identity for a text that depends on the draft as well."""
        return self if draft is None else self._replace(parts={**self.parts, "draft": draft.digest})

    def with_sum(self, total: str) -> "ModelIdentity":
        """Return this identity with the sum of all bytes."""
        return self._replace(proofs={**self.proofs, SUM: total})

    @property
    def digest(self) -> str:
        return _digest(json.dumps(self.parts, sort_keys=True).encode())


def identity_of(checkpoint: Checkpoint) -> ModelIdentity:
    """Return a model's identity from samples and proofs. Raises `ReadError` and `UserError`."""
    # stamps first: they tell whether a file was replaced meanwhile
    parts = {"weights": _sampled(checkpoint), "config": _config(checkpoint)}
    settings = generation_settings(checkpoint)
    parts |= {
        "generation config": _json_digest({name: settings.get(name) for name in _SPECIAL_TOKENS}),
        **_text_files(checkpoint.tokenizer_path),
    }
    if checkpoint.held is not None:
        parts["bits"] = _digest(repr(checkpoint.held).encode())
    return ModelIdentity(parts, _proofs(checkpoint, parts["weights"]))


def proved(saved: Mapping[str, str], mine: Mapping[str, str]) -> bool | None:
    """Return True if two sets of proofs are of the same weights, False if not, None if unproved."""
    shared = saved.keys() & mine.keys()
    if any(saved[kind] != mine[kind] for kind in shared.intersection(_DECISIVE)):
        return False
    # a sum notices what was written to a file since the hub named it
    enough = shared - {HUB} if SUM in saved or SUM in mine else shared
    return any(saved[kind] == mine[kind] for kind in enough) or (True if saved == mine else None)


def keep_sum(identity: ModelIdentity, total: str) -> None:
    """Store the sum for later runs, where the folder can be written; it holds for unchanged files."""
    with suppress(OSError, UserError):
        write_whole(_kept_path(identity.parts["weights"], identity.proofs[FILES]), total)


def same_model(saved: ModelIdentity, mine: ModelIdentity) -> str:
    """Return in words why two models differ; empty if they are the same. Nothing is read."""
    if changed := saved.difference(mine):
        return f"{changed} {'differ' if ' and ' in changed or changed == 'weights' else 'differs'}"
    has_same = saved.has_weights_of(mine)
    if has_same is None:
        return "nothing proves that the weights are the same"
    return "" if has_same else "weights differ"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGEST_CHARS]


def _json_digest(value: object) -> str:
    return _digest(json.dumps(value, sort_keys=True, default=repr).encode())


def _sampled(checkpoint: Checkpoint) -> str:
    """Return a digest of names, types, shapes, places and a few bytes of the tensors."""
    stored = checkpoint.stored_entries
    entries = sorted(
        (entry.shard, entry.lo, entry.hi, name, entry.dtype, entry.shape) for name, entry in stored
    )
    codings = sorted(set(map(repr, checkpoint.codings)))
    digest = hashlib.sha256(json.dumps([codings, entries]).encode())
    places = _places([(name, shard, lo, hi) for shard, lo, hi, name, *_ in entries])
    size = max(1, -(-len(places) // _NUM_READERS))
    batches = [places[at : at + size] for at in range(0, len(places), size)]
    with ExitStack() as opened:
        files = [_opened(checkpoint, shard, opened) for shard in range(len(checkpoint.shards))]
        pool = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="offload-identity")
        opened.enter_context(pool)
        for content in pool.map(lambda batch: _read(checkpoint, files, batch), batches):
            digest.update(content)
    return digest.hexdigest()[:_DIGEST_CHARS]


def _places(spans: Sequence[tuple[str, int, int, int]]) -> list[tuple[int, int, int]]:
    """Return the places to sample as (shard, first byte, number of bytes).

    `spans` are names with their shards and [lo, hi). All tensors are sampled, but only some of very
    many experts.
    """
    if len(spans) > _MOST_READS:
        others = [span for span in spans if _EXPERT not in span[0]][:_MOST_READS]
        experts = [span for span in spans if _EXPERT in span[0]]
        step = -(-len(experts) // max(1, _MOST_READS - len(others)))
        spans = [*others, *experts[:: max(1, step)]]
    num_samples = max(1, min(_NUM_SAMPLES, _MOST_READS // max(1, len(spans))))
    places = list[tuple[int, int, int]]()
    for _, shard, lo, hi in spans:
        if hi - lo <= num_samples * _SAMPLE_BYTES:
            places.append((shard, lo, hi - lo))
            continue
        step = (hi - lo - _SAMPLE_BYTES) // num_samples
        starts = (lo + step // 2 + part * step for part in range(num_samples))
        places += [(shard, start, _SAMPLE_BYTES) for start in starts]
    return places


def _opened(checkpoint: Checkpoint, shard: int, opened: ExitStack) -> int:
    """Open a weight file for scattered reads and return its descriptor."""
    path = checkpoint.shards[shard]
    with _reading(path):
        file = opened.enter_context(open_regular(path)).fileno()
        stamp = Stamp.from_file(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    if checkpoint.stamps and stamp != checkpoint.stamps[shard]:
        raise _changed(path)
    return file


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ReadError(f"reading {path} failed: {system_reason(error)}") from error


def _changed(path: Path) -> ReadError:
    return ReadError(f"{path.name} changed since the model was opened: load the model again")


def _read(
    checkpoint: Checkpoint, files: Sequence[int], places: Sequence[tuple[int, int, int]]
) -> bytes:
    content = list[bytes]()
    for shard, lo, num_bytes in places:
        path = checkpoint.shards[shard]
        with _reading(path):
            content.append(os.pread(files[shard], num_bytes, lo))
        if len(content[-1]) != num_bytes:
            raise ReadError(f"{path.name} ends before byte {lo + num_bytes}: it was cut short")
    return b"".join(content)


def _config(checkpoint: Checkpoint) -> str:
    """Return a digest of the config without names. Raises `ReadError` if the file changed since."""
    path = checkpoint.small_files / "config.json"
    stamp = checkpoint.config_stamp
    with _reading(path):
        current = None if stamp is None else Stamp.from_file(path)
    if current != stamp:
        raise _changed(path)
    return _json_digest(_without_names(checkpoint.config))


def _without_names(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in _NAMES_OF_CONFIG}


def _text_files(where: Path) -> dict[str, str]:
    """Return digests of the files that turn text into tokens, and conversations into text."""
    tokenizer = hashlib.sha256()
    template = hashlib.sha256()
    # a GGUF file has both in its header
    if os.path.isfile(where):
        header = read_gguf_header(where)
        end = min((entry.lo for entry in header.tensors.values()), default=header.stamp.num_bytes)
        tokenizer.update(_small(where, end))
        template.update(tokenizer.digest())
    else:
        with _reading(where):
            paths = text_files(where)
        for path in paths:
            digest = template if is_template(path) else tokenizer
            digest.update(path.name.encode())
            if path.name == TOKENIZER_CONFIG:
                content = _without_names(read_json(path))
                template.update(json.dumps(content.pop(TEMPLATE, None), sort_keys=True).encode())
                digest.update(json.dumps(content, sort_keys=True).encode())
            else:
                digest.update(_small(path))
    digests = {"tokenizer": tokenizer, "chat template": template}
    return {name: file_digest.hexdigest()[:_DIGEST_CHARS] for name, file_digest in digests.items()}


def _small(path: Path, num_bytes: int = -1) -> bytes:
    with _reading(path), open_regular(path) as file:
        return file.read(num_bytes)


def _proofs(checkpoint: Checkpoint, weights: str) -> dict[str, str]:
    """Return the proofs of all weights that take no reading."""
    stamps = checkpoint.stamps or tuple(map(Stamp.from_file, checkpoint.shards))
    places = [str(path.resolve()) for path in checkpoint.shards]
    proofs = {FILES: _json_digest([places, [stamp[1:] for stamp in stamps]])}
    hub = [hub_sum(path) for path in checkpoint.shards]
    are_untouched = map(is_as_downloaded, checkpoint.shards, stamps)
    if hub and all(map(is_sha256, hub)) and all(are_untouched):
        proofs[HUB] = _json_digest(hub)
    try:
        kept = _kept_path(weights, proofs[FILES]).read_text(encoding="ascii")
    except (OSError, UserError, ValueError):
        return proofs
    return {**proofs, SUM: kept} if _SUM_TEXT.fullmatch(kept) else proofs


def _kept_path(weights: str, files: str) -> Path:
    """Return the path for the sum of files with these stamps. Raises `UserError`."""
    return cache_folder() / "weights" / f"{_VERSION}-{_digest(f'{weights} {files}'.encode())}"
