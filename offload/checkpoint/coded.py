"""Which tensors of a checkpoint are the words and companions of one weight: told by their names, types and shapes.

The config only adds what these cannot say. Invariant: afterwards every weight has the one name that models know, and
no tensor belongs to two.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from offload.checkpoint.tensors import Coded, TensorEntry
from offload.encoding.base import Found
from offload.encoding.companions import AGAIN
from offload.encoding.formats import FORMATS
from offload.encoding.registry import ENCODINGS, STORED
from offload.errors import UserError

_SUFFIXES = sorted({suffix for one in FORMATS for suffix in one.suffixes}, key=len, reverse=True)


def with_codings(where: str, config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Tensors by the names of models; what a coded weight consists of is one entry.

    Raises:
        UserError: tensors of a weight contradict each other, or are of a version that is not known.
    """
    settings = _settings(config)
    known, grouped = dict[str, TensorEntry](), dict[str, dict[str, TensorEntry]]()
    for name, entry in tensors.items():
        suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)
        if suffix is None:
            known[name] = entry
        else:
            grouped.setdefault(name[: -len(suffix)], {})[suffix] = entry
    for stem, own in grouped.items():
        known |= _weights_of(where, stem, own, settings)
    return known


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    places = (config, inner if isinstance(inner, dict) else {})
    given = (place.get(key) for place in places for key in ("quantization_config", "compression_config"))
    return next((one for one in given if isinstance(one, dict)), {})


def _weights_of(
    where: str, stem: str, own: Mapping[str, TensorEntry], settings: Mapping[str, Any]
) -> dict[str, TensorEntry]:
    """One coded weight, or the tensors as they are."""
    if own.keys() == {".weight"} and own[".weight"].dtype in ENCODINGS:
        return {f"{stem}.weight": own[".weight"]}
    for one in FORMATS:
        claimed = {suffix: entry for suffix, entry in own.items() if suffix in one.suffixes}
        try:
            found = one.recognise(claimed, settings)
            if found is not None:
                others = {f"{stem}{suffix}": entry for suffix, entry in own.items() if suffix not in claimed}
                return {**others, f"{stem}{one.parameter}": _entry(found, claimed)}
        except ValueError as error:
            raise UserError(f"{where}: {stem}: {error}") from None
    return {f"{stem}{suffix}": entry for suffix, entry in own.items()}


def _entry(found: Found, own: Mapping[str, TensorEntry]) -> TensorEntry:
    for suffix in (*found.words, *found.companions):
        if own[suffix].dtype not in STORED:
            raise ValueError(f"{suffix} must be of a type that is known, is {own[suffix].dtype:.40}: {AGAIN}")
    words = [own[suffix] for suffix in found.words]
    if any(one.shard != other.shard or one.hi != other.lo for one, other in pairwise(words)):
        raise ValueError(
            f"{' and '.join(found.words)} must lie one behind the other in a file, they do not: pack it again"
        )
    coded = Coded(found.coding, tuple((suffix, own[suffix]) for suffix in found.companions))
    return words[0]._replace(shape=found.shape, hi=words[-1].hi, coded=coded)
