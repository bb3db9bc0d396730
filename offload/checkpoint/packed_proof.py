"""Packed files held against the checksums that packing left in them: tensors that do not decode to what was packed."""

from pathlib import Path

from offload.checkpoint.numbers import NOT_FINITE, form_of, is_finite, top_bits
from offload.checkpoint.packed_file import Packed, original_parts, read_packed
from offload.checkpoint.whole import Damage
from offload.errors import ReadError, UserError


def undecoded(path: Path) -> list[Damage]:
    """Tensors of a packed file that do not decode to what was packed, or to no numbers."""
    try:
        packed = read_packed(path)
    except UserError as error:
        return [Damage(path.name, "", str(error).removeprefix(f"{path}: "))]
    try:
        return _decoded(packed)
    except (UserError, ReadError):  # the first is not all
        return [one for name in packed.names for one in _decoding_alone(packed, name)]


def _decoding_alone(packed: Packed, name: str) -> list[Damage]:
    plain = {own: entry for own, entry in packed.plain.items() if own == name}
    coded = {own: entries for own, entries in packed.coded.items() if own == name}
    try:
        return _decoded(packed._replace(plain=plain, coded=coded))
    except (UserError, ReadError):
        return [Damage(packed.path.name, name, "does not decode to what was packed")]


def _decoded(packed: Packed) -> list[Damage]:
    """Numbers that are not finite. Raises `UserError` where a checksum is another."""
    names = set[str]()
    for name, _, raw in original_parts(packed):
        if name in packed.coded:
            form = form_of("F16" if packed.coded[name][0].dtype == "I8" else "BF16")
            assert form is not None, "it is what can be packed"
            if not is_finite(top_bits(raw, form), form):
                names.add(name)
    return [Damage(packed.path.name, name, NOT_FINITE) for name in packed.names if name in names]
