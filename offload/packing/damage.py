"""What is damaged in a packed file, for `offload verify`."""

from pathlib import Path

from offload.checkpoint.numbers import NOT_FINITE, form_of, is_finite, top_bits
from offload.checkpoint.whole import Damage
from offload.encoding.base import PLAIN_OF
from offload.errors import ReadError, UserError
from offload.packing.format import PackedFile, original_parts, read_packed


def undecoded(path: Path) -> list[Damage]:
    """Return the tensors of a packed file that do not decode to the original finite numbers."""
    try:
        packed = read_packed(path)
    except UserError as error:
        return [Damage(path.name, "", str(error).removeprefix(f"{path}: "))]
    try:
        return _endless(packed)
    # the error names the first damaged tensor only
    except (UserError, ReadError):
        damage = list[Damage]()
    for name, entry in packed.tensors.items():
        try:
            damage += _endless(packed._replace(tensors={name: entry}))
        except (UserError, ReadError):
            damage.append(Damage(path.name, name, "does not decode to what was packed"))
    return damage


def _endless(packed: PackedFile) -> list[Damage]:
    """Return tensors that are not finite. Raises `UserError` where a checksum differs."""
    names = set[str]()
    for name, _, raw in original_parts(packed):
        coded = packed.tensors[name].coded
        if coded is not None:
            form = form_of(PLAIN_OF[coded.coding.dtype].name)
            assert form is not None, "it is what can be packed"
            if not is_finite(top_bits(raw, form), form):
                names.add(name)
    return [Damage(packed.path.name, name, NOT_FINITE) for name in packed.tensors if name in names]
