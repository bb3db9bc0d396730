"""Tensors that a family's files have otherwise than its model: stacks turned round, layers shared.

transformers transposes stacks of experts where shapes ask for it, and so does this: by the widths
in the config alone, so that planning knows of it. Zamba2 has few blocks of attention, which stand
in many layers by turns; files hold each of them once. Here every layer that has one has its
tensors, which lie in the same bytes: a layer is read as any other is, and its bytes are counted
wherever it stands. Invariant: what a file holds is as it is.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.checkpoint.tensors import Coded, TensorEntry
from offload.encoding.base import ENCODINGS, WordsAlone

if TYPE_CHECKING:
    from torch import Tensor

    from offload.kernels.expansion import Expansion

_TYPES = ("qwen3_vl_moe", "qwen3_vl_moe_text")
_STACK = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
FAMILIES = ("zamba2",)
_SHARED = re.compile(r"^(.*layers\.)(\d{1,9})(\.shared_transformer\..+)$")
_HYBRID = re.compile(r"^.*layers\.(\d{1,9})\.linear\.weight$")


@dataclass(frozen=True, slots=True)
class Turned(WordsAlone):
    """Matrices of plain numbers whose rows are stored as columns.

    They are copied row by row when their module runs, as coded weights are expanded: a view would be
    multiplied with several times more slowly on a CPU.
    """

    kind: str  # the plain type, by the header's name
    is_transposed: bool = False  # in the model

    @property
    def name(self) -> str:
        return f"{self.kind}, columns before rows"

    @property
    def dtype(self) -> str:
        return ENCODINGS[self.kind].dtype

    @property
    def align_bytes(self) -> int:
        return ENCODINGS[self.kind].align_bytes

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of the numbers."""
        return ENCODINGS[self.kind].stored_bytes(shape)

    def expand(
        self,
        stored_B: "Tensor",
        companions: "Mapping[str, Tensor]",
        out: "Tensor",
        expansion: "Expansion",
    ) -> None:
        """See `Coding`."""
        *stack, rows, columns = out.shape
        number = ENCODINGS[self.kind].decode(stored_B, (*stack, columns, rows))
        out.copy_(number.transpose(-1, -2))


def with_turned_stacks(
    config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Return the tensors, of which stacks of plain numbers have the model's shapes."""
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    if config.get("model_type") not in _TYPES:
        return dict(tensors)
    hidden = text.get("hidden_size")
    width = text.get("moe_intermediate_size")
    if type(hidden) is not int or type(width) is not int:
        return dict(tensors)
    wanted = {"gate_up_proj": (2 * width, hidden), "down_proj": (hidden, width)}
    return {name: _turned(name, entry, wanted) for name, entry in tensors.items()}


def _turned(name: str, entry: TensorEntry, wanted: Mapping[str, tuple[int, int]]) -> TensorEntry:
    match = _STACK.search(name)
    if match is None or entry.coded is not None or entry.dtype not in ENCODINGS:
        return entry
    rows, columns = wanted[match[1]]
    if rows == columns or entry.shape[1:] != (columns, rows):
        return entry
    shape = (entry.shape[0], rows, columns)
    return entry._replace(shape=shape, coded=Coded(Turned(entry.dtype)))


def with_shared_layers(
    config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Return the tensors, and those that layers share under the names of each of them."""
    num_blocks = config.get("num_mem_blocks", 1)
    if config.get("model_type") not in FAMILIES or type(num_blocks) is not int:
        return dict(tensors)
    layers = sorted({int(match[1]) for match in map(_HYBRID.match, tensors) if match is not None})
    turn = {layer: index % max(1, num_blocks) for index, layer in enumerate(layers)}
    sharing = defaultdict[int, list[int]](list)
    for layer in layers:
        sharing[turn[layer]].append(layer)
    found = dict(tensors)
    for name, entry in tensors.items():
        match = _SHARED.match(name)
        if match is None:
            continue
        for layer in sharing.get(turn.get(int(match[2]), -1), ()):
            found.setdefault(f"{match[1]}{layer}{match[3]}", entry)
    return found
