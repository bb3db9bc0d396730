"""Tables for a person at a terminal."""

from collections.abc import Iterable, Sequence


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """The first column to the left, figures to the right; what a row shorter than the others says stands as it is."""
    lines = list(rows)
    most = max(map(len, lines))
    widths = [max(len(row[i]) for row in lines if len(row) == most) for i in range(most)]
    widths[0] = max(len(row[0]) for row in lines if len(row) > 1)
    return "\n".join(_line(row, widths) for row in lines)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    if len(row) == 1:
        return row[0]
    figures = row[1:] if len(row) < len(widths) else [cell.rjust(w) for cell, w in zip(row, widths, strict=True)][1:]
    return "  ".join([row[0].ljust(widths[0]), *figures]).rstrip()
