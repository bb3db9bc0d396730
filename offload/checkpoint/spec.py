"""One description of a model, layer by layer: what memory, ranks and sessions have to know of it.

`model/headers.py` makes it, from the library's meta model. It is kept on disk by a hash of config
and headers, with the versions of this program and of transformers, so that who plans the model
again imports nothing. What is damaged, of another version or cannot be written is made again.
Refusals are not kept: each is found again, with its reason of today.
"""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from offload.checkpoint.files import cache_folder, read_small, write_whole
from offload.encoding.base import PLAIN_OF, Settings
from offload.errors import UserError

_MOST_BYTES = 256 << 20
# what makes other specs of the same files
_FORM = 2
PLAIN: Final = "plain"
FeedForward = Literal["plain", "experts", "other"]
Count = Annotated[int, msgspec.Meta(ge=0)]


@cache
def versions() -> tuple[str, ...]:
    """Return the versions on which what is kept depends: of this program and of its libraries."""
    names = [str(_FORM)]
    for package in ("offload", "transformers", "torch"):
        try:
            names.append(version(package))
        except PackageNotFoundError:  # a checkout that was not installed
            names.append("")
    return tuple(names)


# States, and what they are computed with, are float32.
FLOAT_BYTES = 4


class RecurrentLayer(NamedTuple):
    """Numbers that a layer with a state keeps of a text, and that a row takes in a pass.

    Each is the most that a cache, or a pass, takes.
    """

    num_taps: int  # of its convolution, whose last inputs but one are kept; 1 without any
    num_channels: int
    state: int = 0
    kept: int = 0  # of a row, as they come
    kept_floats: int = 0
    row_floats: int = 0

    def state_bytes(self, item_bytes: int) -> int:
        """Return the bytes that a text keeps behind a position, in numbers of `item_bytes`."""
        return item_bytes * (self.num_taps - 1) * self.num_channels + FLOAT_BYTES * self.state


class LayerSpec(msgspec.Struct, frozen=True, array_like=True):
    """The kind of one decoder layer, and the sizes of what its cache keeps of a text.

    Attributes:
        mixer: by what rows see those before them: `attention`, or the class in `model/mixers`.
        feed_forward: `plain` where wide passes go through it in parts, `experts`, or `other`.
        keys, values: heads of a position that its cache holds, and the numbers of each.
        index_width: numbers of a position's index key; 0 where it does not choose by an index.
        expanded_width: numbers of each position in sight, while the layer runs.
        states: what it keeps beside keys and values; None for most.
        num_experts, num_chosen: experts of a mixture, and how many of them a row meets.
    """

    mixer: str = "attention"
    feed_forward: FeedForward = PLAIN
    keys: tuple[Count, Count] = (0, 0)
    values: tuple[Count, Count] = (0, 0)
    index_width: Count = 0
    expanded_width: Count = 0
    states: RecurrentLayer | None = None
    num_experts: Count = 0
    num_chosen: Count = 0

    @property
    def cache_width(self) -> int:
        """Return all numbers of a position that its cache holds."""
        return math.prod(self.keys) + math.prod(self.values) + self.index_width


class ModelSpec(msgspec.Struct, frozen=True):
    """The description of a model, found by building it without weights.

    Attributes:
        versions: of what has made it.
        layers: of its decoder; none where only sizes of text were asked for.
        is_checked: whether files were found to have all that the model is made of.
        tensors: type and shape by the names that files have, of a model known by its config alone.
        text_sizes: sizes of the language model that a config leaves to its family.
    """

    versions: tuple[str, ...] = msgspec.field(default_factory=versions)
    layers: tuple[LayerSpec, ...] = ()
    is_checked: bool = False
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    text_sizes: dict[str, Any] = {}


def plain_layers(config: Settings) -> tuple[LayerSpec, ...]:
    """Return the layers of a Llama-like model, which all keep keys and values alone."""
    num_heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // num_heads
    kept = (config.get("num_key_value_heads") or num_heads, head)
    return (LayerSpec(keys=kept, values=kept),) * config["num_hidden_layers"]


def spec_key(config: Mapping[str, Any], headers: object = ()) -> str:
    """Return the hash of a config and of the headers' names, types and shapes."""
    return _sum_of(f"{json.dumps(config, sort_keys=True, default=str)}\n{headers!r}")


def kept_spec(key: str) -> ModelSpec | None:
    """Return the spec that was kept under this key; None if there is none or it is unreadable."""
    try:
        known, _, text = read_small(_spec_file(key), _MOST_BYTES).partition("\n")
        spec = msgspec.json.decode(text if known == _sum_of(text) else "", type=ModelSpec)
    except (OSError, ValueError, UserError):
        return None
    is_known = all(dtype in PLAIN_OF for dtype, _ in spec.tensors.values())
    return spec if spec.versions == versions() and is_known else None


def keep_spec(key: str, spec: ModelSpec) -> ModelSpec:
    """Return the spec, which is kept where there is a place for it."""
    text = msgspec.json.encode(spec).decode()
    with suppress(OSError, UserError):
        write_whole(_spec_file(key), f"{_sum_of(text)}\n{text}")
    return spec


def _spec_file(key: str) -> Path:
    return cache_folder() / "specs" / f"{key}.txt"


def _sum_of(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()
