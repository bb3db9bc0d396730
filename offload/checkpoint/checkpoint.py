"""A model whose headers were read: `Checkpoint`, and the type that it computes in.

Quantised weights are stored for GPUs, mostly with float16 scales, and CPUs multiply float16 2 to 8
times slower than bfloat16, even those with instructions for both. So on a CPU `settled_dtype`
expands them into bfloat16 unless the user names a type. Packed weights keep their own.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from offload.checkpoint.files import Stamp, name_of_folder
from offload.checkpoint.held import Held
from offload.checkpoint.small_files import has_encoder, stored_dtype
from offload.checkpoint.spec import LayerSpec
from offload.checkpoint.tensors import TensorEntry
from offload.encoding.base import ENCODINGS, Coding
from offload.encoding.exponents import Exponents
from offload.encoding.residuals import Residual
from offload.errors import UserError

_Others = ParamSpec("_Others")
_Found = TypeVar("_Found")
_LOOK = "models of the Llama, Qwen, Mistral, Phi3, Gemma, Mixtral and T5 kind work"


def remembered(
    function: Callable[Concatenate["Checkpoint", _Others], _Found],
) -> Callable[Concatenate["Checkpoint", _Others], _Found]:
    """Decorate a function so that its results are kept by checkpoint and arguments; errors are not.

    A result must not be changed. It must not refer to the checkpoint either, with which it is
    freed.
    """
    known: WeakKeyDictionary[Checkpoint, dict[Any, _Found]] = WeakKeyDictionary()

    @wraps(function)
    def ask(checkpoint: "Checkpoint", *others: _Others.args, **named: _Others.kwargs) -> _Found:
        answers = known.setdefault(checkpoint, {})
        key = (others, tuple(sorted(named.items())))
        if key not in answers:
            answers[key] = function(checkpoint, *others, **named)
        return answers[key]

    return ask


class Block(NamedTuple):
    """What a draft that guesses many tokens in one pass says of its block."""

    size: int
    mask: int  # id of tokens to be guessed
    is_anchored: bool  # whether the first row guesses the token behind its own
    # whether rows see none behind themselves, in layers without a window and in those with one
    is_causal: tuple[bool, bool]
    num_candidates: int  # words that a selector chooses among; 0 without one
    # taps and groups of channels around layers
    convolution: tuple[int, int] | None
    embedding_scale: float
    scores_scale: float
    softcap: float  # of scores; 0 for none


class Carried(NamedTuple):
    """The inputs of a draft that reads a target's hidden states."""

    shared: frozenset[str]  # names of tensors that belong to the target
    is_fed_normed: bool  # whether a deeper guess starts from the normed output or the bare one
    # order of the embedding and the hidden state where they are mixed
    is_hidden_first: bool = False
    # whether the residual beside attention is the normed state or the bare one
    is_residual_normed: bool = False
    tapped: tuple[int, ...] = ()  # target layers whose input it reads
    has_normed: bool = True  # whether it also reads the final norm's output
    num_depths: int = 1  # layers, each fed with the output of the one before it
    # for a smaller vocabulary: what to add to each draft word's number to get the target's
    ids: TensorEntry | None = None
    target_width: int = 0  # width of the target's states
    block: Block | None = None  # for a draft that guesses many tokens in one pass
    lent: tuple[tuple[str, int], ...] = ()  # target layers whose keys it reads, by kind
    # words in the order of clusters, and the number of clusters whose words are scored for a row
    clusters: tuple[TensorEntry, int] | None = None

    @property
    def num_taps(self) -> int:
        """Return the number of the target's states that each row reads."""
        return len(self.tapped) + self.has_normed


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model whose headers were read and checked."""

    directory: Path
    config: dict[str, Any]
    shards: tuple[Path, ...]
    tensors: dict[str, TensorEntry]
    # the shards' stamps when their headers were read; empty where only headers are known
    stamps: tuple[Stamp, ...] = ()
    # folder of small files such as generation_config.json, if not `directory`
    small_folder: Path | None = None
    tokenizer: Path | None = None  # folder or GGUF file of the tokenizer, if not `directory`
    held: Held | None = None  # how a draft is quantised in memory
    # bytes of tensors that no text needs, by kind
    left_out: Mapping[str, int] = field(default_factory=dict)
    config_stamp: Stamp | None = None  # config.json as it was when read
    # tensors of layers that guess further ahead, by the file's names; codings are not set yet
    extra: Mapping[str, TensorEntry] = field(default_factory=dict)
    draft_kind: str = "model"  # for a draft: its row in `planning.draft_kinds`
    carried: Carried | None = None  # for a draft that reads the target's hidden states
    # description of the decoder; empty before `model.headers.specified`
    layers: tuple[LayerSpec, ...] = ()
    scout: "Checkpoint | None" = None  # for a copy: the smaller draft whose guesses it verifies

    @property
    def is_here(self) -> bool:
        """Return True if the weight files exist on this machine."""
        return all(os.path.isfile(shard) for shard in self.shards)

    @property
    def is_copy(self) -> bool:
        """Return True for a self draft: the target, quantised."""
        return self.held is not None and self.held.is_copy

    def shares(self, name: str) -> bool:
        """Return True if a tensor outside the layers is the target's."""
        return self.is_copy or (self.carried is not None and name in self.carried.shared)

    @property
    def has_encoder(self) -> bool:
        """Return True if an encoder reads the prompt."""
        return has_encoder(self.config)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for _, entry in self.stored_entries)

    @property
    def stored_entries(self) -> Iterator[tuple[str, TensorEntry]]:
        """Yield name and entry of every stored tensor that a text needs, companions included."""
        for name, entry in self.tensors.items():
            yield name, entry
            yield from ((f"{name} {suffix}", companion) for suffix, companion in entry.companions)

    @property
    def codings(self) -> list[Coding]:
        """Return the codings of all coded weights."""
        return [entry.coded.coding for entry in self.tensors.values() if entry.coded]

    @property
    def name(self) -> str:
        """Return the name for messages."""
        return name_of_folder(self.directory)

    @property
    def small_files(self) -> Path:
        return self.small_folder or self.directory

    @property
    def tokenizer_path(self) -> Path:
        """Return the folder, or GGUF file, for `load_tokenizer`; it need not have a tokenizer."""
        return self.tokenizer or self.directory


def compute_dtype_name(checkpoint: Checkpoint, wish: str) -> str:
    """Return the type to compute in: `wish`, or for `auto` the config's, or the one most stored."""
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


def settled_dtype(target: Checkpoint, wish: str, *, is_on_cpu: bool) -> tuple[str, list[str]]:
    """Return `wish`, or bfloat16 in place of float16 on a CPU, and notes for the user."""
    is_rounded = not all(isinstance(coding, Exponents | Residual) for coding in target.codings)
    is_open = wish == "auto" and is_on_cpu and is_rounded
    if not is_open or compute_dtype_name(target, wish) != "float16":
        return wish, []
    note = "computing in bfloat16: CPUs are slow with float16 (`dtype` float16 to have it)"
    return "bfloat16", [note]


def unsupported(checkpoint: Checkpoint, reason: str) -> UserError:
    """Return the error for a model whose architecture is not supported."""
    kind = f"model type {checkpoint.config.get('model_type', 'unknown')}"
    where = checkpoint.name
    return UserError(f"{where}: {kind} is not supported ({reason}): {_LOOK}")


class ModelFiles(NamedTuple):
    """The checkpoints of target and draft."""

    target: Checkpoint
    draft: Checkpoint | None = None

    @property
    def alone(self) -> "ModelFiles":
        """Return the target's files."""
        return self._replace(draft=None)

    @property
    def draft_kind(self) -> str:
        """Return the kind of the draft, or none."""
        return "none" if self.draft is None else self.draft.draft_kind
