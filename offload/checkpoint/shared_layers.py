"""Layers that have the weights of earlier ones, as the tensors of each of them.

Zamba2 has few blocks of attention, which stand in many layers by turns; files hold each of them
once. Here every layer that has one has its tensors, which lie in the same bytes: a layer is read as
any other is, and its bytes are counted wherever it stands. Invariant: what a file holds is as it
is.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from offload.checkpoint.tensors import TensorEntry

FAMILIES = ("zamba2",)
_SHARED = re.compile(r"^(.*layers\.)(\d{1,9})(\.shared_transformer\..+)$")
_HYBRID = re.compile(r"^.*layers\.(\d{1,9})\.linear\.weight$")


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
